"""One worker's part of a native decoder, and its products."""
