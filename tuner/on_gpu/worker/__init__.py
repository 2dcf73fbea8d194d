"""The process on the GPU that may die: launches, checks and times candidates."""
