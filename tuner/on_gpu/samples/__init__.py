"""Recorded samples, and the conclusions from them. Pure functions; no GPU."""
