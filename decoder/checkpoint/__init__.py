"""Read a model from disk or make a random one: configuration, tensors, precision, RoPE."""
