"""The updates of a plain run: torch.optim's; Muon and 8-bit AdamW as their papers have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor
from torch.nn import functional as F

from outsize.errors import OutsizeError
from outsize.kernels.blockwise import table
from outsize.optim import SGD, AdamW, Muon, Optimizer
from outsize.optim.optimizer import Apart, Rates
from outsize.techniques.optim.adamw8bit import AdamW8Bit
from outsize.verify.rounding import SUMS, Rounding, at, roundoff

Update = Callable[[float], None]  # with a learning rate
NEAR = 64 * SUMS  # of a moment: what rounding in float32 brings it to the other side of a border by


@dataclass(frozen=True)
class Begun:
    """Where training went on. updates: how many each parameter has had; states: as a checkpoint
    names them, "parameter.state"."""

    updates: Mapping[str, int]
    states: Mapping[str, Tensor]


def by_factor(
    factors: Mapping[str, float],
    optimizer: Optimizer,
    weights: Mapping[str, Tensor],
    matrices: frozenset[str],
    rounding: Rounding | None = None,
    begun: Begun | None = None,
    at: dict[str, Tensor] | None = None,
) -> Update:
    """`updater` for weights that have factors on their learning rate: 1 where none is named."""
    each = {
        factor: updater(
            optimizer,
            {n: w for n, w in weights.items() if factors.get(n, 1.0) == factor},
            *(matrices, rounding, begun, at),
        )
        for factor in sorted({factors.get(name, 1.0) for name in weights})
    }

    def update(rate: float) -> None:
        for factor, part in each.items():
            part(rate * factor)

    return update


def updater(
    optimizer: Optimizer,
    weights: Mapping[str, Tensor],
    matrices: frozenset[str],
    rounding: Rounding | None = None,
    begun: Begun | None = None,
    at: dict[str, Tensor] | None = None,
) -> Update:
    """What updates weights from their `.grad`: matrices decay, vectors do not.

    matrices: names of those that a matrix optimizer takes; rounding: moves what is computed in
    bfloat16 whatever the weights are; begun: None from first values; at: is given the weights at
    which the next gradients are taken, where these are others. OutsizeError for an optimizer that
    cannot be begun in the middle.
    """
    parts, rest, others = list[Update](), weights, optimizer
    if optimizer.rest is not None:
        here = {n: w for n, w in weights.items() if n in matrices and optimizer.takes((*w.shape,))}
        rest = {name: w for name, w in weights.items() if name not in here}
        parts, others = [_own(optimizer, here, rounding)], optimizer.rest
        if begun is not None:
            raise OutsizeError(
                f"verify: a run with {type(optimizer).__name__} is replayed from its first values;"
                " leave --from out"
            )
    parts.append(_stepping(others, rest, optimizer.weight_decay, begun, at))

    def update(rate: float) -> None:
        for part in parts:
            part(rate)

    return update


def _stepping(
    optimizer: Optimizer,
    weights: Mapping[str, Tensor],
    decay: float,
    begun: Begun | None,
    at: dict[str, Tensor] | None = None,
) -> Update:
    if not weights:
        return lambda _: None
    if not isinstance(optimizer, AdamW | SGD):
        return _itself(optimizer, weights, decay, begun, at)
    groups = [
        {"params": [w for w in weights.values() if w.ndim >= 2], "weight_decay": decay},
        {"params": [w for w in weights.values() if w.ndim < 2], "weight_decay": 0.0},
    ]
    made = _made(optimizer, [group for group in groups if group["params"]])
    if begun is not None:
        for name, weight in weights.items():
            made.state[weight] = _state(optimizer, name, weight, begun)

    def update(rate: float) -> None:
        for group in made.param_groups:
            group["lr"] = rate
        made.step()

    return update


def _state(optimizer: Optimizer, name: str, weight: Tensor, begun: Begun) -> dict[str, Tensor]:
    """A parameter's state as torch.optim has it."""
    found = {s.name: begun.states[f"{name}.{s.name}"].to(weight) for s in optimizer.states}
    if isinstance(optimizer, SGD):
        return {"momentum_buffer": found["momentum"]} if found else {}
    return {"step": torch.tensor(float(begun.updates.get(name, 0))), **found}


