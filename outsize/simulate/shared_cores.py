"""A step of several workers predicted, on a machine whose cores they share.

Every worker computes in one thread. While more of them compute than there are cores, the system
gives each its turn, and even fewer slow each other down, since memory is shared: how fast each goes
while 1, 2, ... compute is measured (`paces`), and the event simulator keeps count. What actions
take alone is measured too (outsize/simulate/worker_profile.py), or computed from rates.

Lists, lanes and hazards are those that the runtime plays (outsize/runtime/engine.py). Actions that
workers do together end together, once the last of them is there. Who sends goes on computing unless
as many messages are under way as a channel holds.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import torch

from outsize.collectives import Mesh, World, everyone
from outsize.collectives.channel import LIMIT
from outsize.schedule import Action, Kind, Lane, Schedule
from outsize.schedule.residency import SHARED
from outsize.schedule.waits import settled, waits
from outsize.simulate.events import Node, run
from outsize.simulate.forecast import Forecast
from outsize.simulate.replay import SUMS
from outsize.simulate.worker_profile import Durations
from outsize.trace import Event, Trace

Seconds = Callable[[int, Action], float]  # of an action of a worker, alone


def predict(
    lists: Sequence[Schedule],
    seconds: Seconds,
    cores: Sequence[float] = (),
    mesh: Mesh | None = None,
) -> Trace:
    """When each action of each worker would run. lists: by rank, the worker's own schedule.

    seconds: of RECV from when the sender has it until it is here, of NORM what a worker computes of
    it; SEND takes none. cores: as in events.run. mesh: which workers do things together; one
    pipeline where none is given.
    """
    graph = _Graph(mesh or Mesh(pipeline=len(lists)))
    for worker, schedule in enumerate(lists):
        graph.add(worker, schedule, seconds)
    graph.join()
    made = run([_node(draft) for draft in graph.drafts], cores=cores)
    events = [
        Event(
            worker, action.lane.value, action.label, action.stage, action.microbatch,
            made.starts[first], made.ends[last], part=action.part,
        )
        for worker, action, first, last in graph.shown
    ]  # fmt: skip
    return Trace("predicted", tuple(sorted(events, key=lambda event: event.start)))


def by_stage(known: Durations, lists: Sequence[Schedule], message: float = 0.0) -> Seconds:
    """Seconds of the actions of these lists by what they take alone (calibrate.durations). message:
    of one between two workers."""

    def seconds(worker: int, action: Action) -> float:
        if action.kind is Kind.RECV:
            return message
        if action.kind is Kind.NORM:
            role = lists[worker].role
            held = range(lists[worker].stages) if role is None else role.holds
            return sum(known.get((action.label, stage), 0.0) for stage in held)
        return known.get((action.label, action.stage), 0.0)

    return seconds


def on_cores(made: Forecast, known: Durations, cores: Sequence[float]) -> Forecast:
    """A pipeline's forecast by what actions take alone (worker_profile.durations), on shared cores
    (paces).

    What nothing is known of, as messages, takes what it did in the forecast. The plan may have
    copies of the pipeline that take different rows, and no other axis; all workers are on one
    machine. Of states that are cut over the copies each updates its part.
    """
    mesh, parts = made.plan.mesh, made.plan.shards.optimizer
    assert made.ranks and mesh.size == len(made.ranks) * mesh["data"], "copies of a pipeline alone"
    lists = [made.ranks[mesh.index("pipeline", rank)].schedule for rank in range(mesh.size)]
    measured = by_stage(known, lists)
    least: dict[Hashable, float] = {}  # some wait for other workers, the quickest hardly
    for event in made.trace.events:
        took, key = event.end - event.start, (event.kind, event.stage)
        least[key] = min(took, least.get(key, took))
    kinds, messages = {label for label, _ in known}, _messages(made.trace)

    def seconds(worker: int, action: Action) -> float:
        if action.label in kinds:
            whole = measured(worker, action)
            return whole / parts if action.kind in (Kind.UPDATE, Kind.NORM) else whole
        if action.kind is Kind.RECV:
            return messages[action.state, action.stage, action.microbatch, action.part]
        return least.get((action.label, action.stage), 0.0)

    first = [turn * mesh.stride("pipeline") for turn in range(len(made.ranks))]
    trace = _retimed(made.trace, predict(lists, seconds, cores, mesh), first)
    return replace(made, trace=trace, seconds=trace.span())


def _messages(trace: Trace) -> dict[Hashable, float]:
    """Seconds of each message of a pipeline, from when both sides are there until it has come."""
    begun: dict[Hashable, float] = {}
    ended: dict[Hashable, float] = {}
    for event in trace.events:
        kind, _, state = event.kind.partition(".")
        if kind in (Kind.SEND, Kind.RECV):
            name = (state, event.stage, event.microbatch, event.part)
            begun[name] = max(event.start, begun.get(name, event.start))
            if kind == Kind.RECV:
                ended[name] = event.end
    return {name: end - begun[name] for name, end in ended.items()}


def _retimed(trace: Trace, times: Trace, ranks: Sequence[int]) -> Trace:
    """The bytes of one trace at the times of another; both have the same actions. ranks: which
    worker of the other each of this one's is."""
    when = {_name(event, event.worker): event for event in times.events}
    found = [(event, when[_name(event, ranks[event.worker])]) for event in trace.events]
    events = (replace(event, start=other.start, end=other.end) for event, other in found)
    ordered = sorted(events, key=lambda event: (event.worker, event.start))
    return replace(trace, events=tuple(ordered))


def _name(event: Event, worker: int) -> Hashable:
    return (worker, event.kind, event.stage, event.microbatch, event.part)


# -- the nodes -------------------------------------------------------------------------------------


