"""Compilers: what a plan does with a model, as one worker's list. One file a kind of list."""
