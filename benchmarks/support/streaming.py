"""Plans made by hand whose states rest below the device, models whose parameters are never in
memory at once, and the figures that a streamed step is judged by.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outsize.data import Batch
from outsize.hardware import Hardware, Tier
from outsize.models.build import build, initial_values, materialise, segments
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.plan import Plan, Rest
from outsize.plan.plan import Precision, Stream, per_segment
from outsize.schedule import Kind, Schedule, State
from outsize.schedule.kept import GRADIENTS, PARAMETERS
from outsize.schedule.layout import Placement
from outsize.schedule.residency import moved as item_of
from outsize.search import PlanRequest, native_makers
from outsize.search.request import facts_of_model
from outsize.simulate import Forecast
from outsize.simulate.forecast import compose
from outsize.simulate.rehearse import rehearse
from outsize.simulate.sample import Sample, expand
from outsize.trace.trace import Event, Trace

Fill = Callable[[str, Tensor], None]
BFLOAT16_ALL = Precision("bfloat16", None, "bfloat16", "bfloat16")  # under approximate only
LOSS_CHUNK = 512


@dataclass(frozen=True)
class Work:
    """What a step is: rows of `sequence` tokens in so many microbatches, in a precision."""

    rows: int
    sequence: int
    microbatches: int
    precision: Precision

    @property
    def tokens(self) -> int:
        return self.rows * self.sequence


def work_of(tokens: int, sequence: int, microbatches: int, precision: Precision) -> Work:
    """SystemExit where tokens are no whole rows, or rows no whole microbatches."""
    rows = tokens // sequence
    if rows * sequence != tokens or rows % microbatches:
        raise SystemExit(
            f"{tokens} tokens in rows of {sequence} and {microbatches} microbatches do not come"
            " out even; choose other numbers"
        )
    return Work(rows, sequence, microbatches, precision)


def plan_of(
    config: DecoderConfig,
    work: Work,
    rest: Rest,
    stream: Stream | None = None,
    recompute: tuple[str, ...] = ("block",),
    update: str = "behind",
) -> Plan:
    """Every stage a segment, blocks recomputed, every microbatch of a stage before the next one.

    The epilogue's activations stay: they are used at once.
    """
    count = len(config.layers) + 2
    stages = [replace(stage, rest=rest) for stage in per_segment(count, recompute)]
    stages[-1] = replace(stages[-1], rest=replace(rest, activations="device"))
    bare = work.precision.compute == "bfloat16" and work.precision.master is None
    return Plan(
        count, tuple(stages), work.rows, work.rows // work.microbatches, work.sequence,
        work.precision, loss_chunk=LOSS_CHUNK, order="layer",
        update="behind" if update == "behind" else "apart", stream=stream or Stream(),
        approximate=("bfloat16-weights",) if bare else (),
    )  # fmt: skip


def shells(config: DecoderConfig, dtype: torch.dtype) -> Decoder:
    """A decoder on the CPU whose parameters have shapes and one number's memory each."""
    model = build(config, None, dtype)
    for segment, _ in segments(model):
        materialise(model, segment, lambda _, p: torch.empty((), dtype=p.dtype).expand(p.shape))
    return model


def quick_fill(model: Decoder, seed: int) -> Fill:
    """Writes initial values of the right deviation from PyTorch's generator: seconds for a
    billion, where the exact normals of `build` take minutes."""
    initial = dict(initial_values(model))
    generator = torch.Generator().manual_seed(seed)

    def fill(name: str, out: Tensor) -> None:
        start = initial[name]
        bound = start.std * 3**0.5
        if bound:
            out.uniform_(-bound, bound, generator=generator)
        else:
            out.fill_(start.value)

    return fill


