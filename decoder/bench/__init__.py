"""Decode rates, a naive baseline, and the physics of a step."""
