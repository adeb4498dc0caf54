"""Somebody's own model under training: what `prepare` gives, and how its job is made."""
