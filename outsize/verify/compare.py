"""Two runs side by side: how far each parameter's gradient and updated weight are apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite

from torch import Tensor

from outsize.verify.plain import Step

LIMIT = 1e-10  # float64 rounds at 1e-16; depth, softmax and Adam's division cost some digits
ROUGH = 1e-4  # where modules compute in float32 inside, which rounds at 6e-8
FLOOR = 1e-3  # of the largest gradient: some are zero but for rounding


@dataclass(frozen=True)
class Row:
    """One parameter. ratio: the factor that the plan's gradient has on the plain one, at the step
    where it is farthest from 1; None where the plain one is zero. gradient, weight: the largest
    difference over all steps, of the largest value of the plain one (FLOOR of the model's at
    least; of weights the model's largest)."""

    name: str
    ratio: float | None
    gradient: float
    weight: float


@dataclass(frozen=True)
class Comparison:
    """A run against another. losses, norms: (of the one, of the other) by step. differ: workers
    whose bits are not those of the first."""

    precision: str
    rows: tuple[Row, ...]
    losses: tuple[tuple[float, float], ...]
    norms: tuple[tuple[float, float], ...]
    differ: tuple[int, ...] = ()

    @property
    def loss(self) -> float:
        """The largest difference of the loss, as a part of it."""
        return max(_apart(a, b) for a, b in self.losses)

    @property
    def norm(self) -> float:
        """The largest difference of the gradient's norm, as a part of it."""
        return max(_apart(a, b) for a, b in self.norms)

    @property
    def gradient(self) -> float:
        return max((row.gradient for row in self.rows), default=0.0)

    @property
    def weight(self) -> float:
        return max((row.weight for row in self.rows), default=0.0)

    @property
    def worst(self) -> float:
        """The largest difference of anything; infinite where workers differ among themselves."""
        return inf if self.differ else max(self.loss, self.norm, self.gradient, self.weight)

    def holds(self, limit: float = LIMIT) -> bool:
        """Whether nothing differs by more."""
        return self.worst <= limit


def compare(
    mine: Sequence[Step], plain: Sequence[Step], precision: str, differ: Sequence[int] = ()
) -> Comparison:
    """A run under a plan against a plain one."""
    pairs = list(zip(mine, plain, strict=True))
    return Comparison(
        precision,
        tuple(_rows(pairs)),
        tuple((a.loss, b.loss) for a, b in pairs),
        tuple((a.norm, b.norm) for a, b in pairs),
        tuple(differ),
    )


def _rows(pairs: Sequence[tuple[Step, Step]]) -> list[Row]:
    names = dict.fromkeys(n for step in pairs[0] for n in (*step.weights, *step.gradients))
    largest = [(_largest(plain.gradients), _largest(plain.weights)) for _, plain in pairs]
    return [_row(name, pairs, largest) for name in names]


def _row(
    name: str, pairs: Sequence[tuple[Step, Step]], largest: Sequence[tuple[float, float]]
) -> Row:
    """largest: of each step's plain gradients and weights."""
    ratios, gradients, weights = [], [], []
    for (mine, plain), (gradient, weight) in zip(pairs, largest, strict=True):
        own, other = mine.gradients.get(name), plain.gradients.get(name)
        ratios.append(_ratio(own, other))
        gradients.append(_distance(own, other, FLOOR * gradient))
        weights.append(_distance(mine.weights.get(name), plain.weights.get(name), weight))
    known = [ratio for ratio in ratios if ratio is not None]
    ratio = max(known, key=lambda r: abs(r - 1) if isfinite(r) else inf, default=None)
    return Row(name, ratio, max(gradients), max(weights))


def _largest(tensors: Mapping[str, Tensor | None]) -> float:
    return max((_top(t) for t in tensors.values() if t is not None), default=0.0)


def _top(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def _ratio(mine: Tensor | None, plain: Tensor | None) -> float | None:
    if plain is None or not _top(plain):
        return None
    if mine is None or mine.shape != plain.shape:
        return 0.0
    wide = plain.double()
    return float((mine.double() * wide).sum() / wide.square().sum())


def _distance(mine: Tensor | None, plain: Tensor | None, least: float) -> float:
    """The largest difference, as a part of the plain one's largest value or of `least`. A gradient
    that did not arrive counts as zeros."""
    if mine is None and plain is None:
        return 0.0
    if mine is not None and plain is not None and mine.shape != plain.shape:
        return inf
    zero = 0.0
    difference = (zero if mine is None else mine.detach().double()) - (
        zero if plain is None else plain.detach().double()
    )
    assert isinstance(difference, Tensor)
    found = _top(difference)
    size = max(least, 0.0 if plain is None else _top(plain))
    if not isfinite(found):
        return inf
    return found / size if size else (inf if found else 0.0)


def _apart(mine: float, plain: float) -> float:
    if not (isfinite(mine) and isfinite(plain)):
        return inf
    return abs(mine - plain) / abs(plain) if plain else abs(mine)
