"""Reads a model from disk or makes a random one: configuration, tensors, RoPE."""
