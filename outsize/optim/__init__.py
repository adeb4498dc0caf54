"""Optimizers: each updates flat ranges of a chunk, or whole matrices of it."""

from typing import TYPE_CHECKING

from outsize.lazy import importing

if TYPE_CHECKING:
    from outsize.optim.declared import StateSpec
    from outsize.optim.muon import Muon
    from outsize.optim.optimizer import SGD, AdamW, Optimizer, taker
    from outsize.optim.parse import OPTIMIZERS, Common, check_approximate
    from outsize.optim.schedule import LearningRate

__getattr__ = importing(__name__)
