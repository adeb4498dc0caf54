"""Held: a model's weights alone, wherever they rest, by name: read, replaced, changed in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outsize.memory.chunk import ChunkTable
from outsize.runtime.job import Fill
from outsize.runtime.storage.weight_pool import WeightPool
from outsize.schedule.kept import PARAMETERS


@dataclass(frozen=True)
class Held:
    """The weights of a weight_pool. learns: by chunk, whether it is trained."""

    weight_pool: WeightPool
    learns: Sequence[bool]

    @property
    def _tables(self) -> Sequence[ChunkTable]:
        return self.weight_pool.placement.chunks.tables

    def adopt(self, owners: Mapping[str, nn.Parameter], fill: Fill | None) -> None:
        """Move parameters' values into chunks, one chunk after the other; the parameters keep
        their shapes and no memory."""
        for index in range(len(self._tables)):
            chunk = self.weight_pool.make(index)
            flat = self.weight_pool.staged(index, (PARAMETERS,))[PARAMETERS]
            for slot in chunk.table.slots:
                parameter, here = owners[slot.name], slot.of(flat)
                with torch.no_grad():
                    here.copy_(parameter) if fill is None else fill(slot.name, here)
                parameter.data = parameter.data.new_empty(()).expand(parameter.shape)
            self.weight_pool.write(index, PARAMETERS, flat)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by name; of what rests below, a copy of one chunk at a time."""
        for index, table in enumerate(self._tables):
            flat = self.weight_pool.read(index, PARAMETERS)
            for slot in table.slots:
                yield slot.name, slot.of(flat)

    def reader(self) -> Callable[[str], Tensor]:
        """Gives a weight by name; it holds one chunk."""
        where = {s.name: (i, s) for i, table in enumerate(self._tables) for s in table.slots}
        last: dict[int, Tensor] = {}

        def read(name: str) -> Tensor:
            index, slot = where[name]
            if index not in last:
                last.clear()
                last[index] = self.weight_pool.read(index, PARAMETERS)
            return slot.of(last[index])

        return read

    @torch.no_grad()
    def load(self, value: Fill) -> None:
        """Replace every weight."""
        for index, table in enumerate(self._tables):
            flat = self.weight_pool.staged(index, (PARAMETERS,))[PARAMETERS]
            for slot in table.slots:
                value(slot.name, slot.of(flat))
            self.weight_pool.write(index, PARAMETERS, flat)

    @torch.no_grad()
    def change(self, by: Callable[[ChunkTable, Tensor], None]) -> None:
        """Pass over the chunks that are trained."""
        for index, table in enumerate(self._tables):
            if self.learns[index]:
                flat = self.weight_pool.read(index, PARAMETERS)
                by(table, flat)
                self.weight_pool.write(index, PARAMETERS, flat)

    def trained(self) -> Iterator[str]:
        """Names of the parameters that are trained."""
        for table, learns in zip(self._tables, self.learns, strict=True):
            yield from (slot.name for slot in table.slots if learns)
