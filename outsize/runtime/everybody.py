"""Everybody: the few numbers of a step that all workers must agree on, each in one small sum.

The count of targets, before the step; the gradient's norm, the loss and which parameters received a
gradient anywhere, at NORM. Each logical element counts once in the norm: of workers that hold the
same one, the first counts it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from outsize.collectives import World, along, everyone
from outsize.memory import ChunkTable
from outsize.parallel.shards import Shards
from outsize.runtime.placement import Placement


class Everybody:
    """The sums of one worker's job."""

    def __init__(self, world: World, placement: Placement) -> None:
        self._alone = world.mesh.size == 1
        self._tables, self._every = placement.tables, placement.every
        self._chunks_of = placement.chunks_of
        self._first = [
            table.piped or placement.holders(table)[0] == placement.turn for table in self._tables
        ]
        self._tensor = world.mesh.index("tensor", world.rank)
        self._replica = _replica(placement.shards)
        self._data, self._all = along(world, "data"), everyone(world)
        exact = placement.dtypes.parameters is torch.float64
        self._like = torch.empty(0, dtype=torch.float64 if exact else torch.float32)  # of a loss
        self._line = along(world, "pipeline")

    def count(self, mine: Tensor) -> float:
        """Valid targets of the whole step."""
        return float(self._data.all_reduce(mine).item())

    def evaluated(self, total: float, count: Tensor) -> tuple[float, float]:
        """Losses and targets of all rows. total: 0 where the last stage is not."""
        both = torch.tensor([total, float(count)], dtype=torch.float64)
        loss, targets = self._data.all_reduce(both).tolist()
        whole = torch.tensor(loss, dtype=torch.float64)
        return float(self._line.all_reduce(whole)), targets

    def sums(
        self, squares: Mapping[int, float], loss: Tensor | None, touched: set[str]
    ) -> tuple[float, Tensor]:
        """The square of the gradient's norm, and the loss. `touched` becomes what is anywhere."""
        if self._alone:
            assert loss is not None
            return sum(squares[index] for index in sorted(squares)), loss
        mine = 0.0 if self._tensor or loss is None else float(loss)
        total, whole = self._agree(self._counted(squares), mine, _names(self._every), touched)
        return total, self._like.new_tensor(whole) if loss is None else loss.new_tensor(whole)

    def stage(self, stage: int, squares: Mapping[int, float], touched: set[str]) -> float:
        """The same for a stage that is updated before NORM; without the loss."""
        if self._alone:
            return sum(squares.values())
        names = _names(self._tables[index] for index in self._chunks_of[stage])
        return self._agree(self._counted(squares), 0.0, names, touched)[0]

    def _counted(self, squares: Mapping[int, float]) -> float:
        """Of squares by chunk, those that this worker counts."""
        return sum(
            squares[index]
            for index in sorted(squares)
            if not self._replica
            and not self._tensor % self._tables[index].shared
            and self._first[index]
        )

    def _agree(
        self, squares: float, loss: float, names: list[str], touched: set[str]
    ) -> tuple[float, float]:
        vector = [squares, loss, *_marks(names, touched)]
        total, whole, *marks = self._all.all_reduce(
            torch.tensor(vector, dtype=torch.float64)
        ).tolist()
        touched.update(name for name, mark in zip(names, marks, strict=True) if mark)
        return total, whole


def _names(tables: Iterable[ChunkTable]) -> list[str]:
    return [slot.name for table in tables if table.trainable for slot in table.slots]


def _marks(names: Iterable[str], touched: Collection[str]) -> list[float]:
    return [float(name in touched) for name in names]


def _replica(shards: Shards) -> int:
    """Of workers that hold the same optimizer states, which one this is."""
    return shards.levels[3].digit
