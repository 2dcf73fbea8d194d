"""Schedules: the knobs of each kernel, the recipes that fix a model's numerics, and the promoted rows."""
