"""A chosen plan as a trace: its schedule played event by event with the seconds that it was priced
with, which is the closed bound's check too.

A microbatch takes a beat of its stage, a third of it forward; what is said beside computing is part
of the beat. Sums of gradients and the update stand at the step's end.
"""

from __future__ import annotations

from dataclasses import replace

from outsize.foresight.memory import Memory
from outsize.foresight.planning.choose import Planned, Priced, placed
from outsize.foresight.shape import Shape
from outsize.foresight.step import beat, combine, terms
from outsize.hardware.cluster import Cluster
from outsize.schedule.pipelines import Costs, make
from outsize.schedule.pipelines import Shape as Line
from outsize.simulate.coarse import Times, play
from outsize.trace import Event, Trace

ACTIVATIONS = "device/activations"
EVENTS = 4096  # passes of all stages that are drawn, at most: further microbatches repeat these


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
    middle, last = (float(beat(each, batch.norm)[0]) for each in (batch.middle, batch.last))
    seconds = combine(batch)
    forward = middle / 3
    stages = (*[1.0] * (p * v - 1), _last(middle, last, v))
    costs = Costs(forward, forward, forward, 0.0)
    line = make("interleaved" if v > 1 else "1f1b", Line(p, count, costs, v if v > 1 else None))
    played = play(line, Times(forward, forward, forward, stages=stages)).trace()
    passes = _held(played, plan.memory)
    events = [*passes, *_ends(played, float(seconds.sums[0]), float(seconds.update[0]))]
    meta = {
        "microbatches": f"{count} of {lay.microbatches}",
        "step": f"{plan.seconds:.4g} s, from {plan.low:.4g} to {plan.high:.4g}",
        "device": f"{lay.devices} x {device}",
    }
    return Trace("predicted", tuple(events), meta)


def _held(played: Trace, memory: Memory) -> list[Event]:
    """Events with the bytes of the fullest worker: its states, and of activations as much as has
    come and not gone."""
    most = max((event.live.get(ACTIVATIONS, 0) for event in played.events), default=0)
    scale = memory.activations / most if most else 0.0
    static = {f"device/{kind}": int(size) for kind, size in memory.states.items()}
    found = []
    for event in played.events:
        live = dict(event.live)
        if live:
            live = {**static, ACTIVATIONS: int(live[ACTIVATIONS] * scale)}
        found.append(replace(event, live=live, peak=sum(live.values())))
    return found


def _last(middle: float, last: float, chunks: int) -> float:
    """How much longer the last of the pipeline's stages takes than another: the head is on it."""
    return 1.0 + (last / middle - 1.0) * chunks


def _ends(played: Trace, sums: float, update: float) -> list[Event]:
    """Of every worker, behind its last microbatch."""
    stop = max(event.end for event in played.events)
    found = []
    for worker in played.workers:
        mine = max(event.end for event in played.events if event.worker == worker)
        found.append(Event(worker, "network", "REDUCE", -1, -1, mine, mine + sums))
        found.append(Event(worker, "compute", "UPDATE", -1, -1, stop + sums, stop + sums + update))
    return found
