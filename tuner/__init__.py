"""The tuner: space, compile, inspect, report; one step a file."""
