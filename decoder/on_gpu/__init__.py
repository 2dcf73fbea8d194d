"""The `triton` backend: the project's kernels as launches and CUDA graphs, rounds that live on the device."""
