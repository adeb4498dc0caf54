"""Optimizers of torch.optim as ours: their settings, their groups, and what is refused."""

from __future__ import annotations

import torch
from torch import nn

from outsize.errors import OutsizeError
from outsize.optim import SGD, AdamW, Optimizer
from outsize.optim.parse import parse
from outsize.runtime.recipe import Group


def converted(optimizer: Optimizer | torch.optim.Optimizer | str) -> Optimizer:
    if isinstance(optimizer, str):
        if optimizer == "sgd":
            return SGD()
        return parse(optimizer, AdamW.lr, AdamW.weight_decay, AdamW.betas)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    for name in ("amsgrad", "maximize", "nesterov", "dampening"):
        if any(group.get(name) for group in optimizer.param_groups):
            raise OutsizeError(f"optimizer option {name} is not supported; leave it out")
    first = optimizer.param_groups[0]
    for name in ("betas", "eps", "momentum"):
        if any(group.get(name) != first.get(name) for group in optimizer.param_groups):
            raise OutsizeError(f"optimizer groups differ in {name}; expected one value for all")
    if type(optimizer) is torch.optim.AdamW:
        return AdamW(1.0, tuple(first["betas"]), first["eps"], 0.0)
    if type(optimizer) is torch.optim.SGD:
        return SGD(1.0, first["momentum"], 0.0)
    raise OutsizeError(
        f"optimizer {type(optimizer).__name__} is not supported; expected torch.optim.AdamW or SGD,"
        " 'adamw' or 'sgd'"
    )


def groups_now(optimizer: torch.optim.Optimizer) -> list[Group]:
    """Settings as they are now: a scheduler may have changed them."""
    return [Group(g["weight_decay"], float(g["lr"])) for g in optimizer.param_groups]


def group_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    index = {id(p): i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
    named = dict(model.named_parameters())
    for name, p in named.items():
        if p.requires_grad and id(p) not in index:
            raise OutsizeError(
                f"parameter {name!r} is in no group of the optimizer; give it to the optimizer or"
                " set its requires_grad to False"
            )
    return {name: index.get(id(p), 0) for name, p in named.items()}
