"""Costs: what is known of a plan's actions when one microbatch of it has been rehearsed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from outsize.memory import ChunkTable
from outsize.memory.chunk import Slot
from outsize.optim.declared import StateSpec
from outsize.parallel.shards import even
from outsize.plan import Plan
from outsize.runtime import Job
from outsize.runtime.checks import dtypes_of
from outsize.schedule import Action, Kind, State
from outsize.schedule.action import WHOLE
from outsize.schedule.chunks import LINE, Chunks
from outsize.schedule.items import Items
from outsize.schedule.kept import Kept
from outsize.schedule.layout import Placement
from outsize.schedule.starting import OWN, Filling
from outsize.schedule.talk import Said as Said
from outsize.simulate.counter import Work

Moved = tuple[Kind, State, int]  # kind, what is moved, stage
_PASSED = (Kind.SEND, Kind.RECV)
PARTS = -1  # in the place of a stage: what passes at the ends of a microbatch's path
COPIED: Moved = (Kind.COPY, State.NONE, WHOLE)  # what the copy of a microbatch is filed under


def moved(action: Action) -> Moved:
    """What an action's costs are filed under."""
    ends = action.part != WHOLE and action.kind in _PASSED
    return action.kind, action.state, PARTS if ends else action.stage


@dataclass(frozen=True)
class ActionCost:
    """allocates: bytes by kind that stay (negative: freed); workspace: bytes above what was live
    before, while it runs; work: what it computes; moves: bytes of activations that it reads or
    writes on their tier, sends or receives, or sums with others (EXCHANGE); said: what workers say
    to one another inside it."""

    allocates: Mapping[str, int]
    workspace: int
    work: Work
    moves: int = 0
    said: tuple[Said, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What the placement of a plan needs of a model: its chunks' tables, by segment the segments
    whose parameters it reads, what the optimizer keeps of those that it leaves to its `rest` and
    (`main`) of those that it takes itself, the tiers that are memory, and how first values come.
    frozen: the share of the layers that each step leaves alone, None where all are trained. apart:
    the device has memory of its own, to which microbatches are copied. grain: bytes of which it
    gives whole multiples."""

    tables: tuple[ChunkTable, ...]
    uses: tuple[tuple[int, ...], ...]
    states: tuple[StateSpec, ...]
    main: tuple[StateSpec, ...] = ()
    host: frozenset[str] = frozenset()
    filling: Filling = OWN
    frozen: float | None = None
    apart: bool = False
    grain: int = 1

    def placement(self, plan: Plan, turn: int = 0) -> Placement:
        """How a plan places the model's states on the worker of the data axis that has most of
        them. turn: the place on the pipeline axis."""
        every = self.tables
        if plan.mesh.pipeline > 1:
            every = tuple(_cut(t, plan.mesh[LINE], turn) if t.on(LINE) else t for t in every)
        last = plan.mesh.data - 1  # whose shares are the largest where elements are cut
        kept = Kept(dtypes_of(plan.precision), self.states, self.main)
        made = Chunks(plan, every, self.uses, kept, last, turn, self.filling.lying)
        if last and any(table.grain != 1 for table in made.tables):
            made = replace(made, index=max(range(last, -1, -1), key=partial(_share, made)))
        return Placement(Items(made, self.host, self.apart))


def _share(chunks: Chunks, place: int) -> int:
    """Bytes of states of a worker of the data axis."""
    indices = range(len(chunks.tables))
    return sum(chunks.nbytes(i, what, place) for i in indices for what, _ in chunks.held(i))


def _cut(table: ChunkTable, workers: int, turn: int) -> ChunkTable:
    """A table that the pipeline axis cuts by rows, last of all, as one of its workers has it."""
    slots, offset = list[Slot](), 0
    for slot in table.slots:
        each = slot.numel // slot.shape[0]
        bounds = even(0, slot.cut_of[-1] // each, workers)
        shape = (bounds[turn + 1] - bounds[turn], *slot.shape[1:])
        slots.append(replace(slot, shape=shape, offset=offset))
        offset += slots[-1].numel
    return replace(table, slots=tuple(slots))


def facts_of(job: Job) -> Facts:
    """Those of the model that a job trains."""
    chunks, items = job.placement.chunks, job.placement.items
    kept, left = chunks.kept, job.method.left
    return Facts(
        chunks.every, chunks.uses, kept.optimizer, kept.main, items.host, frozen=left,
        apart=items.apart,
    )  # fmt: skip


@dataclass(frozen=True)
class Costs:
    """data: bytes of the step's whole batch, where it lies on the device. actions: of one
    microbatch. segments: names of the model's. facts: of the model. short: of the microbatch with
    the number `last`, where it has fewer rows. begun, begun_short: bytes by kind of a microbatch
    that is under way, where the workers of a pipeline begin it each (else in its first FORWARD).
    earlier: by stage, of what crosses behind it but was given before its last block: the stage in
    which the code after that goes on, and the bytes (of a whole microbatch). forward: what actions
    cost in an evaluation, of a whole microbatch; evaluated: bytes of the batch that it is."""

    data: int
    actions: Mapping[Moved, ActionCost]
    segments: tuple[str, ...]
    facts: Facts
    short: Mapping[Moved, ActionCost] = field(default_factory=dict)
    last: int = 0
    begun: Mapping[str, int] = field(default_factory=dict)
    begun_short: Mapping[str, int] = field(default_factory=dict)
    earlier: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)
    forward: Mapping[Moved, ActionCost] = field(default_factory=dict)
    evaluated: int = 0

    @property
    def evaluation(self) -> Costs:
        """Those of an evaluation of one whole microbatch."""
        return replace(self, data=self.evaluated, actions=self.forward, short={})

    def begun_by(self, microbatch: int) -> Mapping[str, int]:
        """Bytes by kind of a microbatch that is under way."""
        return self.begun_short if self.short and microbatch == self.last else self.begun

    def of(self, action: Action) -> ActionCost | None:
        """The costs of an action, if it has any."""
        mine = self.short if self.short and action.microbatch == self.last else self.actions
        return mine.get(moved(action))

    def said(self, action: Action) -> tuple[Said, ...]:
        """What is said inside an action."""
        cost = self.of(action)
        return () if cost is None else cost.said
