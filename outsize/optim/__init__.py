"""Optimizers: each updates flat ranges of a chunk."""

from outsize.optim.optimizer import SGD, AdamW, Optimizer, parse
from outsize.optim.schedule import LearningRate

__all__ = ["SGD", "AdamW", "LearningRate", "Optimizer", "parse"]
