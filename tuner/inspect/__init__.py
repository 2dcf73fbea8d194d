"""Judge what is compiled already, by whatever compiler: Triton caches, bundles, cubins, PTX, fat binaries."""
