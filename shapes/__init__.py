"""Model shapes and GPU targets: what is computed, and on what."""
