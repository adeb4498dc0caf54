"""Which activations of a pipeline leave for the host: all where the link has the time, else those
that live longest.

Wan et al., "PipeOffload: Improving Scalability of Pipeline Parallelism with Memory Optimization",
2025. What a worker's link can move while the worker computes bounds the part that leaves: all of it
where moving takes no longer than computing. Otherwise stages go in order of their life from forward
to gradient, for a byte saves as long as it would have lived. What comes back is asked for just in
time, going backwards from the actions that read it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outsize.errors import OutsizeError
from outsize.schedule.action import Action, Kind, Lane
from outsize.schedule.pipelines.offloaded import Offloaded, offloaded
from outsize.schedule.pipelines.pipeline import Pair, Pipeline
from outsize.simulate.coarse import Moving, Played, Times, play

NEGLIGIBLE = 0.01  # longer a step may get by moving
_TRIES = 8  # parts that are tried, from what the link could move down to an eighth of that
_READS = (Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT)
_EXACT = 1e-9  # seconds; sums of times that are equal may differ by so much
_ENDS = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
Parts = Mapping[tuple[int, int], float]


@dataclass(frozen=True)
class Spilling:
    """made: the pipeline with its moves. kept, played: the step without and with them. moved: the
    part of all activations that leaves, by worker."""

    made: Offloaded
    kept: Played
    played: Played
    moved: tuple[float, ...]

    @property
    def slower(self) -> float:
        """How many times as long the step takes."""
        return self.played.run.makespan / self.kept.run.makespan


def spilled(
    pipeline: Pipeline,
    times: Times,
    moving: Moving,
    part: float | None = None,
    pieces: Sequence[int] = (),
) -> Spilling:
    """The pipeline with as many activations away as cost no more than NEGLIGIBLE of its step.

    part: of a worker's activations, to move exactly so much whatever it costs. pieces: fine stages
    of each stage, which leave or stay as wholes; (): any part of a stage can leave.
    """
    kept = play(pipeline, times)
    lives = lives_of(kept)
    if part is not None:
        if not 0 <= part <= 1:
            raise OutsizeError(f"offload: part is {part}; expected 0 to 1")
        return _tried(kept, times, moving, [part] * kept.run.workers, lives, pieces)
    room = [min(1.0, fits) for fits in _fitting(kept, moving)]
    for tried in range(_TRIES, 0, -1):
        shares = [fits * tried / _TRIES for fits in room]
        found = _tried(kept, times, moving, shares, lives, pieces)
        if found.slower <= 1 + NEGLIGIBLE:
            return found
    return _tried(kept, times, moving, [0.0] * len(room), lives, pieces)


def lives_of(played: Played) -> dict[tuple[int, int], float]:
    """By worker and stage, mean seconds from the start of a forward to the end of its gradients."""
    begun: dict[Pair, float] = {}
    lives: dict[tuple[int, int], list[float]] = defaultdict(list)
    order = sorted(range(len(played.actions)), key=lambda i: played.run.ends[i])
    for i in order:
        for action in played.actions[i]:
            pair = (action.stage, action.microbatch)
            if action.kind is Kind.FORWARD:
                begun[pair] = played.run.starts[i]
            elif action.kind in _ENDS:
                here = (played.run.nodes[i].worker, action.stage)
                lives[here].append(played.run.ends[i] - begun[pair])
    return {here: sum(seconds) / len(seconds) for here, seconds in lives.items()}


def _fitting(kept: Played, moving: Moving) -> list[float]:
    """By worker, the part of its activations that its link moves while it computes."""
    units = [0.0] * kept.run.workers
    for node, actions in zip(kept.run.nodes, kept.actions, strict=True):
        units[node.worker] += sum(a.kind is Kind.FORWARD for a in actions)
    per = kept.pipeline.placement.share * moving.both
    pairs = zip(kept.run.busy, units, strict=True)
    return [busy / (count * per) if count * per else 1.0 for busy, count in pairs]


def _tried(
    kept: Played,
    times: Times,
    moving: Moving,
    shares: Sequence[float],
    lives: Mapping[tuple[int, int], float],
    pieces: Sequence[int],
) -> Spilling:
    chosen = _chosen(lives, shares, pieces)
    asked = _asked(kept, moving, chosen)
    made = offloaded(kept.pipeline, chosen, asked)
    moved, every = [0.0] * len(shares), [0] * len(shares)
    for worker, actions in enumerate(kept.pipeline.schedule.workers):
        for action in actions:
            if action.kind is Kind.FORWARD:
                every[worker] += 1
                if (action.stage, action.microbatch) in asked:
                    moved[worker] += chosen[worker, action.stage]
    parts = tuple(part / max(1, count) for part, count in zip(moved, every, strict=True))
    return Spilling(made, kept, play(made.pipeline, times, moving, chosen), parts)


def _chosen(
    lives: Mapping[tuple[int, int], float], shares: Sequence[float], pieces: Sequence[int]
) -> dict[tuple[int, int], float]:
    """By worker and stage, the part that leaves: longest life first, up to the worker's share."""
    found: dict[tuple[int, int], float] = {}
    for worker, share in enumerate(shares):
        mine = sorted((here for here in lives if here[0] == worker), key=lambda h: -lives[h])
        left = share * len(mine)
        for here in mine:
            part = min(1.0, left)
            if pieces:
                part = int(part * pieces[here[1]] + 1e-9) / pieces[here[1]]
            if part > 1e-9:
                found[here] = part
                left -= part
    return found


def _asked(kept: Played, moving: Moving, chosen: Parts) -> dict[Pair, int]:
    """By stage and microbatch, the place in its worker's list before which it is asked for."""
    asked: dict[Pair, int] = {}
    for worker in range(kept.run.workers):
        asked.update(_asked_of(kept, worker, moving, chosen))
    return asked


def _asked_of(kept: Played, worker: int, moving: Moving, chosen: Parts) -> dict[Pair, int]:
    """Those of one worker. What could not be gone before it is asked for stays."""
    share = kept.pipeline.placement.share * moving.shared
    rows = [
        (kept.run.starts[i], kept.run.ends[i], actions)
        for i, actions in enumerate(kept.actions)
        if kept.run.nodes[i].worker == worker and kept.run.nodes[i].lane == Lane.COMPUTE
    ]
    gone: dict[Pair, float] = {}
    free = 0.0
    for _, end, actions in rows:
        for action in actions:
            part = chosen.get((worker, action.stage), 0.0) * share
            if action.kind is Kind.FORWARD and part:
                free = gone[action.stage, action.microbatch] = max(free, end) + part * moving.out
    starts: dict[Pair, float] = {}
    free = float("inf")
    for start, _, actions in reversed(rows):
        for action in reversed(actions):
            pair = (action.stage, action.microbatch)
            if action.kind in _READS and pair in gone:
                begins = min(free, start) - chosen[worker, action.stage] * share * moving.back
                if begins >= gone[pair]:
                    free = starts[pair] = begins
    return _places(kept, worker, rows, starts)


def _places(
    kept: Played,
    worker: int,
    rows: Sequence[tuple[float, float, tuple[Action, ...]]],
    starts: Mapping[Pair, float],
) -> dict[Pair, int]:
    """By what comes back, the place of the action that runs when it is asked for, or the next."""
    index = {action: i for i, action in enumerate(kept.pipeline.schedule.workers[worker])}
    ends = [end for _, end, _ in rows]
    return {
        pair: index[rows[bisect_right(ends, when + _EXACT)][2][0]] for pair, when in starts.items()
    }
