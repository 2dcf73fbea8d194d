"""The decoder's commands, one a file. They import torch when they run, not before."""
