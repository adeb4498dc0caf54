"""Whether a loss that should be a sum is a mean.

Beside `count` a loss must give a sum: the step divides it by the count. A mean would be divided
twice, and training would go on many times too slowly without a word. The first time that a loss is
asked for, it is asked of halves of its rows too: of a sum they add up to the whole, of a mean they
weigh up to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.runtime.adopted.absent import Absent
from outsize.torch_private import FakeTensor, tree_leaves, tree_map
from outsize.train.prepared.batches import cut, has_rows, rows_of

Loss = Callable[[Any, Any], Tensor]
Count = Callable[[Any], float]
_CLOSE = 1e-2  # of the whole: what rounding in half precision leaves of a mean


class SumOfRows:
    """A loss, looked at when it first has values."""

    def __init__(self, loss: Loss, count: Count) -> None:
        self._loss, self._count, self._seen = loss, count, False

    def __call__(self, output: Any, batch: Any) -> Tensor:
        if self._seen or not has_values(output):
            return self._loss(output, batch)
        self._seen = True
        found = self._asked(output, batch)  # before the whole, which holds more while it is made
        whole = self._loss(output, batch)
        value = float(whole.detach())
        mean = found is not None and any(_close(one, value) for one in found[1])
        if found is not None and mean and not _close(found[0], value):
            raise OutsizeError(
                "loss gives a mean, and count says what to divide by: it would be divided twice;"
                ' expected the sum over what count counts, as with reduction="sum"'
            )
        return whole

    @torch.no_grad()
    def _asked(self, output: Any, batch: Any) -> tuple[float, tuple[float, ...]] | None:
        """What the whole is if the loss is a sum, and if it is a mean, from parts of the rows; None
        where it cannot be asked."""
        rows = rows_of(batch)
        if not any(has_rows(leaf, rows) for leaf in tree_leaves(output)):
            return None  # its rows are not those of the batch
        try:
            return self._doubled(output, batch) if rows == 1 else self._halves(output, batch, rows)
        except (OutsizeError, RuntimeError, ValueError, IndexError):
            return None  # it takes no other number of rows, or there is no memory to spare

    def _doubled(self, output: Any, batch: Any) -> tuple[float, tuple[float, ...]]:
        twice = float(self._loss(_twice(output), _twice(batch)))
        return twice / 2, (twice,)

    def _halves(self, output: Any, batch: Any, rows: int) -> tuple[float, tuple[float, ...]]:
        half = rows // 2
        spans = ((0, half), (half, rows))
        parts = [cut(batch, *span, rows) for span in spans]
        values = [
            float(self._loss(cut(output, *span, rows), part))
            for span, part in zip(spans, parts, strict=True)
        ]
        weights = ([float(self._count(part)) for part in parts], [stop - at for at, stop in spans])
        return sum(values), tuple(_mean(values, each) for each in weights)


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Of those that weigh anything: the mean over no target is no number."""
    pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    return sum(v * w for v, w in pairs) / sum(w for _, w in pairs) if pairs else math.nan


def _close(one: float, other: float) -> bool:
    return math.isfinite(other) and math.isclose(one, other, rel_tol=_CLOSE)


def has_values(output: Any) -> bool:
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    return bool(leaves) and not any(isinstance(leaf, FakeTensor | Absent) for leaf in leaves)


def _twice(tree: Any) -> Any:
    return tree_map(
        lambda leaf: leaf.expand(2, *leaf.shape[1:]) if has_rows(leaf, 1) else leaf, tree
    )
