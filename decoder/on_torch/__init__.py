"""The reference backend: row-invariant operations on torch, on any machine."""
