"""The event simulator: nodes with durations and byte deltas, on the lanes of workers.

A lane runs its nodes in the order in which they are listed. A node starts when its lane is free and
everything it needs has ended, `lag` seconds after the last of that (a link's latency). Lanes of one
worker run at the same time; where they slow each other down, a coefficient says how much. So it is
with workers that have fewer cores than they are (outsize/simulate/shared_cores.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from outsize.errors import OutsizeError

COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Node:
    """One thing to do. duration: seconds when it runs alone. needs: indices of other nodes.

    takes: bytes that are live from its start. gives: bytes that are free from its end.
    """

    worker: int
    lane: str
    duration: float
    needs: tuple[int, ...] = ()
    lag: float = 0.0
    takes: float = 0.0
    gives: float = 0.0


@dataclass(frozen=True)
class Run:
    """When each node ran, and what follows from that. Seconds and bytes; one entry a worker."""

    nodes: tuple[Node, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    workers: int

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return max(self.ends, default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds each worker computes."""
        seconds = [0.0] * self.workers
        for i in self._computing:
            seconds[self.nodes[i].worker] += self.ends[i] - self.starts[i]
        return tuple(seconds)

    @cached_property
    def idle_in_makespan(self) -> tuple[float, ...]:
        """Seconds of the makespan in which each worker computes nothing."""
        return tuple(self.makespan - busy for busy in self.busy)

    @cached_property
    def idle_in_span(self) -> tuple[float, ...]:
        """The same between a worker's own first start and last end."""
        first, last = [float("inf")] * self.workers, [0.0] * self.workers
        for i in self._computing:
            worker = self.nodes[i].worker
            first[worker] = min(first[worker], self.starts[i])
            last[worker] = max(last[worker], self.ends[i])
        spans = (max(0.0, b - a) for a, b in zip(first, last, strict=True))
        return tuple(span - busy for span, busy in zip(spans, self.busy, strict=True))

    @cached_property
    def peaks(self) -> tuple[float, ...]:
        """The most bytes each worker holds at once; what is freed at a moment goes first."""
        changes: list[tuple[float, int, int, float]] = []
        for i, node in enumerate(self.nodes):
            if node.takes:
                changes.append((self.starts[i], 1, node.worker, node.takes))
            if node.gives:
                changes.append((self.ends[i], 0, node.worker, -node.gives))
        live, peaks = [0.0] * self.workers, [0.0] * self.workers
        for _, _, worker, change in sorted(changes):
            live[worker] += change
            peaks[worker] = max(peaks[worker], live[worker])
        return tuple(peaks)

    @cached_property
    def _computing(self) -> list[int]:
        chosen = enumerate(self.nodes)
        return [i for i, n in chosen if n.lane == COMPUTE and self.ends[i] > self.starts[i]]


def run(
    nodes: Sequence[Node],
    slowdown: Mapping[frozenset[str], float] | None = None,
    cores: Sequence[float] = (),
) -> Run:
    """Play the nodes. slowdown: how many times longer either of two lanes' work takes while both
    are busy on one worker; a pair that is not named does not slow down. cores: how fast each goes
    while 1, 2, ... workers compute at once, alone being 1; more of them than are named share what
    the last number of them gets done. () for a core a worker.

    Raises OutsizeError where nodes wait for each other in a circle.
    """
    for node in nodes:
        if not (node.duration >= 0 and node.lag >= 0):
            raise OutsizeError(
                f"node of worker {node.worker}: duration {node.duration}, lag {node.lag};"
                " expected seconds, not negative"
            )
    if not all(0 < pace < float("inf") for pace in cores):
        raise OutsizeError(f"cores: paces {list(cores)}; expected positive ones")
    graph = _Graph(nodes)
    if slowdown or cores:
        _share(_Clock(graph, slowdown or {}, tuple(cores)))
    else:
        _settle(graph)
    if graph.done < len(nodes):
        stuck = next(i for i, end in enumerate(graph.ends) if end < 0)
        node = nodes[stuck]
        raise OutsizeError(
            f"node {stuck} (worker {node.worker}, {node.lane}) never starts: what it needs waits"
            " for it; break the circle"
        )
    workers = 1 + max((node.worker for node in nodes), default=-1)
    return Run(tuple(nodes), tuple(graph.starts), tuple(graph.ends), workers)


