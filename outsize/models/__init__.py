"""Decoders described by a Hugging Face config.json, written once against the seams."""