@dataclass
class _Draft:
    """A node whose needs are not all known yet."""

    worker: int
    lane: str
    seconds: float
    needs: list[int]


def _node(draft: _Draft) -> Node:
    return Node(draft.worker, draft.lane, draft.seconds, tuple(draft.needs))


@dataclass
class _Graph:
    """The nodes of all workers, and what they have to do with each other."""

    mesh: Mesh
    drafts: list[_Draft] = field(default_factory=list)
    shown: list[tuple[int, Action, int, int]] = field(default_factory=list)  # first and last node
    sends: dict[Hashable, tuple[Action, int]] = field(default_factory=dict)
    receives: dict[Hashable, int] = field(default_factory=dict)
    order: dict[int, list[Hashable]] = field(default_factory=dict)  # by worker, what it sends
    meetings: dict[Hashable, list[tuple[int, int]]] = field(default_factory=dict)

    def add(self, worker: int, schedule: Schedule, seconds: Seconds) -> None:
        """A worker's list."""
        waiting, due = waits(schedule), settled(schedule)
        ends: list[int] = []
        seen: Counter[Hashable] = Counter()
        for index, action in enumerate(schedule.workers[0]):
            needs = [ends[place] for place in (*waiting[index], *due.get(index, ()))]
            if action.kind is Kind.SEND:
                ends.append(self._send(worker, action))
                continue
            length = seconds(worker, action)
            first = self._put(worker, action.lane, length, needs)
            last = self._among(worker, action, first, seen)
            if last != first and action.kind is not Kind.NORM:  # it begins when all are there
                self.drafts[first].seconds, self.drafts[last].seconds = 0.0, length
            ends.append(last)
            self.shown.append((worker, action, first, last))

    def _put(self, worker: int, lane: Lane, seconds: float, needs: list[int]) -> int:
        self.drafts.append(_Draft(worker, lane.value, seconds, needs))
        return len(self.drafts) - 1

    def _send(self, worker: int, action: Action) -> int:
        """Who computes gives the message away and goes on at once, as soon as there is room."""
        node = self._put(worker, Lane.COMPUTE, 0.0, [])
        name = self._message(worker, action)
        self.sends[name] = (action, node)
        self.order.setdefault(worker, []).append(name)
        return node

    def _message(self, worker: int, action: Action) -> Hashable:
        line = self.mesh.ranks("pipeline", worker)
        return line, action.state, action.stage, action.microbatch, action.part

    def _among(self, worker: int, action: Action, first: int, seen: Counter[Hashable]) -> int:
        """What an action has to do with other workers; gives its last node."""
        if action.kind is Kind.RECV:
            self.receives[self._message(worker, action)] = first
        if action.kind not in (*SUMS, *SHARED):
            return first
        name = (self._group(worker, action), action.key, seen[action.key])
        seen[action.key] += 1
        last = self._put(worker, action.lane, 0.0, [first])
        self.meetings.setdefault(name, []).append((first, last))
        return last

    def _group(self, worker: int, action: Action) -> tuple[int, ...]:
        """The workers among which an action is one."""
        if action.kind is Kind.NORM:
            return ()
        if action.kind in SUMS:
            return self.mesh.ranks("pipeline", worker)
        return self.mesh.along(lambda axis: axis.batch, worker)

    def join(self) -> None:
        """Let nodes of different workers wait for each other."""
        for name, receive in self.receives.items():
            action, send = self.sends[name]
            self.drafts[receive].needs.append(send)
            self.shown.append((self.drafts[send].worker, action, send, receive))
        for names in self.order.values():
            under_way: dict[int, list[int]] = {}  # by receiver, the receives of its messages
            for name in names:
                receive = self.receives[name]
                before = under_way.setdefault(self.drafts[receive].worker, [])
                if len(before) >= LIMIT:
                    self.drafts[self.sends[name][1]].needs.append(before[-LIMIT])
                before.append(receive)
        for each in self.meetings.values():
            for _, last in each:
                self.drafts[last].needs += [first for first, _ in each]


# -- the machine -----------------------------------------------------------------------------------


ROUNDS, WINDOW = 5, 0.3  # how often each number of workers is measured; seconds
UNTIMED = 3  # times that each works first: whoever has computed nothing yet is slower for some


def paces(
    world: World, work: Callable[[], object], window: float = WINDOW, rounds: int = ROUNDS
) -> tuple[float, ...]:
    """How fast each worker computes while 1, 2, ... of all do, alone being 1; for `cores` above.

    All workers call this together. work: something like what they will do, which takes much less
    than a window of so many seconds; rounds: how often each number is measured, of which the median
    counts. Who computes changes with every turn, as in a pipeline: what the system takes to wake a
    worker and to find a core for it counts.
    """
    size = world.mesh.size
    turns: dict[int, list[float]] = {count: [] for count in range(1, size + 1)}
    for _ in range(UNTIMED):
        work()
    for _ in range(rounds):
        for count, seconds in turns.items():
            seconds.append(_turn(world, work, count, window))
    return tuple(min(1.0, median(turns[1]) / median(seconds)) for seconds in turns.values())


def _turn(world: World, work: Callable[[], object], count: int, window: float) -> float:
    """Seconds in which `count` workers, others each time, do their work once. Totals has a turn
    equally often, until a window is over for all."""
    everybody, size, done = everyone(world), world.mesh.size, 0
    everybody.barrier()
    begin, over = time.perf_counter(), torch.zeros((), dtype=torch.float64)
    while not over:
        for first in range(size):
            if (world.rank - first) % size < count:
                work()
            everybody.barrier()
        done += size
        over = torch.tensor(float(time.perf_counter() - begin > window), dtype=torch.float64)
        everybody.all_reduce(over, "max")
    return (time.perf_counter() - begin) / done
