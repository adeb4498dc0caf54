"""Training runs: their values, the loop, metrics, progress, reports."""
