"""A pipeline whose activations leave for the host, as nodes of the event simulator.

EVICT and FETCH run on lanes beside computing: an EVICT from the end of its FORWARD, a FETCH from
the end of the computing action that stands before it; what reads the activations waits for it.
Bytes leave when the EVICT ends and are taken again when the FETCH starts. Memory is in microbatches
of a unit, as in outsize/simulate/steps.py, which simulates everything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from outsize.errors import OutsizeError
from outsize.schedule.action import Action, Kind, Lane, State
from outsize.schedule.pipelines.offloaded import MOVED, Offloaded, bare
from outsize.simulate.events import Node, run
from outsize.simulate.steps import Played, Times, play

_READS = (Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT)
_Key = tuple[int, Action]


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


def play_away(made: Offloaded, times: Times, moving: Moving) -> Played:
    """Simulate a pipeline with its moves."""
    base = play(bare(made.pipeline), times)
    places = {(n.worker, a): i for i, n in enumerate(base.run.nodes) for a in base.actions[i]}
    nodes: list[Node] = []
    actions: list[tuple[Action, ...]] = []
    at: dict[int, int] = {}  # from a node's place in the base to its place here
    moves: dict[_Key, int] = {}
    share = made.pipeline.placement.share
    for worker, listed in enumerate(made.pipeline.schedule.workers):
        last = -1  # the computing node before
        for action in listed:
            if action.kind in MOVED:
                part = made.parts.get((worker, action.stage), 0.0) * share
                needs = _needs(worker, action, last, at, places, moves)
                moves[worker, action] = len(nodes)
                nodes.append(_move(worker, action, part, moving, needs))
                actions.append((action,))
                continue
            i = places[worker, action]
            if i not in at:
                at[i] = len(nodes)
                nodes.append(base.run.nodes[i])
                actions.append(base.actions[i])
            last = i if base.run.nodes[i].lane == Lane.COMPUTE else last
    nodes = _joined(nodes, actions, at, moves)
    pair = frozenset((Lane.EVICT.value, Lane.FETCH.value))
    slowdown = {pair: moving.shared} if moving.shared > 1 else None
    return Played(made.pipeline, run(nodes, slowdown), tuple(actions))


def _needs(
    worker: int,
    action: Action,
    last: int,
    at: Mapping[int, int],
    places: Mapping[_Key, int],
    moves: Mapping[_Key, int],
) -> tuple[int, ...]:
    """What a move waits for, beside what is before it on its lane."""
    other = replace(action, kind=Kind.EVICT, lane=Lane.EVICT)
    if action.kind is Kind.FETCH:
        gone = moves[worker, other]
        return (gone,) if last < 0 else (gone, at[last])
    made = (worker, Action(Kind.FORWARD, action.stage, action.microbatch))
    return (at[places[made]],)


def _move(worker: int, action: Action, part: float, moving: Moving, needs: tuple[int, ...]) -> Node:
    out = action.kind is Kind.EVICT
    seconds = part * (moving.out if out else moving.back)
    takes, gives = (0.0, part) if out else (part, 0.0)
    return Node(worker, action.lane.value, seconds, needs, 0.0, takes, gives)


def _joined(
    nodes: Sequence[Node],
    actions: Sequence[tuple[Action, ...]],
    at: Mapping[int, int],
    moves: Mapping[_Key, int],
) -> list[Node]:
    """The nodes with what they need by its place here, and readers waiting for what comes back."""
    kept = set(moves.values())
    found = []
    for i, node in enumerate(nodes):
        if i in kept:
            found.append(node)
            continue
        needs = tuple(at[j] for j in node.needs)
        for action in actions[i]:
            fetch = Action(
                Kind.FETCH, action.stage, action.microbatch, Lane.FETCH, state=State.ACTIVATIONS
            )
            back = moves.get((node.worker, fetch))
            if action.kind in _READS and back is not None:
                needs = (*needs, back)
        found.append(replace(node, needs=needs))
    return found
