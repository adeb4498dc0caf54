"""Rehearsal: one microbatch of a plan on fake tensors, to learn what each action costs.

The runtime itself plays the schedule, over tensors that have shapes but no memory, under the same
ledger that counts real ones. What comes out are the bytes each action leaves, the bytes it
needs while it runs, and its work; the whole step is then composed from these by replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from outsize.memory import ChunkTable, Ledger
from outsize.memory.store import Place
from outsize.plan import Plan, Rest, Stream
from outsize.runtime import Job
from outsize.runtime.job import dtypes_of
from outsize.runtime.placement import Placement
from outsize.schedule import Action, Kind, State
from outsize.simulate.counter import Counter, Work

Moved = tuple[Kind, State, int]  # kind, what is moved, stage


def moved(action: Action) -> Moved:
    """What an action's costs are filed under."""
    return action.kind, action.state, action.stage


@dataclass(frozen=True)
class ActionCost:
    """allocates: bytes by kind that stay (negative: freed); workspace: bytes above what was live
    before, while it runs; work: what it computes; moves: bytes of activations that it reads or
    writes on their tier."""

    allocates: Mapping[str, int]
    workspace: int
    work: Work
    moves: int = 0


@dataclass(frozen=True)
class Facts:
    """What the placement of a plan needs of a model: its chunks' tables, by segment the segments
    whose parameters it reads, the names of the optimizer's states, whether an update needs whole
    chunks, and the tiers that are memory."""

    tables: tuple[ChunkTable, ...]
    uses: tuple[tuple[int, ...], ...]
    states: tuple[str, ...]
    whole: bool = False
    host: frozenset[str] = frozenset()

    def placement(self, plan: Plan) -> Placement:
        """How a plan places the model's states."""
        dtypes = dtypes_of(plan.precision)
        return Placement(plan, self.tables, self.uses, dtypes, self.states, self.whole, self.host)


def facts_of(job: Job) -> Facts:
    """Those of the model that a job trains."""
    own = job.placement
    return Facts(own.tables, own.uses, own.states, own.whole, own.host)


@dataclass(frozen=True)
class Costs:
    """data: bytes of the step's whole batch, where it lies on the device. actions: of one
    microbatch. segments: names of the model's. facts: of the model."""

    data: int
    actions: Mapping[Moved, ActionCost]
    segments: tuple[str, ...]
    facts: Facts


def rehearse(
    plan: Plan, job_of: Callable[[Plan, Ledger], Job], batch_of: Callable[[int], object]
) -> Costs:
    """Costs of a plan's actions.

    job_of makes the job inside a fake mode with the ledger given; batch_of(rows) a batch of rows,
    called for the whole step's: it is there throughout, though one microbatch of it is played.
    """
    ledger = Ledger()
    with FakeTensorMode():
        job = job_of(bare(plan), ledger)
        job.ready(batch_of(plan.rows), count=1.0)
        data = ledger.live["data"]
        actions = _play(job, ledger)
        names = tuple(name for name, _ in job.flow.segments)
        facts = facts_of(job)
        job.close()
    return Costs(data, actions, names, facts)


def bare(plan: Plan) -> Plan:
    """One microbatch of a plan with every state on the device: what its actions cost by
    themselves. Activations leave as they do in the plan."""
    rows = min(plan.microbatch_rows, plan.rows)
    stages = tuple(replace(s, rest=Rest(activations=s.rest.activations)) for s in plan.stages)
    return replace(
        plan, rows=rows, microbatch_rows=rows, budget=None, stages=stages, order="microbatch",
        update="apart", stream=Stream(),
    )  # fmt: skip


class Nowhere:
    """A store that keeps nothing, for tensors that have no bytes; it counts what it should move."""

    name = "nowhere"

    def __init__(self) -> None:
        self.bytes_read = self.bytes_written = 0

    def reserve(self, nbytes: int) -> Place:
        return Place(0, nbytes)

    def write(self, place: Place, data: Tensor, at: int = 0) -> None:
        """Nothing to keep."""
        self.bytes_written += data.nbytes

    def read(self, place: Place, out: Tensor, at: int = 0) -> None:
        """Nothing to give."""
        self.bytes_read += out.nbytes

    def close(self) -> None:
        """Nothing to let go."""


def nowhere(plan: Plan) -> dict[str, Nowhere]:
    """Stores for every tier that a plan names."""
    return {s.rest.activations: Nowhere() for s in plan.stages if s.spills}


def _play(job: Job, ledger: Ledger) -> dict[Moved, ActionCost]:
    """The actions one after the other; what moves, moves nothing."""
    costs: dict[Moved, ActionCost] = {}
    with ledger:
        for index, action in enumerate(job.schedule.workers[0]):
            if action.kind is Kind.NORM:  # its bytes are nothing and its number does not exist
                continue
            before, total = dict(ledger.live), ledger.total
            passed = _passed(job)
            counter = Counter()
            with counter:
                event = job.alone(index, action)
            delta = {k: ledger.live[k] - before[k] for k in before if ledger.live[k] != before[k]}
            workspace = max(0, event.peak - total)
            costs[moved(action)] = ActionCost(delta, workspace, counter.work, _passed(job) - passed)
    return costs


def _passed(job: Job) -> int:
    """Bytes that its stores have moved."""
    return sum(store.bytes_read + store.bytes_written for store in job.stores.values())
