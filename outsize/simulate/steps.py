"""A pipeline's schedule as nodes of the event simulator, and the figures that papers give.

Times are of one unit's forward, input gradient and weight gradient, where a unit is a stage's
`Placement.share` of the layers; memory is in microbatches of a unit. A forward's activations are
live until its BACKWARD, or its BACKWARD_WEIGHT where the two gradients are apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from outsize.errors import OutsizeError
from outsize.schedule.action import Action, Kind, State
from outsize.schedule.pipelines.pipeline import Pipeline, neighbours
from outsize.simulate.events import Node, Run, run
from outsize.trace import Event, Trace

MIB = 2**20
_BACK = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
_Made = tuple[int, bool, int, int]  # worker, whether a gradient, stage, microbatch


@dataclass(frozen=True)
class Times:
    """Seconds: of a unit's forward, input gradient and weight gradient, and of a transfer.

    both: a forward and a backward that run as one; their sum where it is None. transfer: from the
    end of what makes a tensor to when its receiver has it. stages: each stage's own factor.
    """

    forward: float
    of_input: float
    of_weight: float
    transfer: float = 0.0
    both: float | None = None
    stages: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        values = (self.forward, self.of_input, self.of_weight, self.transfer, self.both or 0.0)
        if not all(0 <= value < float("inf") for value in (*values, *self.stages)):
            raise OutsizeError(f"times: {self}; expected seconds, not negative")

    def of(self, action: Action, share: float) -> float:
        """Seconds of one action on the compute lane."""
        seconds = {
            Kind.FORWARD: self.forward,
            Kind.RECOMPUTE: self.forward,
            Kind.BACKWARD: self.of_input + self.of_weight,
            Kind.BACKWARD_INPUT: self.of_input,
            Kind.BACKWARD_WEIGHT: self.of_weight,
        }.get(action.kind, 0.0)
        return seconds * share * (self.stages[action.stage] if self.stages and seconds else 1.0)


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
        events, live = [], 0.0
        for node, start, end, actions in rows:
            peak = live + node.takes
            if node.worker == most:
                live = peak - node.gives
            shown = {"device/activations": round(live * MIB)} if node.worker == most else {}
            highest = round(peak * MIB) if node.worker == most else 0
            events += [
                Event(
                    node.worker, node.lane if i == 0 else f"{node.lane} beside",
                    action.kind.value, action.stage, action.microbatch, start, end, shown, highest,
                )
                for i, action in enumerate(actions)
                if end > start
            ]  # fmt: skip
        events.sort(key=lambda event: (event.worker, event.lane, event.start))
        meta = {
            "schedule": self.pipeline.name,
            "memory": f"of worker {most}; a microbatch of its layers is drawn as 1 MiB",
        }
        return Trace("foretold", tuple(events), meta)


def play(pipeline: Pipeline, times: Times) -> Played:
    """Simulate a pipeline's schedule."""
    if times.stages and len(times.stages) != pipeline.schedule.stages:
        raise OutsizeError(
            f"times: factors of {len(times.stages)} stages; expected {pipeline.schedule.stages}"
        )
    steps = [
        (worker, step)
        for worker, actions in enumerate(pipeline.schedule.workers)
        for step in _steps(pipeline, actions)
    ]
    links = _Links(pipeline, steps)
    nodes = [_node(pipeline, times, links, i) for i in range(len(steps))]
    return Played(pipeline, run(nodes), tuple(step for _, step in steps))


def _steps(pipeline: Pipeline, actions: tuple[Action, ...]) -> list[tuple[Action, ...]]:
    """Actions one by one, but those that run as one in a pair."""
    steps: list[tuple[Action, ...]] = []
    joins = False
    for action in actions:
        if joins:
            steps[-1] = (*steps[-1], action)
        else:
            steps.append((action,))
        pair = (action.stage, action.microbatch)
        joins = action.kind is Kind.FORWARD and pair in pipeline.together
    return steps


class _Links:
    """Which step makes what, so that needs can be named."""

    def __init__(self, pipeline: Pipeline, steps: list[tuple[int, tuple[Action, ...]]]) -> None:
        self.pipeline, self.steps = pipeline, steps
        self.made: dict[_Made, int] = {}
        self.sent: dict[tuple[State, int, int], int] = {}
        self.last = [-1] * len(pipeline.schedule.workers)  # the last step before NORM
        paths = (
            pipeline.paths or (range(pipeline.schedule.stages),) * pipeline.schedule.microbatches
        )
        self.paths = [neighbours(path) for path in paths]
        for i, (worker, step) in enumerate(steps):
            for action in step:
                self._make(i, worker, action)

    def _make(self, i: int, worker: int, a: Action) -> None:
        if a.kind is Kind.SEND:
            self.sent[a.state, a.stage, a.microbatch] = i
        elif a.kind is Kind.RECV:  # gradients are noted as made by the stage that sent them
            grads = a.state is State.GRADIENTS
            stage = self.paths[a.microbatch][1][a.stage] if grads else a.stage
            self.made[worker, grads, stage, a.microbatch] = i
        elif a.kind in (Kind.FORWARD, *_BACK):
            self.made[worker, a.kind in _BACK, a.stage, a.microbatch] = i
            self.last[worker] = i
        elif a.kind is Kind.BACKWARD_WEIGHT:
            self.last[worker] = i

    def needs(self, worker: int, a: Action) -> list[int]:
        """Steps that must have ended, beside those before it on its lane."""
        if a.kind is Kind.RECV:
            return [self.sent[a.state, a.stage, a.microbatch]]
        if a.kind is Kind.NORM:
            return [i for i in self.last if i >= 0]
        if a.kind in (Kind.FORWARD, *_BACK):
            back = a.kind in _BACK
            source = self.paths[a.microbatch][back].get(a.stage)
            return [] if source is None else [self.made[worker, back, source, a.microbatch]]
        if a.kind is Kind.SEND:
            grads = a.state is State.GRADIENTS
            stage = self.paths[a.microbatch][1][a.stage] if grads else a.stage
            return [self.made[worker, grads, stage, a.microbatch]]
        return []


def _node(pipeline: Pipeline, times: Times, links: _Links, i: int) -> Node:
    worker, step = links.steps[i]
    share = pipeline.placement.share
    seconds = sum(times.of(action, share) for action in step)
    if len(step) == 2 and times.both is not None:
        seconds = times.both * share
    takes = sum(share for a in step if a.kind is Kind.FORWARD)
    gives = sum(share for a in step if a.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT))
    needs = tuple(j for a in step for j in links.needs(worker, a) if j != i)
    lane, lag = step[0].lane.value, 0.0
    if step[0].kind is Kind.RECV:  # links do not wait for each other
        lane, lag = f"{lane} from {links.steps[needs[0]][0]}", times.transfer
    return Node(worker, lane, seconds, needs, lag, takes, gives)
