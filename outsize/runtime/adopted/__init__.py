"""Somebody else's module: its own forward, entered and left at its blocks."""
