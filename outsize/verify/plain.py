"""The plain PyTorch loop that plans are compared with: one process, the whole step at once,
autograd, torch.optim.

It shares with what it judges the modules of the model and nothing else: no schedule, no chunk of
states, no sink of gradients, no collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outsize.optim import Optimizer
from outsize.plan import Precision
from outsize.verify.rounding import Rounding, at
from outsize.verify.updates import Begun, by_factor


@dataclass(frozen=True)
class Recipe:
    """How both train. rates: the learning rate of each step; clip: largest norm of the gradient;
    matrices: names of what a matrix optimizer updates as wholes; begun: None from first values;
    factors: by name, those on the learning rate that are not 1."""

    optimizer: Optimizer
    rates: tuple[float, ...]
    clip: float | None = None
    matrices: frozenset[str] = frozenset()
    begun: Begun | None = None
    factors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """What a step gave. norm: of the gradient before it is clipped; gradients: as the optimizer got
    them, None where none arrived; weights: after the update, in what training goes on from."""

    loss: float
    norm: float
    gradients: Mapping[str, Tensor | None]
    weights: Mapping[str, Tensor]


@dataclass(frozen=True)
class Plain:
    """A model in plain PyTorch. loss: of a whole step, (sum, what to divide it by); masters: by
    name, what the optimizer updates: the parameters themselves, or their copies."""

    model: nn.Module
    loss: Callable[[Any], tuple[Tensor, float]]
    masters: Mapping[str, Tensor]


def masters_of(
    model: nn.Module, precision: Precision, values: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """Give every parameter of a model its first value; gives what the optimizer is to update."""
    found: dict[str, Tensor] = {}
    master = None if precision.master is None else getattr(torch, precision.master)
    for name, parameter in model.named_parameters():
        value = values(name)
        parameter.data = value.to(parameter.dtype)
        if parameter.requires_grad:
            found[name] = parameter if master is None else value.to(master, copy=True)
    return found


def train(
    plain: Plain, recipe: Recipe, batches: Sequence[Any], rounding: Rounding | None = None
) -> list[Step]:
    """Train on batches, one a step. rounding: moves every result."""
    return list(steps(plain, recipe, batches, rounding))


def steps(
    plain: Plain, recipe: Recipe, batches: Iterable[Any], rounding: Rounding | None = None
) -> Iterator[Step]:
    """The same step by step."""
    if rounding is not None:
        rounding.begin(plain.model, plain.masters)
    at = dict[str, Tensor]()
    how = (recipe.matrices, rounding, recipe.begun, at)
    update = by_factor(recipe.factors, recipe.optimizer, plain.masters, *how)
    for batch, rate in zip(batches, recipe.rates, strict=True):
        with rounding or nullcontext():
            if at:
                _take(plain, at, rounding)
            found = _step(plain, recipe.clip, batch, partial(update, rate), rounding)
        yield found


def _step(
    plain: Plain,
    clip: float | None,
    batch: Any,
    update: Callable[[], None],
    rounding: Rounding | None,
) -> Step:
    plain.model.zero_grad()
    total, count = plain.loss(batch)
    loss = total / count
    loss.backward()
    _hand_over(plain)
    with at(rounding, 0.0 if rounding is None else rounding.master):
        norm = _norm(plain.masters)
        if clip is not None:
            size = torch.tensor(norm, dtype=torch.float64)
            nn.utils.clip_grads_with_norm_(plain.masters.values(), clip, size)
        every = plain.masters.items()
        gradients = {n: None if w.grad is None else w.grad.clone() for n, w in every}
        update()
    _hand_back(plain)
    if rounding is not None:
        rounding.copied(plain.model, plain.masters)
    weights = {name: w.detach().clone() for name, w in every}
    return Step(float(loss.detach()), norm, gradients, weights)


def _hand_over(plain: Plain) -> None:
    """Gradients to the copies that are updated."""
    for name, parameter in plain.model.named_parameters():
        copy = plain.masters.get(name, parameter)
        if copy is not parameter:
            copy.grad = None if parameter.grad is None else parameter.grad.to(copy.dtype)


def _hand_back(plain: Plain) -> None:
    """Updated copies to the parameters, rounded."""
    for name, parameter in plain.model.named_parameters():
        copy = plain.masters.get(name, parameter)
        if copy is not parameter:
            parameter.data.copy_(copy)


def _take(plain: Plain, at: Mapping[str, Tensor], rounding: Rounding | None) -> None:
    """The weights that gradients are taken at to the parameters, rounded."""
    for name, parameter in plain.model.named_parameters():
        if name in at:
            parameter.data.copy_(at[name])
    if rounding is not None:
        rounding.copied(plain.model, plain.masters)


def _norm(masters: Mapping[str, Tensor]) -> float:
    squares = [
        float(w.grad.double().square().sum()) for w in masters.values() if w.grad is not None
    ]
    return float(sum(squares) ** 0.5)
