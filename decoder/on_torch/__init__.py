"""The reference backend: row-invariant operations in torch, on any machine."""
