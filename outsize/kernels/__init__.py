"""Numerical building blocks with hand-written backward passes, each beside a plain twin in tests."""
