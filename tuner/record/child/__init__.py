"""The part of `record` that runs inside the recorded program.

The program's Python may be another one than this project's: nothing here imports the rest of it, nor anything but the standard
library, and Triton and torch once the program has imported them.
"""
