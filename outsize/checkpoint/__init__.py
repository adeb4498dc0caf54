"""Stores: safetensors files read without trust, Hugging Face directories, training checkpoints."""
