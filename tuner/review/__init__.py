"""Compare two sets of schedules or reports, check the change, and show it to a reviewer."""
