"""Mixers beside attention: what tokens leave for later ones is theirs to declare."""
