"""Training whose step is not one forward and one backward pass."""
