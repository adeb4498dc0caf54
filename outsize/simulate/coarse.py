"""A pipeline's schedule as nodes of the event simulator, and the figures that papers give.

Times are of one unit's forward, input gradient and weight gradient, where a unit is a stage's
`Placement.share` of the layers; memory is in microbatches of a unit. A forward's activations are
live until its BACKWARD, or its BACKWARD_WEIGHT where the two gradients are apart. The layers at the
ends are part of the first and last stage, or cut over all workers; a barrier takes a transfer.
Gradients of stages that two workers have are summed beside, each as soon as its last parts are
there, in one order (outsize/schedule/passes/pipeline.py has the same MERGEs).

Where activations leave for the host, EVICT and FETCH run on lanes beside computing: an EVICT from
the end of its FORWARD, a FETCH from the end of the computing action that stands before it; what
reads the activations waits for it. Bytes leave when the EVICT ends and are taken again when the
FETCH starts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from outsize.errors import OutsizeError
from outsize.schedule.action import WHOLE, Action, Kind, Lane, State
from outsize.schedule.ends import Barrier, Ends
from outsize.schedule.pipelines.costs import EndCosts
from outsize.schedule.pipelines.offloaded import MOVED
from outsize.schedule.pipelines.pipeline import Pair, Pipeline, plain_paths
from outsize.schedule.pipelines.weave import steps_of
from outsize.schedule.role import neighbours
from outsize.simulate.events import Node, Run, run
from outsize.trace import Event, Trace

MIB = 2**20
_EXACT = 1e-9  # seconds; sums of times that are equal may differ by so much
_GIVING = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
_READS = (Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT)  # what a forward has kept
_Made = tuple[int, bool, int, int]  # worker, whether a gradient, stage, microbatch


@dataclass(frozen=True)
class Times:
    """Seconds: of a unit's forward, input gradient and weight gradient, and of a transfer.

    both: a forward and a backward that run as one; their sum where it is None. transfer: from the
    end of what makes a tensor to when its receiver has it. stages: each stage's own factor. ends:
    seconds of a microbatch's first and last layer, of which units have no part. merge: of the sum
    of a unit's gradients over the workers that have them.
    """

    forward: float
    of_input: float
    of_weight: float
    transfer: float = 0.0
    both: float | None = None
    stages: tuple[float, ...] = ()
    ends: EndCosts | None = None
    merge: float = 0.0

    def __post_init__(self) -> None:
        values = (self.forward, self.of_input, self.of_weight, self.transfer, self.both or 0.0)
        if not all(0 <= value < float("inf") for value in (*values, self.merge, *self.stages)):
            raise OutsizeError(f"times: {self}; expected seconds, not negative")

    @cached_property
    def _units(self) -> dict[Kind, float]:
        return {
            Kind.FORWARD: self.forward,
            Kind.RECOMPUTE: self.forward,
            Kind.BACKWARD: self.of_input + self.of_weight,
            Kind.BACKWARD_INPUT: self.of_input,
            Kind.BACKWARD_WEIGHT: self.of_weight,
        }

    def of(self, action: Action, share: float) -> float:
        """Seconds of one action on the compute lane."""
        seconds = self._units.get(action.kind, 0.0)
        return seconds * share * (self.stages[action.stage] if self.stages and seconds else 1.0)

    def of_ends(
        self, action: Action, path: Sequence[int], ends: Ends | None, workers: int
    ) -> float:
        """Seconds of it that are of the first and the last layer. ends: where all workers share
        them."""
        costs = self.ends
        if costs is None:
            return 0.0
        if ends is not None:
            return costs.of_pass(action.kind, ends, workers)
        forward, of_input, of_weight = costs.output
        last = {
            Kind.FORWARD: forward,
            Kind.BACKWARD: of_input + of_weight,
            Kind.BACKWARD_INPUT: of_input,
            Kind.BACKWARD_WEIGHT: of_weight,
        }
        first = {
            Kind.FORWARD: costs.embed,
            Kind.BACKWARD: costs.embed_backward,
            Kind.BACKWARD_WEIGHT: costs.embed_backward,
        }
        seconds = last.get(action.kind, 0.0) if action.stage == path[-1] else 0.0
        return seconds + (first.get(action.kind, 0.0) if action.stage == path[0] else 0.0)


@dataclass(frozen=True)
class Moving:
    """Seconds that a microbatch of a unit's activations takes to the host (`out`) and back. shared:
    how many times longer either takes while both are under way: 1 for a link of two directions of
    its own, 2 where they share one."""

    out: float
    back: float
    shared: float = 1.0

    def __post_init__(self) -> None:
        if not all(0 <= value < float("inf") for value in (self.out, self.back)):
            raise OutsizeError(f"moving: {self}; expected seconds, not negative")
        if not 1 <= self.shared <= 2:
            raise OutsizeError(f"moving: shared is {self.shared}; expected 1 to 2")

    @property
    def both(self) -> float:
        """Seconds of a unit's way out and back where both directions are always busy."""
        less, more = sorted((self.out, self.back))
        return more + (self.shared - 1) * less


