"""The `triton` backend: the project's kernels as launches and CUDA graphs, and rounds on the device."""
