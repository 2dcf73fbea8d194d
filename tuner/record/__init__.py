"""Records the Triton launches of any program, for a GPU that isn't there or on one that is."""
