"""Decode rates, a naive baseline, and the roofline of a step."""