STILL = Moving(0.0, 0.0)


@dataclass(frozen=True)
class Played:
    """A pipeline as it would run. actions[i]: what node i of the run does."""

    pipeline: Pipeline
    run: Run
    actions: tuple[tuple[Action, ...], ...]

    def trace(self) -> Trace:
        """What takes time, for pictures and comparison; of two that run as one the second beside.

        Memory is that of the worker that holds most, a microbatch of a unit being one MiB.
        """
        most = max(range(self.run.workers), key=self.run.peaks.__getitem__)
        rows = zip(self.run.nodes, self.run.starts, self.run.ends, self.actions, strict=True)
        events, levels = [], _Levels(self.run, most)
        for node, start, end, actions in rows:
            peak, live = levels.at(end)
            shown = {"device/activations": round(live * MIB)} if node.worker == most else {}
            highest = round(peak * MIB) if node.worker == most else 0
            events += [
                Event(
                    node.worker, node.lane if i == 0 else f"{node.lane} beside",
                    action.kind, action.stage, action.microbatch, start, end, shown, highest,
                )
                for i, action in enumerate(actions)
                if end > start
            ]  # fmt: skip
        events.sort(key=lambda event: (event.worker, event.lane, event.start))
        meta = {
            "schedule": self.pipeline.name,
            "memory": f"of worker {most}; a microbatch of its layers is drawn as 1 MiB",
        }
        return Trace("predicted", tuple(events), meta)


class _Levels:
    """What a worker holds at any time, whichever of its lanes takes and gives."""

    def __init__(self, run: Run, worker: int) -> None:
        mine = [i for i, node in enumerate(run.nodes) if node.worker == worker]
        taken = sorted((run.starts[i], run.nodes[i].takes) for i in mine if run.nodes[i].takes)
        given = sorted((run.ends[i], run.nodes[i].gives) for i in mine if run.nodes[i].gives)
        self._starts, self._ends = [when for when, _ in taken], [when for when, _ in given]
        self._taken = [0.0, *accumulate(units for _, units in taken)]
        self._given = [0.0, *accumulate(units for _, units in given)]

    def at(self, end: float) -> tuple[float, float]:
        """(units just before something ends, and just after)."""
        taken = self._taken[bisect_left(self._starts, end - _EXACT)]
        before = self._given[bisect_left(self._ends, end - _EXACT)]
        return taken - before, taken - self._given[bisect_right(self._ends, end + _EXACT)]


def play(
    pipeline: Pipeline,
    times: Times,
    moving: Moving = STILL,
    parts: Mapping[tuple[int, int], float] | None = None,
) -> Played:
    """Simulate a pipeline's schedule. parts: by worker and stage, the part of a microbatch's
    activations that its moves take away."""
    if times.stages and len(times.stages) != pipeline.schedule.stages:
        raise OutsizeError(
            f"times: factors of {len(times.stages)} stages; expected {pipeline.schedule.stages}"
        )
    if (cut := pipeline.schedule.ends) and times.ends is None:
        raise OutsizeError(
            f"times: none of the {cut.name}, which {pipeline.name} has cut; give its costs"
        )
    steps = [
        (worker, step)
        for worker, actions in enumerate(pipeline.schedule.workers)
        for step in map(tuple, steps_of(actions, pipeline.together))
    ]
    links = _Links(pipeline, steps)
    nodes = [
        _move(pipeline, moving, parts or {}, links, i)
        if step[0].kind in MOVED
        else _node(pipeline, times, links, i)
        for i, (_, step) in enumerate(steps)
    ]
    played = [step for _, step in steps]
    if times.merge:
        for step, node in _merges(pipeline, times, steps, len(nodes)):
            nodes.append(node)
            played.append(step)
    pair = frozenset((Lane.EVICT.value, Lane.FETCH.value))
    slowdown = {pair: moving.shared} if moving.shared > 1 else None
    return Played(pipeline, run(nodes, slowdown), tuple(played))


