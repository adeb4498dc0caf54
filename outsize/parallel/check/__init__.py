"""The checker: layouts through a whole model, before anything starts."""