def random_batch(config: DecoderConfig, work: Work, seed: int) -> Batch:
    """Random tokens, a document a row."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, config.vocab, (work.rows, work.sequence), generator=generator)
    return Batch(ids, torch.roll(ids, -1, 1), ((0, work.sequence),) * work.rows)


def with_tiers(hardware: Hardware, tiers: Iterable[Tier]) -> Hardware:
    """The hardware with these tiers in place of those of the same names."""
    named = {tier.name: tier for tier in hardware.tiers} | {tier.name: tier for tier in tiers}
    return replace(hardware, tiers=tuple(named.values()))


def predict_sampled(
    config: DecoderConfig, request: PlanRequest, plan: Plan, hardware: Hardware
) -> Forecast:
    """The forecast of a given plan for a model of equal blocks. The first of three is rehearsed
    for all: what a block spills needs others behind it to be gone before it is read."""
    first, block, last = plan.stages[0], plan.stages[1], plan.stages[-1]
    blocks = tuple(replace(block, first=i, last=i + 1) for i in (1, 2, 3))
    small = replace(plan, segments=5, stages=(first, *blocks, replace(last, first=4, last=5)))
    stands = (0, *[1] * len(config.layers), 4)
    chosen = Sample(replace(config, layers=config.layers[:1] * 3), small, stands)
    costs = rehearse(chosen.plan, *native_makers(chosen.config, request, request.documents))
    return compose(plan, expand(costs, chosen, plan, facts_of_model(config, request)), hardware)


# -- bytes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bytes:
    """Payload that a step reads from tiers and writes to them."""

    read: int
    written: int


def formula(placement: Placement) -> Bytes:
    """Of states, in any number of microbatches, from the sizes of the states alone.

    Forward and backward read the parameters once each. An update reads and writes the master copy
    and the moments, and writes the parameters; where it is not right behind the backward pass,
    gradients leave and come again, and so do parameters that are updated themselves.
    """
    plan, size = placement.plan, {PARAMETERS: 0, GRADIENTS: 0, "": 0}
    for index, table in enumerate(placement.chunks.tables):
        for what, dtype in placement.chunks.held(index):
            if placement.chunks.tier(index, what) != "device":
                size[what if what in size else ""] += table.numel * dtype.itemsize
    weights, gradients, others = size[PARAMETERS], size[GRADIENTS], size[""]
    if plan.update == "behind":
        return Bytes(2 * weights + others, weights + others)
    again = weights if plan.precision.master is None else 0
    return Bytes(2 * weights + again + gradients + others, weights + gradients + others)


def moving(schedule: Schedule, placement: Placement) -> Bytes:
    """Of states, what the schedule's own FETCH and EVICT carry."""
    read = written = 0
    for action in schedule.workers[0]:
        if action.state is State.ACTIVATIONS:
            continue
        if action.kind is Kind.FETCH:
            read += sum(s.bytes for s in placement.items.spans[item_of(action)] if s.load)
        elif action.kind is Kind.EVICT:
            written += sum(s.bytes for s in placement.items.spans[item_of(action)] if s.store)
    return Bytes(read, written)


# -- time ---------------------------------------------------------------------------------------

Spans = list[tuple[float, float]]


def union(events: Iterable[Event]) -> Spans:
    """The times in which one of the events is under way, in order, not overlapping."""
    merged: Spans = []
    for start, end in sorted((e.start, e.end) for e in events if e.end > e.start):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


def shared(a: Spans, b: Spans) -> float:
    """Seconds in which both are under way."""
    starts = [start for start, _ in b]
    total = 0.0
    for start, end in a:
        at = max(0, bisect.bisect_right(starts, start) - 1)
        while at < len(b) and b[at][0] < end:
            total += max(0.0, min(end, b[at][1]) - max(start, b[at][0]))
            at += 1
    return total


@dataclass(frozen=True)
class Overlap:
    """Seconds of a step: in which it computes, in which bytes move, in which both."""

    computing: float
    moving: float
    both: float

    @property
    def hidden(self) -> float:
        """The part of moving that lies under computation."""
        return self.both / self.moving if self.moving else 1.0


def overlap(trace: Trace) -> Overlap:
    computing = union(e for e in trace.events if e.lane == "compute")
    other = union(e for e in trace.events if e.kind.startswith(("FETCH", "EVICT")))
    return Overlap(length(computing), length(other), shared(computing, other))


def by_kind(trace: Trace) -> dict[str, float]:
    """Seconds of the actions of each kind, the most first."""
    total: dict[str, float] = {}
    for event in trace.events:
        total[event.kind] = total.get(event.kind, 0.0) + event.end - event.start
    return dict(sorted(total.items(), key=lambda pair: -pair[1]))


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