def _merges(
    pipeline: Pipeline, times: Times, steps: list[tuple[int, tuple[Action, ...]]], first: int
) -> Iterator[tuple[tuple[Action, ...], Node]]:
    """The sums over workers that have copies of a stage, from node `first` on: of each worker's
    part one node that begins when its lane is free, and one that ends what all have begun."""
    last: dict[tuple[int, int], tuple[int, int]] = {}  # by stage and worker: place, step
    places = [0] * len(pipeline.schedule.workers)
    for i, (worker, step) in enumerate(steps):
        places[worker] += len(step)
        for action in step:
            if action.kind in _GIVING:
                last[action.stage, worker] = places[worker], i
    held = {s: pipeline.placement.holders(s) for s in range(pipeline.placement.stages)}
    shared = [s for s, workers in held.items() if len(workers) > 1]
    for s in sorted(shared, key=lambda s: (max(last[s, w][0] for w in held[s]), s)):
        step = (Action(Kind.MERGE, s, lane=Lane.MERGE, state=State.GRADIENTS),)
        lane, seconds = Lane.MERGE.value, times.merge * pipeline.placement.share
        for w in held[s]:
            yield step, Node(w, lane, 0.0, (last[s, w][1],))
        begun = tuple(range(first, first + len(held[s])))
        for w in held[s]:
            yield step, Node(w, lane, seconds, begun)
        first += 2 * len(held[s])


class _Links:
    """Which step makes what, so that needs can be named."""

    def __init__(self, pipeline: Pipeline, steps: list[tuple[int, tuple[Action, ...]]]) -> None:
        self.pipeline, self.steps = pipeline, steps
        self.made: dict[_Made, int] = {}
        self.sent: dict[tuple[State, int, int, int], int] = {}
        self.last = [-1] * len(pipeline.schedule.workers)  # the last step before NORM
        self.whole = pipeline.paths or plain_paths(pipeline.placement)
        self.paths = [neighbours(path) for path in self.whole]
        self.ends = pipeline.schedule.ends
        self.parts: dict[tuple[int, State, int, int], int] = {}  # of inputs of passes, by worker
        self.makers: dict[Barrier, list[int]] = defaultdict(list)  # the passes that an exchange has
        self.exchanged: dict[tuple[int, Barrier], int] = {}
        self.moves: dict[tuple[int, Kind, Pair], int] = {}
        computed: dict[int, list[int]] = {}  # by worker, its last computing step so far
        self.before: dict[int, list[int]] = {}  # the same before a FETCH
        for i, (worker, step) in enumerate(steps):
            if step[0].kind is Kind.FETCH:
                self.before[i] = computed.get(worker, [])
            elif step[0].lane is Lane.COMPUTE:
                computed[worker] = [i]
            for action in step:
                self._make(i, worker, action)

    def _make(self, i: int, worker: int, a: Action) -> None:
        if a.kind is Kind.SEND:
            self.sent[a.state, a.stage, a.microbatch, a.part] = i
        elif a.kind is Kind.EXCHANGE:
            self.exchanged[worker, (a.state, a.stage, a.microbatch)] = i
        elif a.kind in MOVED:
            self.moves[worker, a.kind, (a.stage, a.microbatch)] = i
        elif a.kind is Kind.RECV and a.part != WHOLE:
            self.parts[worker, a.state, a.stage, a.microbatch] = i
        elif a.kind is Kind.RECV:  # gradients are noted as made by the stage that sent them
            grads = a.state is State.GRADIENTS
            stage = self.paths[a.microbatch][1][a.stage] if grads else a.stage
            self.made[worker, grads, stage, a.microbatch] = i
        elif a.kind.way:
            self.made[worker, a.kind.way == "back", a.stage, a.microbatch] = i
            self.last[worker] = i
        elif a.kind is Kind.BACKWARD_WEIGHT:
            self.last[worker] = i
        elif self.ends is not None and a.kind.end:
            self.last[worker] = i
            barrier = self.ends.behind(a)
            if barrier is not None:
                self.makers[barrier].append(i)

    def needs(self, worker: int, a: Action) -> list[int]:
        """Steps that must have ended, beside those before it on its lane."""
        if a.kind is Kind.RECV:
            return [self.sent[a.state, a.stage, a.microbatch, a.part]]
        if a.kind is Kind.EXCHANGE:
            return self.makers[a.state, a.stage, a.microbatch]
        if a.kind is Kind.NORM:
            return [i for i in self.last if i >= 0]
        pair = (a.stage, a.microbatch)
        if a.kind is Kind.EVICT:
            return [self.made[worker, False, *pair]]
        fetch = self.moves.get((worker, Kind.FETCH, pair))
        if a.kind is Kind.FETCH and fetch is not None:
            return [self.moves[worker, Kind.EVICT, pair], *self.before[fetch]]
        brought = [fetch] if a.kind in _READS and fetch is not None else []
        if a.kind.way:
            back = a.kind.way == "back"
            source = self.paths[a.microbatch][back].get(a.stage)
            made = [] if source is None else [self.made[worker, back, source, a.microbatch]]
            return [*made, *brought, *self._barrier(worker, a)]
        if a.kind.end:
            return [*self._input(worker, a), *self._barrier(worker, a)]
        if a.kind is Kind.SEND and a.part != WHOLE:
            return [self._part(worker, a.state, a.stage, a.microbatch)]
        if a.kind is Kind.SEND:
            grads = a.state is State.GRADIENTS
            stage = self.paths[a.microbatch][1][a.stage] if grads else a.stage
            return [self.made[worker, grads, stage, a.microbatch]]
        return brought

    def _barrier(self, worker: int, a: Action) -> list[int]:
        """The exchange that an action waits for."""
        if self.ends is None:
            return []
        barrier = self.ends.before(a, self.whole[a.microbatch])
        return [] if barrier is None else [self.exchanged[worker, barrier]]

    def _input(self, worker: int, a: Action) -> list[int]:
        """What brings or makes the tensor that a pass needs."""
        given = None if self.ends is None else self.ends.given.get(a.kind)
        return [] if given is None else [self._part(worker, given, a.stage, a.microbatch)]

    def _part(self, worker: int, state: State, stage: int, microbatch: int) -> int:
        here = self.parts.get((worker, state, stage, microbatch))
        made = (worker, state is State.GRADIENTS, stage, microbatch)
        return self.made[made] if here is None else here


