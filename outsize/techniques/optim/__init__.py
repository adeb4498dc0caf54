"""Optimizers of publications."""