def _made(optimizer: AdamW | SGD, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    match optimizer:
        case AdamW():
            return torch.optim.AdamW(
                groups, lr=1.0, betas=optimizer.betas, eps=optimizer.eps, foreach=False, fused=False
            )
        case SGD():
            return torch.optim.SGD(groups, lr=1.0, momentum=optimizer.momentum, foreach=False)


def _own(optimizer: Optimizer, weights: Mapping[str, Tensor], rounding: Rounding | None) -> Update:
    match optimizer:
        case Muon():
            return _muon(optimizer, weights, rounding)
        case AdamW8Bit():
            return _in_8_bits(optimizer, weights, rounding)
    return _itself(optimizer, weights, optimizer.weight_decay, None)


def _itself(
    optimizer: Optimizer,
    weights: Mapping[str, Tensor],
    decay: float,
    begun: Begun | None,
    at: dict[str, Tensor] | None = None,
) -> Update:
    """One without a twin here, by its own update of whole parameters: what is compared is where
    its states are cut and rest and what workers sum; its maths are its own test's."""
    steps = {} if begun is None else dict(begun.updates)
    kept: dict[str, dict[str, Tensor]] = {}

    def first(name: str, weight: Tensor) -> dict[str, Tensor]:
        found = dict[str, Tensor]()
        for spec in optimizer.states:
            shape = weight.shape if spec.shaped else (spec.elements(tuple(weight.shape)),)
            dtype = spec.dtype or weight.dtype
            found[spec.name] = torch.full(tuple(shape), spec.initial, dtype=dtype)
            if begun is not None:
                found[spec.name].copy_(begun.states[f"{name}.{spec.name}"])
        return found

    def place(name: str, weight: Tensor, states: Mapping[str, Tensor]) -> None:
        if at is not None and isinstance(optimizer, Apart):
            at[name] = torch.empty_like(weight, requires_grad=False)
            optimizer.taken_at(weight.detach(), states, at[name])

    if begun is not None:
        for name, weight in weights.items():
            place(name, weight, first(name, weight))

    def update(rate: float) -> None:
        for name, weight in weights.items():
            if weight.grad is None:
                continue
            steps[name] = steps.get(name, 0) + 1
            states = kept.setdefault(name, first(name, weight) if name not in kept else {})
            rates = Rates(steps[name], rate, decay if weight.ndim > 1 else 0.0, name)
            optimizer.update(weight.detach(), weight.grad, states, rates)
            place(name, weight, states)

    return update


def _muon(optimizer: Muon, weights: Mapping[str, Tensor], rounding: Rounding | None) -> Update:
    """One matrix at a time, each whole."""
    means: dict[str, Tensor] = {}

    def update(rate: float) -> None:
        for name, weight in weights.items():
            if weight.grad is None:
                continue
            mean = means.setdefault(name, torch.zeros_like(weight))
            mean.mul_(optimizer.momentum).add_(weight.grad * (1 - optimizer.momentum))
            towards = mean
            if optimizer.nesterov:
                towards = weight.grad * (1 - optimizer.momentum) + mean * optimizer.momentum
            with torch.no_grad():
                weight.mul_(1 - rate * optimizer.weight_decay)
                for one, way in zip(_matrices(weight), _matrices(towards), strict=True):
                    with at(rounding, roundoff("bfloat16")):
                        towards = _direction(way, optimizer.iterations)
                    one.sub_(rate * _factor(optimizer, one) * towards)

    return update


def _matrices(stack: Tensor) -> list[Tensor]:
    return [stack.detach()] if stack.ndim == 2 else list(stack.detach())


def _factor(optimizer: Muon, matrix: Tensor) -> float:
    rows, columns = matrix.shape
    if optimizer.scale == "original":
        return sqrt(max(1.0, rows / columns))
    return 0.2 * sqrt(max(rows, columns))


def _direction(matrix: Tensor, iterations: int) -> Tensor:
    """Newton-Schulz: x <- a x + (b x x' + c (x x')^2) x. bfloat16, in float64 for float64."""
    dtype = torch.float64 if matrix.dtype == torch.float64 else torch.bfloat16
    x = matrix.to(dtype)
    if x.shape[0] > x.shape[1]:
        return _direction(matrix.mT, iterations).mT
    x = x / max(float(x.norm()), 1e-7)
    for _ in range(iterations):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def _in_8_bits(
    optimizer: AdamW8Bit, weights: Mapping[str, Tensor], rounding: Rounding | None
) -> Update:
    """AdamW, of whose moments each update finds what 8 bits have kept. What lies so near to the
    border of two codes that rounding decides which it has, has the lower one in one moved run and
    the upper one in the next: few such numbers would be met by chance in few runs."""
    lean = 1.0 + (0.0 if rounding is None else rounding.side * NEAR)
    block, (one, two) = optimizer.settings.block, optimizer.rest.betas
    kept: dict[str, tuple[int, Tensor, Tensor]] = {}

    def update(rate: float) -> None:
        for name, weight in weights.items():
            if weight.grad is None:
                continue
            step, mean, square = kept.get(name, (0, *torch.zeros(2, *weight.shape)))
            step, gradient = step + 1, weight.grad.to(weight.dtype)
            mean = one * mean + (1 - one) * gradient
            square = two * square + (1 - two) * gradient.square()
            deviation = (square / (1 - two**step)).sqrt() + optimizer.rest.eps
            with torch.no_grad():
                weight.mul_(1 - rate * optimizer.weight_decay)
                weight.sub_(rate / (1 - one**step) * mean / deviation)
            kept[name] = (
                step,
                _rounded(mean, True, block, lean),
                _rounded(square, False, block, lean),
            )

    return update


def _rounded(x: Tensor, signed: bool, block: int, lean: float) -> Tensor:
    """In 8 bits and back: of every block the largest magnitude, as float32, times a value of the
    table for each element. lean: by how much each is taken for larger, as a part of it."""
    rows = F.pad(x.flatten(), (0, -x.numel() % block)).view(-1, block)
    scales = rows.abs().amax(1, keepdim=True).float().to(x.dtype)
    codes = table(signed).codes(rows / scales.where(scales > 0, 1) * lean)
    values = table(signed).values.to(x.dtype)[codes.int()] * scales
    return values.flatten()[: x.numel()].view(x.shape)