def _node(pipeline: Pipeline, times: Times, links: _Links, i: int) -> Node:
    worker, step = links.steps[i]
    share = pipeline.placement.share
    seconds = sum(times.of(action, share) for action in step)
    if len(step) == 2 and times.both is not None:
        seconds = times.both * share
    layers = [a for a in step if a.kind.end or a.kind.way or a.kind.adds]
    ends, workers = pipeline.schedule.ends, len(pipeline.schedule.workers)
    if times.ends is not None:
        seconds += sum(times.of_ends(a, links.whole[a.microbatch], ends, workers) for a in layers)
    taking, giving = ends.holds if ends else (None, None)
    takes = sum(_held(a, share, times, (Kind.FORWARD, taking)) for a in layers)
    gives = sum(_held(a, share, times, (*_GIVING, giving)) for a in layers)
    needs = tuple(j for a in step for j in links.needs(worker, a) if j != i)
    lane, lag = step[0].lane.value, 0.0
    if step[0].kind is Kind.RECV:  # links do not wait for each other
        lane, lag = f"{lane} from {links.steps[needs[0]][0]}", times.transfer
    elif step[0].kind is Kind.EXCHANGE:
        lane, lag = f"{lane} of all", times.transfer
    return Node(worker, lane, seconds, needs, lag, takes, gives)


def _move(
    pipeline: Pipeline,
    moving: Moving,
    parts: Mapping[tuple[int, int], float],
    links: _Links,
    i: int,
) -> Node:
    worker, (action,) = links.steps[i]
    part = parts.get((worker, action.stage), 0.0) * pipeline.placement.share
    out = action.kind is Kind.EVICT
    takes, gives = (0.0, part) if out else (part, 0.0)
    seconds = part * (moving.out if out else moving.back)
    return Node(
        worker, action.lane.value, seconds, tuple(links.needs(worker, action)), 0.0, takes, gives
    )


def _held(action: Action, share: float, times: Times, kinds: tuple[Kind | None, ...]) -> float:
    """Units that an action of one of these kinds begins or ends to hold."""
    if action.kind not in kinds:
        return 0.0
    if action.kind.end:
        return 0.0 if times.ends is None else times.ends.held
    return share
