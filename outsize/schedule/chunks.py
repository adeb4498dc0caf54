"""Which worker has what of every chunk, and on which tier.

Everything here is arithmetic on the chunks' tables: a forecast asks the same functions as a job, so
what is predicted is what is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from outsize.memory import ChunkTable
from outsize.parallel.shards import Shards, at_borders, even
from outsize.plan import DEVICE, Plan
from outsize.schedule.kept import GRADIENTS, PARAMETERS, Kept
from outsize.schedule.pipelined import Pipelining, pipelining_of

LINE = "pipeline"  # the axis whose places have stages, and elements of chunks that it cuts
_DEPTHS = {PARAMETERS: 1, GRADIENTS: 2}  # of cuts: optimizer states lie at 3


@dataclass(frozen=True)
class Chunks:
    """The chunks of a model under a plan, seen from one worker.

    every: tables of the model's chunks. uses: by segment, the segments whose parameters its
    computation reads. index: this worker's place on the data axis; turn: on the pipeline axis.
    lying: parameters that can be read in the files of a model, with their types there.
    """

    plan: Plan
    every: tuple[ChunkTable, ...]
    uses: tuple[tuple[int, ...], ...]
    kept: Kept
    index: int = 0
    turn: int = 0
    lying: Mapping[str, torch.dtype] = field(default_factory=dict)
    # What `extent` has found: every action of every list asks for it.
    _extents: dict[tuple[int, int, int], tuple[int, int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def pipelining(self) -> Pipelining | None:
        """How the stages lie on the workers of a pipeline, where there is one."""
        if self.plan.mesh.pipeline == 1:
            return None
        uses = [self.stage_uses(s) for s in range(len(self.plan.stages))]
        return pipelining_of(self.plan, self.first, uses, self.rows)

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """The stages of whose parameters every worker of a pipeline has rows of its own."""
        return tuple(sorted({self.stage_of[t.segment] for t in self.every if t.on(LINE)}))

    def holders(self, table: ChunkTable) -> tuple[int, ...]:
        """The places of the pipeline axis that have the elements of a chunk that are here: of one
        that is cut over that axis this place alone."""
        line = self.pipelining
        if line is None or table.on(LINE):
            return (self.turn,)
        return line.holders[self.stage_of[table.segment]]

    @cached_property
    def tables(self) -> tuple[ChunkTable, ...]:
        """Of the chunks that this worker has."""
        if self.pipelining is None:
            return self.every
        return tuple(table for table in self.every if self.turn in self.holders(table))

    @cached_property
    def stage_of(self) -> tuple[int, ...]:
        """By segment, its stage."""
        owners = ((i, s) for i, s in enumerate(self.plan.stages) for _ in range(s.first, s.last))
        return tuple(index for index, _ in owners)

    @cached_property
    def of_stage(self) -> tuple[tuple[int, ...], ...]:
        """By stage, its chunks."""
        found: list[list[int]] = [[] for _ in self.plan.stages]
        for index, table in enumerate(self.tables):
            found[self.stage_of[table.segment]].append(index)
        return tuple(map(tuple, found))

    @cached_property
    def first(self) -> int:
        """The first stage that is trained; their number where none is."""
        stages = (self.stage_of[t.segment] for t in self.every if t.trainable)
        return min(stages, default=len(self.plan.stages))

    def stage_uses(self, stage: int) -> tuple[int, ...]:
        """The stages whose parameters a stage computes with, itself first."""
        here = self.plan.stages[stage]
        others = (self.stage_of[u] for i in range(here.first, here.last) for u in self.uses[i])
        return tuple(dict.fromkeys((stage, *others)))

    @cached_property
    def adapted(self) -> frozenset[int]:
        """Stages whose small trainable part stays on the device with its gradients and optimizer
        states, while the frozen rest of its parameters streams and is never written."""
        found = []
        for stage, chunks in enumerate(self.of_stage):
            rest = self.plan.stages[stage].rest
            numels = {True: 0, False: 0}
            for chunk in chunks:
                numels[self.tables[chunk].trainable] += self.tables[chunk].numel
            if rest.gradients == rest.optimizer == DEVICE and 0 < numels[True] < numels[False]:
                found.append(stage)
        return frozenset(found)

    @cached_property
    def shards(self) -> Shards:
        """How the states are cut over the data axis, seen from this worker."""
        own = self.plan.shards
        data = self.plan.mesh.data
        return Shards(own.parameters, own.gradients, own.optimizer, data, self.index)

    def extent(self, chunk: int, what: str, index: int | None = None) -> tuple[int, int]:
        """Elements [first, last) of a chunk of which this worker holds a state between uses. index:
        of another worker of the data axis."""
        key = chunk, _DEPTHS.get(what, 3), self.index if index is None else index
        if key not in self._extents:
            table = self.tables[chunk]
            cut = even if table.grain == 1 else at_borders(table.marks, table.grain, table.open)
            self._extents[key] = self.shards.span(table.numel, key[1], cut, key[2])
        return self._extents[key]

    def within(self, chunk: int, what: str, first: int, last: int) -> tuple[int, int]:
        """Of a state's own elements those that belong to the elements [first, last) of a chunk."""
        table = self.tables[chunk]
        state = self.kept.spec(table, what)
        return table.before(first, state), table.before(last, state)

    def share(self, chunk: int, what: str, index: int | None = None) -> tuple[int, int]:
        """Of a state's own elements those that this worker holds between uses. index: of another
        worker of the data axis."""
        return self.within(chunk, what, *self.extent(chunk, what, index))

    def numel(self, chunk: int, what: str) -> int:
        """The elements of a whole state of a chunk."""
        return self.within(chunk, what, 0, self.tables[chunk].numel)[1]

    def nbytes(self, chunk: int, what: str, index: int | None = None) -> int:
        """The bytes of a state that this worker (or another) holds between uses."""
        first, last = self.share(chunk, what, index)
        return (last - first) * dict(self.held(chunk))[what].itemsize

    def passes(self, chunk: int, what: str) -> bool:
        """Whether a chunk's whole parameters or gradients are in the pool at times only."""
        degree = self.shards.parameters if what == PARAMETERS else self.shards.gradients
        return degree > 1 or self.tier(chunk, what) != DEVICE

    def tier(self, chunk: int, what: str) -> str:
        """Where a state of a chunk rests."""
        stage = self.stage_of[self.tables[chunk].segment]
        rest = self.plan.stages[stage].rest
        if what == PARAMETERS and self.tables[chunk].trainable and stage in self.adapted:
            return DEVICE
        kinds = {PARAMETERS: rest.parameters, GRADIENTS: rest.gradients}
        return kinds.get(what, rest.optimizer)

    def held(self, chunk: int) -> Iterator[tuple[str, torch.dtype]]:
        """The states that a chunk has, with their dtypes."""
        return self.kept.states(self.tables[chunk])

    def learning(self) -> frozenset[int]:
        return frozenset(self.stage_of[t.segment] for t in self.tables if t.trainable)

    @cached_property
    def summed(self) -> frozenset[int]:
        """Stages with gradients that are parts of a sum."""
        if self.plan.mesh.summed:
            return self.learning()
        return frozenset(self.stage_of[t.segment] for t in self.tables if t.partial)
