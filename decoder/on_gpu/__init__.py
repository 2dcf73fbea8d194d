"""The `triton` backend: the project's kernels as launches and CUDA graphs, rounds resident on the device."""
