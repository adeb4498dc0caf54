"""What is kept of a chunk's parameters: weights, gradients, the states of an optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType

import torch

from outsize.memory import ChunkTable
from outsize.memory.chunk import Dtypes
from outsize.optim.declared import StateSpec

PARAMETERS, GRADIENTS, MASTER = "parameters", "gradients", "master"
_OTHERS = MappingProxyType({name: StateSpec(name) for name in (PARAMETERS, GRADIENTS, MASTER)})


@dataclass(frozen=True)
class Kept:
    """The states of chunks, of this worker or another.

    optimizer: what the optimizer keeps of the parameters that it leaves to its `rest` (of all,
    where it has none); main: of those that it takes itself.
    """

    dtypes: Dtypes
    optimizer: tuple[StateSpec, ...]
    main: tuple[StateSpec, ...] = ()

    def states(self, table: ChunkTable) -> Iterator[tuple[str, torch.dtype]]:
        """The states of a chunk, with their dtypes."""
        own = self.dtypes.parameters
        if table.codes:
            own = torch.uint8
        yield PARAMETERS, torch.promote_types(torch.float32, own) if table.wide else own
        if table.trainable:
            yield GRADIENTS, self.dtypes.gradients
            if self.dtypes.master is not None:
                yield MASTER, self.dtypes.master
            for spec in self.specs(table):
                yield spec.name, spec.dtype or self.dtypes.optimizer

    def names(self, table: ChunkTable) -> tuple[str, ...]:
        """Names of the optimizer states of a chunk."""
        return tuple(spec.name for spec in self.specs(table))

    def specs(self, table: ChunkTable) -> tuple[StateSpec, ...]:
        """What the optimizer keeps of a chunk."""
        if not table.trainable:
            return ()
        return self.main if table.main else self.optimizer

    def spec(self, table: ChunkTable, what: str) -> StateSpec:
        """What is declared of a state; what is no optimizer's is of the weights' size."""
        found = next((s for s in self.specs(table) if s.name == what), None)
        return found or _OTHERS.get(what) or StateSpec(what)
