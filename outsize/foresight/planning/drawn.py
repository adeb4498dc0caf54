"""A chosen plan as a trace: its schedule played event by event with the seconds that it was priced
with, which is the closed bound's check too.

A microbatch takes a beat of its stage, a third of it forward. What is said and moved beside it
stands on lanes of its own, whose seconds are part of the beat. Sums of gradients and the update
stand at the step's end. Bytes are those of each stage's own worker.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from outsize.foresight import resting
from outsize.foresight.layout import Layout
from outsize.foresight.memory import Memory, kept_by, workers
from outsize.foresight.planning.choose import Planned, Priced, placed
from outsize.foresight.shape import Shape
from outsize.foresight.step import beat, combine, graded, held, terms
from outsize.hardware.cluster import Cluster
from outsize.schedule import Kind, Lane
from outsize.schedule.pipelines import Costs, make
from outsize.schedule.pipelines import Shape as Line
from outsize.simulate.coarse import Times, play
from outsize.trace import Event, Trace

ACTIVATIONS, GATHERED = "device/activations", "device/buffers"
EVENTS = 4096  # passes of all stages that are drawn, at most: further microbatches repeat these
FORWARD = 1 / 3  # of a microbatch
Beside = Mapping[tuple[Lane, Kind], float]  # seconds of what goes on beside something


def drawn(shape: Shape, cluster: Cluster, plan: Planned) -> Trace:
    """Of one worker of every stage; the first microbatches where there are many."""
    lay = plan.layout
    p, v = lay.pipeline, lay.chunks
    part = placed(cluster, plan)
    count = min(lay.microbatches, max(2 * p, EVENTS // (2 * p * v) // p * p))
    few = replace(lay, batch=count * lay.rows * lay.data)
    device = cluster.groups[0].device.name
    priced = Priced.of(shape, [few], device, [terms(shape, few, part)])
    batch = priced.model.priced(priced.batch, priced.values)
    middle, last = (
        float(beat(each, batch.norm, batch.exchanged)[0]) for each in (batch.middle, batch.last)
    )
    seconds = combine(batch)
    forward = middle * FORWARD
    stages = (*[1.0] * (p * v - 1), _last(middle, last, v))
    costs = Costs(forward, forward, forward, 0.0)
    line = make("interleaved" if v > 1 else "1f1b", Line(p, count, costs, v if v > 1 else None))
    played = play(line, Times(forward, forward, forward, stages=stages)).trace()
    gathers = float(batch.middle["gathers"][0] + batch.middle["waited"][0])
    beside = _Beside(shape, lay, part, gathers / v)
    held_by = tuple(workers(shape, lay, plan.memory.kept).values())
    passes = tuple(_held(played, held_by, p * v - 1))
    said = _along(passes, {kind: beside.of(kind) for kind in (Kind.FORWARD, Kind.BACKWARD)})
    ends = _ends(played, float(seconds.sums[0]), float(seconds.update[0]))
    moved = _along(ends, {Kind.UPDATE: beside.of(Kind.UPDATE)})
    meta = {
        "microbatches": f"{count} of {lay.microbatches}",
        "step": f"{plan.seconds:.4g} s, from {plan.low:.4g} to {plan.high:.4g}",
        "device": f"{lay.devices} x {device}",
    }
    return Trace("predicted", (*passes, *said, *ends, *moved), meta)


# -- bytes -----------------------------------------------------------------------------------------


def _held(played: Trace, held_by: Sequence[Memory], end: int) -> Iterator[Event]:
    """Events with the bytes of their worker: its states and buffers, and of activations as much as
    has come and not gone. end: the stage with the head, whose logits are there while it runs."""
    most = dict[int, int]()
    for event in played.events:
        count = event.live.get(ACTIVATIONS, 0)
        most[event.worker] = max(count, most.get(event.worker, 0))
    for event in played.events:
        made = held_by[event.worker]
        live = {f"device/{kind}": int(size) for kind, size in made.states.items()}
        part = event.live.get(ACTIVATIONS, 0) / (most[event.worker] or 1)
        live |= {ACTIVATIONS: int(made.activations * part), GATHERED: int(made.gathered)}
        logits = int(made.head) if event.stage == end else 0
        yield replace(event, live=live, peak=sum(live.values()) + logits)


# -- seconds ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Beside:
    """What goes on beside passes and the update. gathers: seconds of a microbatch on a stage."""

    shape: Shape
    layout: Layout
    cluster: Cluster
    gathers: float

    def of(self, kind: Kind) -> Beside:
        """Of one action of that kind."""
        lay, mine = self.layout, sum(held(self.shape, self.layout))
        if kind is Kind.UPDATE:
            each, part = mine / max(lay.states, lay.shards), graded(self.shape, lay)
            at_rest = resting.at_rest(self.cluster, lay, each, part)
            made = {(Lane.HOST, Kind.UPDATE): at_rest} if at_rest else {}
            return {**made, **self._moved(*resting.of_update(lay, each, part))}
        kept, back = kept_by(self.shape, lay, self.shape.layers), kind is Kind.BACKWARD
        moved = self._moved(
            *resting.of_pass(lay, mine / lay.shards, kept, back, graded(self.shape, lay))
        )
        part = 1 - FORWARD if back else FORWARD
        return {(Lane.NETWORK, Kind.GATHER): self.gathers * part, **moved}

    def _moved(self, comes: Mapping[str, float], goes: Mapping[str, float]) -> Beside:
        return {
            (Lane.FETCH, Kind.FETCH): resting.seconds(self.cluster, self.layout, comes, {}),
            (Lane.EVICT, Kind.EVICT): resting.seconds(self.cluster, self.layout, {}, goes),
        }


def _along(events: Sequence[Event], beside: Mapping[Kind, Beside]) -> Iterator[Event]:
    """What goes on beside each: from its start, or when its lane is free."""
    free: dict[tuple[int, Lane], float] = defaultdict(float)
    for event in sorted(events, key=lambda each: each.start):
        for (lane, kind), seconds in beside.get(Kind(event.kind), {}).items():
            if seconds > 0:
                start = max(event.start, free[event.worker, lane])
                free[event.worker, lane] = start + seconds
                yield Event(event.worker, lane, kind, event.stage, event.microbatch,
                            start, start + seconds)  # fmt: skip


def _last(middle: float, last: float, chunks: int) -> float:
    """How much longer the last of the pipeline's stages takes than another: the head is on it."""
    return 1.0 + (last / middle - 1.0) * chunks


def _ends(played: Trace, sums: float, update: float) -> list[Event]:
    """Of every worker, behind its last microbatch."""
    stop = max(event.end for event in played.events)
    found = []
    for worker in played.workers:
        mine = max(event.end for event in played.events if event.worker == worker)
        if sums > 0:
            found.append(Event(worker, Lane.NETWORK, Kind.REDUCE, -1, -1, mine, mine + sums))
        found.append(
            Event(worker, Lane.COMPUTE, Kind.UPDATE, -1, -1, stop + sums, stop + sums + update)
        )
    return found
