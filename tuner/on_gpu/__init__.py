"""Time the survivors on a GPU, ask the full model, and make rows to promote."""
