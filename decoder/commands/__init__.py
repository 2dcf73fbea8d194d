"""The decoder's commands, one per file. They import torch only when they run."""
