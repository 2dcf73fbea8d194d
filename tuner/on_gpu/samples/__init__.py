"""Recorded samples, and what may be concluded from them. Pure functions; no GPU."""
