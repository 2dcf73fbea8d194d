"""Model shapes and GPU targets."""
