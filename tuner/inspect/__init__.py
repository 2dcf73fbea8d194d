"""Judges compiled kernels of any compiler: Triton caches, bundles, cubins, PTX, fat binaries."""
