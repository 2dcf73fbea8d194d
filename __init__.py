"""Lets type checkers and editors resolve the relative imports between the folders; not installed."""
