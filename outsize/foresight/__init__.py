"""Foresight: what a training step takes and holds on hardware that is not here."""
