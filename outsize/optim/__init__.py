"""Optimizers: each updates flat ranges of a chunk, or whole matrices of it."""

from outsize.optim.muon import Muon
from outsize.optim.optimizer import SGD, AdamW, Optimizer, taker
from outsize.optim.parse import parse
from outsize.optim.schedule import LearningRate

__all__ = ["SGD", "AdamW", "LearningRate", "Muon", "Optimizer", "parse", "taker"]
