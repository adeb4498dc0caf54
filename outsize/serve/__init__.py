"""Models that generate, whatever their weights rest in: memory, files, several workers."""