class _Graph:
    """Who waits for whom, and what has been settled so far."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        count = len(nodes)
        self.nodes, self.done = nodes, 0
        self.starts, self.ends = [-1.0] * count, [-1.0] * count
        self.waits, self.ahead = [0] * count, [-1] * count
        self.after: list[list[int]] = [[] for _ in range(count)]
        lanes: dict[tuple[int, str], int] = {}
        for i, node in enumerate(nodes):
            lane = (node.worker, node.lane)
            needs = node.needs
            if lane in lanes:
                self.ahead[i] = lanes[lane]
                needs = (*needs, lanes[lane])
            lanes[lane] = i
            self.waits[i] = len(needs)
            for j in needs:
                self.after[j].append(i)

    def free(self) -> list[int]:
        """The nodes that wait for nothing."""
        return [i for i, count in enumerate(self.waits) if count == 0]

    def ready(self, i: int) -> float:
        """When node i may start; everything before it has ended."""
        node, ahead = self.nodes[i], self.ahead[i]
        when = self.ends[ahead] if ahead >= 0 else 0.0
        return max(when, *(self.ends[j] + node.lag for j in node.needs)) if node.needs else when

    def end(self, i: int, when: float) -> list[int]:
        """Node i ends; gives the nodes that now wait for nothing more."""
        self.ends[i] = when
        self.done += 1
        freed = []
        for j in self.after[i]:
            self.waits[j] -= 1
            if self.waits[j] == 0:
                freed.append(j)
        return freed


def _settle(graph: _Graph) -> None:
    """Every node takes the time that it says: they settle one after another, without a clock."""
    ready = graph.free()
    while ready:
        i = ready.pop()
        start = graph.starts[i] = graph.ready(i)
        ready += graph.end(i, start + graph.nodes[i].duration)


@dataclass
class _Running:
    """A node that runs: seconds of its own work that are left, and how fast they go."""

    left: float
    since: float
    rate: float = 1.0
    turn: int = 0  # counts changes of the rate: an older end is void


@dataclass
class _Clock:
    """What runs on each worker's lanes, and when something starts or ends next."""

    graph: _Graph
    slowdown: Mapping[frozenset[str], float]
    cores: tuple[float, ...]
    events: list[tuple[float, int, int]] = field(default_factory=list)  # when, node, turn
    running: dict[int, dict[int, _Running]] = field(default_factory=dict)
    computing: int = 0  # nodes that compute now

    def start(self, i: int, now: float) -> None:
        node = self.graph.nodes[i]
        self.graph.starts[i] = now
        self.running.setdefault(node.worker, {})[i] = _Running(node.duration, now)
        self._count(node, 1, now)

    def end(self, i: int, now: float) -> None:
        node = self.graph.nodes[i]
        del self.running[node.worker][i]
        for j in self.graph.end(i, now):
            heapq.heappush(self.events, (self.graph.ready(j), j, -1))
        self._count(node, -1, now)

    def _count(self, node: Node, more: int, now: float) -> None:
        """A node came or went: everything that it slows down has another rate."""
        computes = node.lane == COMPUTE
        self.computing += more if computes else 0
        everywhere = computes and self.cores
        for worker in list(self.running) if everywhere else [node.worker]:
            self._change(worker, now)

    def _change(self, worker: int, now: float) -> None:
        """Set the rates of a worker's nodes again."""
        here = self.running[worker]
        for i, state in here.items():
            state.left -= (now - state.since) * state.rate
            state.since, state.rate, state.turn = now, self._rate(i, here), state.turn + 1
            heapq.heappush(self.events, (now + max(0.0, state.left) / state.rate, i, state.turn))

    def _rate(self, i: int, here: Mapping[int, _Running]) -> float:
        lane, rate = self.graph.nodes[i].lane, 1.0
        for j in here if self.slowdown else ():
            pair = frozenset((lane, self.graph.nodes[j].lane))
            rate /= self.slowdown.get(pair, 1.0) if i != j else 1.0
        return rate * self._pace if lane == COMPUTE and self.cores else rate

    @property
    def _pace(self) -> float:
        """How fast who computes goes now."""
        most = min(self.computing, len(self.cores))
        return self.cores[most - 1] * most / self.computing


def _share(clock: _Clock) -> None:
    """With a clock: whenever a node starts or ends, others change their rates."""
    graph = clock.graph
    for i in graph.free():
        heapq.heappush(clock.events, (graph.ready(i), i, -1))
    while clock.events:
        now, i, turn = heapq.heappop(clock.events)
        here = clock.running.get(graph.nodes[i].worker, {})
        if turn < 0:
            clock.start(i, now)
        elif i in here and here[i].turn == turn:
            clock.end(i, now)
