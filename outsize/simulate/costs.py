"""Costs: what is known of a plan's actions when one microbatch of it has been rehearsed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from outsize.memory import ChunkTable
from outsize.memory.chunk import Slot
from outsize.parallel.shards import even
from outsize.plan import Plan
from outsize.runtime import Job
from outsize.runtime.checks import dtypes_of
from outsize.runtime.placement import Placement
from outsize.schedule import Action, Kind, State
from outsize.schedule.action import WHOLE
from outsize.simulate.counter import Work

Moved = tuple[Kind, State, int]  # kind, what is moved, stage
_PASSED = (Kind.SEND, Kind.RECV)
PARTS = -1  # in the place of a stage: what passes at the ends of a microbatch's path


def moved(action: Action) -> Moved:
    """What an action's costs are filed under."""
    ends = action.part != WHOLE and action.kind in _PASSED
    return action.kind, action.state, PARTS if ends else action.stage


@dataclass(frozen=True)
class ActionCost:
    """allocates: bytes by kind that stay (negative: freed); workspace: bytes above what was live
    before, while it runs; work: what it computes; moves: bytes of activations that it reads or
    writes on their tier, sends or receives, or sums with others (EXCHANGE); received: bytes that it
    has from the other workers of the tensor axis, of an EXCHANGE from those of the pipeline."""

    allocates: Mapping[str, int]
    workspace: int
    work: Work
    moves: int = 0
    received: int = 0


@dataclass(frozen=True)
class Facts:
    """What the placement of a plan needs of a model: its chunks' tables, by segment the segments
    whose parameters it reads, the names of the optimizer's states and (`matrix`) of those of
    matrices that are updated as wholes, and the tiers that are memory."""

    tables: tuple[ChunkTable, ...]
    uses: tuple[tuple[int, ...], ...]
    states: tuple[str, ...]
    matrix: tuple[str, ...] = ()
    host: frozenset[str] = frozenset()

    def placement(self, plan: Plan, turn: int = 0) -> Placement:
        """How a plan places the model's states on the worker of the data axis that has most of
        them. turn: the place on the pipeline axis."""
        dtypes, every = dtypes_of(plan.precision), self.tables
        if plan.mesh.pipeline > 1:
            every = tuple(_cut(t, plan.mesh.pipeline, turn) if t.piped else t for t in every)
        last = plan.mesh.data - 1  # whose shares are the largest where elements are cut
        made = Placement(
            plan, every, self.uses, dtypes, self.states, self.matrix, self.host, last, turn
        )
        if last and any(table.matrices for table in made.tables):
            return replace(made, index=max(range(last, -1, -1), key=partial(_share, made)))
        return made


def _share(placement: Placement, place: int) -> int:
    """Bytes of states of a worker of the data axis."""
    found = 0
    for index in range(len(placement.tables)):
        for what, dtype in placement.held(index):
            first, end = placement.extent(index, what, place)
            found += (end - first) * dtype.itemsize
    return found


def _cut(table: ChunkTable, workers: int, turn: int) -> ChunkTable:
    """A table of rows that every worker of a pipeline has some of, as one of them has it."""
    slots, offset = list[Slot](), 0
    for slot in table.slots:
        each = slot.numel // slot.shape[0]
        bounds = even(0, slot.whole // each, workers)
        shape = (bounds[turn + 1] - bounds[turn], *slot.shape[1:])
        slots.append(replace(slot, shape=shape, offset=offset))
        offset += slots[-1].numel
    return replace(table, slots=tuple(slots))


def facts_of(job: Job) -> Facts:
    """Those of the model that a job trains."""
    own = job.placement
    return Facts(own.every, own.uses, own.states, own.matrix, own.host)


@dataclass(frozen=True)
class Costs:
    """data: bytes of the step's whole batch, where it lies on the device. actions: of one
    microbatch. segments: names of the model's. facts: of the model. short: of the microbatch with
    the number `last`, where it has fewer rows. begun, begun_short: bytes by kind of a microbatch
    that is under way, where the workers of a pipeline begin it each (else in its first FORWARD).
    earlier: by stage, of what crosses behind it but was given before its last block: the stage in
    which the code after that goes on, and the bytes (of a whole microbatch)."""

    data: int
    actions: Mapping[Moved, ActionCost]
    segments: tuple[str, ...]
    facts: Facts
    short: Mapping[Moved, ActionCost] = field(default_factory=dict)
    last: int = 0
    begun: Mapping[str, int] = field(default_factory=dict)
    begun_short: Mapping[str, int] = field(default_factory=dict)
    earlier: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)

    def begun_by(self, microbatch: int) -> Mapping[str, int]:
        """Bytes by kind of a microbatch that is under way."""
        return self.begun_short if self.short and microbatch == self.last else self.begun

    def of(self, action: Action) -> ActionCost | None:
        """The costs of an action, if it has any."""
        mine = self.short if self.short and action.microbatch == self.last else self.actions
        return mine.get(moved(action))

    def received(self, action: Action) -> int:
        """Bytes that the tensor axis brings in an action; of a RECV, all that it brings."""
        cost = self.of(action)
        if cost is None:
            return 0
        return cost.moves if action.kind is Kind.RECV else cost.received
