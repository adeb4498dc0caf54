"""Totals: the few numbers of a step that all workers must agree on, each in one small sum.

The count of targets, before the step; the gradient's norm, the loss and which parameters received a
gradient anywhere, at NORM. Each logical element counts once in the norm: of workers that hold the
same one, the first counts it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from outsize.collectives import Axis, World, along, everyone, together
from outsize.memory import ChunkTable
from outsize.schedule.chunks import LINE, Chunks


class Totals:
    """The sums of one worker's job. alone: there is no other."""

    def __init__(self, world: World, chunks: Chunks) -> None:
        self.alone, self._axes = world.mesh.size == 1, world.mesh.axes
        self._tables, self._every = chunks.tables, chunks.every
        self._updated = frozenset(_names(self._tables))
        self._chunks_of = chunks.of_stage
        self._counts = [_counts(world, chunks, table) for table in self._tables]
        self._first = _first(world, lambda axis: not axis.batch and axis.cuts != "stages")
        self._batch = together(world, lambda axis: axis.batch, "agreement")
        self._all = everyone(world, "agreement")
        exact = chunks.kept.dtypes.parameters is torch.float64
        self._like = torch.empty(0, dtype=torch.float64 if exact else torch.float32)  # of a loss
        self._line = along(world, "pipeline", "agreement")

    def count(self, mine: Tensor) -> tuple[float, int]:
        """Weight and number of the targets of the whole step."""
        weight, count = self._batch.all_reduce(mine.clone()).tolist()
        return weight, int(count)

    def most(self, mine: int) -> int:
        """The largest number of those whose layers need what others compute of theirs."""
        if not any(axis.parts for axis in self._axes):
            return mine
        return int(self._batch.all_reduce(torch.tensor([mine], dtype=torch.float64), "max"))

    def evaluated(self, total: float, weight: float) -> tuple[float, float]:
        """Losses and weight of the targets of all rows. total: 0 where the last stage is not."""
        both = torch.tensor([total, weight], dtype=torch.float64)
        loss, targets = self._batch.all_reduce(both).tolist()
        whole = torch.tensor(loss, dtype=torch.float64)
        return float(self._line.all_reduce(whole)), targets

    def sums(
        self, squares: Mapping[int, float], loss: Tensor | None, touched: set[str]
    ) -> tuple[float, Tensor]:
        """The square of the gradient's norm, and the loss. `touched` becomes what is anywhere, of
        the parameters that this worker updates."""
        if self.alone:
            assert loss is not None
            return sum(squares[index] for index in sorted(squares)), loss
        mine = float(loss) if self._first and loss is not None else 0.0
        total, whole = self._agree(self._counted(squares), mine, _names(self._every), touched)
        return total, self._like.new_tensor(whole) if loss is None else loss.new_tensor(whole)

    def stage(self, stage: int, squares: Mapping[int, float], touched: set[str]) -> float:
        """The same for a stage that is updated before NORM, of several workers; no loss."""
        names = _names(self._tables[index] for index in self._chunks_of[stage])
        return self._agree(self._counted(squares), 0.0, names, touched)[0]

    def _counted(self, squares: Mapping[int, float]) -> float:
        """Of squares by chunk, those that this worker counts."""
        return sum(squares[index] for index in sorted(squares) if self._counts[index])

    def losses(self, mine: Sequence[float]) -> list[float]:
        """Of losses of this worker's rows, 0 where the last stage is not, those of all rows."""
        mine = [loss if self._first else 0.0 for loss in mine]
        found: list[float] = self.added(torch.tensor(mine, dtype=torch.float64)).tolist()
        return found

    def counts(self, index: int) -> bool:
        """Whether this worker counts what it updates of a chunk."""
        return self._counts[index]

    def added(self, numbers: Tensor) -> Tensor:
        """Sums over all workers, each of whom has so many numbers, in their place."""
        return numbers if self.alone else self._all.all_reduce(numbers)

    def told(self, root: int, numbers: Tensor) -> Tensor:
        """What one worker has, on every one."""
        return numbers if self.alone else self._all.broadcast(numbers, root)

    def _agree(
        self, squares: float, loss: float, names: list[str], touched: set[str]
    ) -> tuple[float, float]:
        vector = [squares, loss, *_marks(names, touched)]
        total, whole, *marks = self._all.all_reduce(
            torch.tensor(vector, dtype=torch.float64)
        ).tolist()
        found = {name for name, mark in zip(names, marks, strict=True) if mark}
        touched.update(found & self._updated)  # of others, nothing here would take them out again
        return total, whole


def _names(tables: Iterable[ChunkTable]) -> list[str]:
    return [slot.name for table in tables if table.trainable for slot in table.slots]


def _marks(names: Iterable[str], touched: Collection[str]) -> list[float]:
    return [float(name in touched) for name in names]


def _first(world: World, wanted: Callable[[Axis], bool]) -> bool:
    """Whether a worker is the first on all axes that are wanted."""
    axes = filter(wanted, world.mesh.axes)
    return not any(world.mesh.index(axis.name, world.rank) for axis in axes)


def _counts(world: World, chunks: Chunks, table: ChunkTable) -> bool:
    """Whether this worker counts what it updates of a chunk: the first of those that hold it."""
    if chunks.shards.levels[3].digit:  # others on the sharded axis hold the same
        return False
    if chunks.holders(table)[0] != chunks.turn:
        return False
    runs = {axis.name: world.mesh[axis.name] for axis in world.mesh.axes if not axis.sharded}
    runs |= {one.axis: one.holders for one in table.copies}
    same = world.mesh.runs({**runs, LINE: 1}, world.rank)
    return world.rank == same[0]
