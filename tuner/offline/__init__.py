"""Compile and judge schedules without a GPU: space, compile, inspect, report."""
