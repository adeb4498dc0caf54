"""The pipeline contests: which schedule meets which, how the stages are cut, and one contest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import torch
from support.bench_parallel import Bench, Contest
from support.contender_parallel import Task
from support.figures_parallel import Side
from support.worlds_parallel import Spot, World, in_turns

OURS, THEIRS = "support.ours_pipeline", "peers.pipelined"
WORKERS = 4


@dataclass(frozen=True)
class Pair:
    """A schedule of torch.distributed.pipelining and ours that meets it; stages a worker of each;
    whether theirs lie in a V (ours then do too)."""

    theirs: str
    ours: str
    chunks: tuple[int, int] = (1, 1)
    vee: bool = False


# Interleaved zero bubble is ZB1P over two stages a rank, which no schedule of ours is. Of ours that
# part the two gradients, zb-h1 holds what 1F1B holds, less than theirs.
PAIRS = {
    "gpipe": Pair("ScheduleGPipe", "gpipe"),
    "1f1b": Pair("Schedule1F1B", "1f1b"),
    "interleaved": Pair("ScheduleInterleaved1F1B", "interleaved:2", (2, 2)),
    "breadth-first": Pair("ScheduleLoopedBFS", "breadth-first:2", (2, 2)),
    "interleaved-zb": Pair("ScheduleInterleavedZeroBubble", "zb-h1", (2, 1)),
    "zb-v": Pair("ScheduleZBVZeroBubble", "zb-v", (2, 2), True),
    "dualpipe-v": Pair("ScheduleDualPipeV", "dualpipe-v", (2, 2), True),
}


def costs_of(config: Mapping[str, Any]) -> list[float]:
    """What each segment takes, a layer being 1: the embedding nothing, the head by its products."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    groups = config["num_key_value_heads"] * config["head_dim"]
    layer = hidden * (2 * heads + 2 * groups + 3 * config["intermediate_size"])
    head = hidden * config["vocab_size"] / layer
    return [0.0, *([1.0] * config["num_hidden_layers"]), head]


def cuts_of(costs: Sequence[float], chunks: int, vee: bool) -> tuple[int, ...]:
    """The segments at which stages begin: the costliest worker as cheap as can be, and then the
    costliest stage. A worker has every WORKERS-th stage; in a V the first and the last, and so on.
    """
    count, stages = len(costs), WORKERS * chunks

    def worst(cuts: tuple[int, ...]) -> tuple[float, float]:
        each = [sum(costs[a:b]) for a, b in pairwise((0, *cuts, count))]
        mirror = range(stages)[::-1]
        held = ((w, mirror[w]) if vee else range(w, stages, WORKERS) for w in range(WORKERS))
        return max(sum(each[s] for s in some) for some in held), max(each)

    return min(combinations(range(1, count), stages - 1), key=worst)


@dataclass(frozen=True)
class Bout:
    """A contest with its figures. gradients: the largest difference of the first step's, over the
    largest of their tensor; None where only one side ran."""

    name: str
    pair: Pair
    theirs: Side
    ours: Side | None
    gradients: float | None


def tasks(bench: Bench, pair: Pair, microbatches: int) -> dict[str, Task]:
    """What each side is told."""
    plain = bench.task(Contest("", ""))
    costs = costs_of(plain.config)

    def told(schedule: str, chunks: int) -> Task:
        cuts = cuts_of(costs, chunks, pair.vee)
        return replace(
            plain, pipeline=WORKERS, schedule=schedule, microbatches=microbatches, cuts=cuts
        )

    return {THEIRS: told(pair.theirs, pair.chunks[0]), OURS: told(pair.ours, pair.chunks[1])}


@contextmanager
def ready(bench: Bench, told: Mapping[str, Task]) -> Iterator[list[World]]:
    """The worlds of these sides, ready for their first step; they are gone afterwards."""
    with ExitStack() as stack:
        worlds = []
        for side, task in told.items():
            worlds.append(bench.world(side, task, Spot(WORKERS)))
            stack.callback(worlds[-1].stop)
        for world in worlds:
            world.ready()
        yield worlds


def bout(bench: Bench, name: str, microbatches: int, sides: Sequence[str]) -> Bout:
    """One contest. sides: THEIRS, and OURS if it takes part."""
    every = tasks(bench, PAIRS[name], microbatches)
    told = {side: every[side] for side in sides}
    apart = difference(bench, told) if len(told) > 1 else None
    with ready(bench, told) as worlds:
        in_turns(worlds, bench.steps)
        found = [Side(w.seconds[bench.warm :], w.losses, w.end()) for w in worlds]
    return Bout(name, PAIRS[name], found[0], found[1] if len(found) > 1 else None, apart)


def difference(bench: Bench, told: Mapping[str, Task]) -> float:
    """Between the gradients of both sides' first step, as in Bout.gradients, from workers of their
    own, since to gather them takes memory. SystemExit where one side has a parameter that the other
    has not."""
    leaving = {side: replace(t, gradients=str(bench.folder)) for side, t in told.items()}
    with ready(bench, leaving) as worlds:
        in_turns(worlds, 1)
    theirs, ours = (_left(bench.folder, side) for side in ("theirs", "ours"))
    if theirs.keys() != ours.keys():
        odd = sorted(theirs.keys() ^ ours.keys())
        raise SystemExit(f"gradients of one side only: {', '.join(odd[:5])} ({len(odd)} in all)")
    return max(
        float((theirs[name] - ours[name]).abs().max() / theirs[name].abs().max()) for name in theirs
    )


def _left(folder: Path, side: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob(f"{side}-*.pt")):
        found |= torch.load(path)
        path.unlink()
    return found
