"""The pass over any pipeline that lets activations leave for the host between forward and gradient.

Wan et al., "PipeOffload: Improving Scalability of Pipeline Parallelism with Memory Optimization",
2025. EVICT stands behind a FORWARD, FETCH before the action that it is told, both on lanes of their
own; which microbatches of which stages go, and when they are asked for, is chosen from simulated
times (outsize/search/pipeline_offload.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from outsize.errors import OutsizeError
from outsize.schedule.action import Action, Kind, Lane, State
from outsize.schedule.pipelines.pipeline import Pair, Pipeline

_READS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
MOVED = (Kind.EVICT, Kind.FETCH)


@dataclass(frozen=True)
class Offloaded:
    """pipeline: with EVICT and FETCH. parts: by worker and stage, the part of a microbatch's
    activations that leaves; whoever is not named keeps all of them."""

    pipeline: Pipeline
    parts: Mapping[tuple[int, int], float] = field(default_factory=dict)


def offloaded(
    made: Pipeline, parts: Mapping[tuple[int, int], float], asked: Mapping[Pair, int]
) -> Offloaded:
    """Add the moves. asked: by stage and microbatch that leaves, the place in its worker's list
    before which its FETCH stands.

    Raises OutsizeError where a FETCH would stand before its EVICT.
    """
    workers = tuple(_moved(made, actions, asked) for actions in made.schedule.workers)
    return Offloaded(replace(made, schedule=replace(made.schedule, workers=workers)), parts)


def _moved(
    made: Pipeline, actions: tuple[Action, ...], asked: Mapping[Pair, int]
) -> tuple[Action, ...]:
    fetches: dict[int, list[Action]] = defaultdict(list)
    reading = ((i, a) for i, a in enumerate(actions) if a.kind in _READS)
    read = {(a.stage, a.microbatch): i for i, a in reading}
    found: list[Action] = []
    leaving: list[Action] = []  # behind the action at hand
    for index, action in enumerate(actions):
        pair = (action.stage, action.microbatch)
        if index and fetches[index] and _runs_on(made, actions[index - 1]):
            raise OutsizeError(
                f"offload: action {index} ({action}) runs as one with that before it; expected"
                " FETCH before the first of them"
            )
        found += sorted(fetches.pop(index, []), key=lambda a: read[a.stage, a.microbatch])
        found.append(action)
        if action.kind is Kind.FORWARD and pair in asked:
            if asked[pair] <= index:
                raise OutsizeError(
                    f"offload: stage {pair[0]}, microbatch {pair[1]} is asked for before action"
                    f" {asked[pair]} and made in action {index}; expected a later one"
                )
            leaving.append(Action(Kind.EVICT, *pair, Lane.EVICT, state=State.ACTIVATIONS))
            fetches[asked[pair]].append(
                Action(Kind.FETCH, *pair, Lane.FETCH, state=State.ACTIVATIONS)
            )
        if not _runs_on(made, action):
            found += leaving
            leaving = []
    return tuple(found)


def _runs_on(made: Pipeline, action: Action) -> bool:
    """Whether the action behind this one runs as one with it."""
    pair = (action.stage, action.microbatch)
    return action.kind is Kind.FORWARD and pair in made.together
