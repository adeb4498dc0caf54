"""Numerical building blocks with hand-written backward passes, each with a plain twin in tests."""
