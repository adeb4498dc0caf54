"""Axes of the mesh beyond those of the core, one file each."""
