"""Choosing the plan of one device: the quickest candidate that fits the budget.

Candidates differ in how many rows a microbatch has, how many logits and feed-forward activations
exist at once, and what is computed again: nothing, parts, or some or all of the blocks. All are
exact; each is forecast, and the first in order of foretold time that fits is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from outsize.data import Batch
from outsize.errors import OutsizeError
from outsize.hardware import Hardware
from outsize.memory import Ledger, format_bytes
from outsize.memory.tiers import TierSpec
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.optim import Optimizer
from outsize.plan import Plan, Precision, Stage
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.simulate import Forecast, forecast
from outsize.simulate.forecast import compose
from outsize.simulate.rehearse import Costs, Facts, bare, facts_of, nowhere, rehearse
from outsize.simulate.sample import Sample, expand, sample

# Where memory allows: calls cost less the larger they are. 25M model, 2 cores: 2, 4, 8 rows of 512
# gave 1,640, 1,750, 1,780 tokens/s in float32 and 3,800, 4,050, 4,340 in bfloat16.
TOKENS_AT_ONCE = 4096
LEAST_CHUNK = 64  # tokens of a chunk of the sequence: a tile of our attention
LOGIT_TOKENS = 512  # logits of so many tokens at once: products lose nothing, memory stays small


@dataclass(frozen=True)
class Wish:
    """What the user has fixed; None where the planner chooses.

    documents: cumulative offsets (0, ..., sequence) of the documents in a row where every row has
    the same; None where rows hold documents of any lengths, and the costliest are foretold.
    tiers: below the device, on which states may rest, the preferred ones first; the hardware of a
    forecast has a tier of the same name with measured rates for each.
    """

    rows: int
    sequence: int
    precision: Precision
    optimizer: Optimizer
    clip: float | None = None
    budget: int | None = None
    microbatch_rows: int | None = None
    recompute: tuple[str, ...] | None = None
    loss_chunk: int | None = None
    mlp_tile: int | None = None
    split_backward: bool = False
    approximate: tuple[str, ...] = ()
    documents: tuple[int, ...] | None = None
    sequence_chunk: int | None = None
    tiers: tuple[TierSpec, ...] = ()


Makers = tuple[Callable[[Plan, Ledger], Job], Callable[[int], object]]


def layouts(wish: Wish) -> tuple[tuple[int, ...], ...]:
    """The documents of a row to rehearse: one of these layouts holds the most of all.

    A document of a length that kernels like needs no copies, one beside it does; scores that are
    made explicitly (windows, caps) are most for the longest document.
    """
    if wish.documents is not None:
        return (wish.documents,)
    whole = (0, wish.sequence)
    return ((0, 1, wish.sequence), whole) if wish.sequence > 1 else (whole,)


def native_makers(
    config: DecoderConfig, wish: Wish, documents: tuple[int, ...] | None = None
) -> Makers:
    """How a rehearsal makes a native decoder's job, and a batch of whole rows.

    documents: of every row; by default the first of `layouts`.
    """
    bounds = documents or layouts(wish)[0]

    def job_of(plan: Plan, ledger: Ledger) -> Job:
        flow = NativeFlow(Decoder(config), plan)
        stores = nowhere(plan)
        return Job(flow, plan, wish.optimizer, clip=wish.clip, ledger=ledger, stores=stores)

    def batch_of(rows: int) -> Batch:
        ids = torch.zeros(rows, wish.sequence, dtype=torch.int64)
        return Batch(ids, torch.zeros_like(ids), (bounds,) * rows)

    return job_of, batch_of


def choose(config: DecoderConfig, wish: Wish, hardware: Hardware) -> Forecast:
    """The quickest plan for a native decoder that fits wish.budget.

    Raises OutsizeError where none fits, with the missing bytes and the nearest that does.
    """

    # Plans that differ only in how many layers are recomputed share a sample, and so its costs.
    known: dict[tuple[object, ...], Costs] = {}

    def costs(chosen: Sample, bounds: tuple[int, ...]) -> Costs:
        key = (bare(chosen.plan), chosen.config.layers, bounds)
        if key not in known:
            known[key] = rehearse(chosen.plan, *native_makers(chosen.config, wish, bounds))
        return known[key]

    facts = facts_of_model(config, wish)

    def worst(plan: Plan) -> Forecast:
        chosen = sample(config, plan)
        made = (
            compose(plan, expand(costs(chosen, bounds), chosen, plan, facts), hardware)
            for bounds in layouts(wish)
        )
        return max(made, key=lambda forecast: forecast.peak)

    segments = len(config.layers) + 2
    return pick(_candidates(wish, segments), worst, wish.budget)


def facts_of_model(config: DecoderConfig, wish: Wish) -> Facts:
    """What the placement of plans needs of a native decoder."""
    segments = len(config.layers) + 2
    stages = per_segment(segments)
    plan = Plan(segments, stages, precision=wish.precision, approximate=wish.approximate)
    with FakeTensorMode():
        return facts_of(Job(NativeFlow(Decoder(config), plan), plan, wish.optimizer))


def foretell(config: DecoderConfig, wish: Wish, plan: Plan, hardware: Hardware) -> Forecast:
    """The forecast of a given plan for a native decoder, with the costliest of `layouts`."""
    made = (
        forecast(plan, *native_makers(config, wish, bounds), hardware) for bounds in layouts(wish)
    )
    return max(made, key=lambda one: one.peak)


def pick(
    candidates: Iterator[Plan], foretell: Callable[[Plan], Forecast], budget: int | None
) -> Forecast:
    """The first forecast that fits; candidates come in order of rising time."""
    smallest: Forecast | None = None
    for plan in candidates:
        made = foretell(plan)
        if budget is None or made.peak <= budget:
            return made
        if smallest is None or made.peak < smallest.peak:
            smallest = made
    assert smallest is not None and budget is not None
    raise OutsizeError(
        f"memory budget of {format_bytes(budget)} ({budget} bytes) is too small:"
        f" {smallest.peak - budget} bytes missing; the smallest plan needs"
        f" {format_bytes(smallest.peak)} ({smallest.peak} bytes,"
        f" {format_bytes(sum(smallest.static.values()))} of them parameters, gradients and"
        f" optimizer): set memory to {-(-smallest.peak // 2**20)}MiB, or use a smaller model"
    )


def _candidates(wish: Wish, segments: int) -> Iterator[Plan]:
    """Plans in order of rising time: fewer rows first, then recompute of ever more, then tiles."""
    sizes = _row_choices(wish)
    if wish.sequence_chunk and wish.recompute is None:  # chunks are of blocks that run again
        wish = replace(wish, recompute=("block",))
    base = Plan(
        segments,
        _stages(wish, segments, 0),
        wish.rows,
        sizes[0],
        wish.sequence,
        wish.precision,
        _loss_chunk(wish, LOGIT_TOKENS),
        wish.mlp_tile or 0,
        wish.split_backward,
        wish.budget,
        wish.approximate,
        sequence_chunk=wish.sequence_chunk or 0,
    )
    for rows in sizes:
        yield replace(base, microbatch_rows=rows, stages=_stages(wish, segments, 0))
    smallest = replace(base, microbatch_rows=sizes[-1])
    if wish.recompute is None:
        yield from _graded(smallest, wish, segments)
    tight = replace(smallest, stages=_stages(wish, segments, segments - 2))
    long, short = _sequence_chunks(wish, tight)
    if long > short:
        yield replace(tight, loss_chunk=_loss_chunk(wish, 128), sequence_chunk=long)
    for tokens in (128, 32):
        tile = tokens if wish.mlp_tile is None else wish.mlp_tile
        logits = _loss_chunk(wish, tokens)
        yield replace(tight, loss_chunk=logits, mlp_tile=tile, sequence_chunk=short)


def _sequence_chunks(wish: Wish, tight: Plan) -> tuple[int, int]:
    """Tokens of a microbatch in a block at once: an eighth, then so few that the rest of a step
    needs more; or as the user says."""
    tokens = tight.microbatch_rows * wish.sequence
    whole = any(stage.whole for stage in tight.stages) and not wish.split_backward
    if wish.sequence_chunk is not None or not whole or tokens < 2 * LEAST_CHUNK:
        return tight.sequence_chunk, tight.sequence_chunk
    long, short = (max(LEAST_CHUNK, -(-tokens // parts)) for parts in (8, 32))
    return long, short


def _graded(plan: Plan, wish: Wish, segments: int) -> Iterator[Plan]:
    blocks = segments - 2
    yield replace(plan, stages=per_segment(segments, ("mlp",)))
    steps = sorted({-(-blocks * eighth // 8) for eighth in range(1, 9)})
    for count in steps:
        yield replace(plan, stages=_stages(wish, segments, count))


def _stages(wish: Wish, segments: int, recomputed: int) -> tuple[Stage, ...]:
    """A stage a segment; as the user says, or the first `recomputed` blocks again as a whole."""
    if wish.recompute is not None:
        return per_segment(segments, wish.recompute)
    return tuple(
        Stage(i, i + 1, ("block",) if 0 < i <= recomputed else ()) for i in range(segments)
    )


def _row_choices(wish: Wish) -> list[int]:
    """Rows of a microbatch: about TOKENS_AT_ONCE tokens, then ever fewer, unless fixed."""
    if wish.microbatch_rows is not None:
        return [min(wish.microbatch_rows, wish.rows)]
    rows = min(wish.rows, max(1, TOKENS_AT_ONCE // max(1, wish.sequence)))
    choices = [rows]
    while rows > 1:
        rows //= 2
        choices.append(rows)
    return choices


def _loss_chunk(wish: Wish, tokens: int) -> int:
    return tokens if wish.loss_chunk is None else wish.loss_chunk
