"""Optimizers by the names that configurations use."""

from __future__ import annotations

from outsize.errors import OutsizeError, nearest
from outsize.optim.muon import Muon
from outsize.optim.optimizer import SGD, AdamW, Optimizer

NAMES = ("adamw", "muon", "sgd")


def parse(name: str, lr: float, weight_decay: float, betas: tuple[float, float]) -> Optimizer:
    """The optimizer of a configuration. betas[0] is SGD's momentum; Muon's betas are those of the
    AdamW that updates what is no matrix of a block, and lr serves both."""
    adamw = AdamW(lr, betas, weight_decay=weight_decay)
    if name == "adamw":
        return adamw
    if name == "muon":
        return Muon(lr, weight_decay=weight_decay, rest=adamw)
    if name == "sgd":
        return SGD(lr, betas[0], weight_decay)
    raise OutsizeError(f"optimizer {name!r} is not known{nearest(name, NAMES)}")
