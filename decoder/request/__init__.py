"""One request on one target: its tokens, its text, and its rounds driven from Python."""
