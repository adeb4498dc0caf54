"""The candidates of one device in order of rising time, all exact.

They differ in how many rows a microbatch has, how many logits and feed-forward activations exist at
once, and what is computed again: nothing, parts, or some or all of the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from outsize.errors import OutsizeError
from outsize.plan import Plan, Sharding, Stage, Stream
from outsize.plan.plan import per_segment
from outsize.plan.settings import PLAN_SETTINGS
from outsize.search.pipeline_request import playing, row_choices
from outsize.search.request import LOGIT_TOKENS, PlanRequest

TILES = 16  # of the feed-forward layer in what of a block runs at once, at most


def candidates(request: PlanRequest, segments: int) -> Iterator[Plan]:
    """Plans in order of rising time: fewer rows first, then recompute of ever more, then tiles."""
    sizes = _row_choices(request)
    for one, value in request.settings.every():
        if value and one.recompute and request.recompute is None:
            request = replace(request, recompute=one.recompute)
    line = playing(request)
    # Where all workers must know the sums of a microbatch before its losses are made, chunks of
    # logits are made twice.
    logits = 0 if line.ends else request.logits
    base = Plan(
        segments,
        _stages(request, segments, 0),
        request.rows,
        sizes[0],
        request.sequence,
        request.precision,
        _loss_chunk(request, logits),
        request.mlp_tile or 0,
        request.split_backward,
        request.budget,
        request.approximate,
        order=request.order or "microbatch",
        mesh=request.mesh,
        shards=request.shards or Sharding(1, 1, request.mesh.data),
        stream=Stream(resident=min(request.gathered, segments)),
        sequence_parallel=bool(request.sequence_parallel),
        pipeline=line,
        settings=request.settings,
    )
    for rows in sizes:
        yield replace(base, microbatch_rows=rows, stages=_stages(request, segments, 0))
    smallest = replace(base, microbatch_rows=sizes[-1])
    if request.recompute is None:
        yield from _graded(smallest, request, segments)
    tight = replace(smallest, stages=_stages(request, segments, segments - 2))
    if not request.tiled:
        yield from _in_chunks(request, tight)
        return
    some, tight = (tight, tight) if request.whole else _tighter(request, tight)
    if some != tight:
        yield replace(some, loss_chunk=_loss_chunk(request, 128))
    # Workers call each layer equally often.
    even = request.whole or any(axis.parts for axis in request.mesh.axes)
    for tokens in (128, 32):
        # Less than a part of what runs at once saves next to nothing, and every tile is rehearsed.
        tile = 0 if even else max(tokens, tight.block_tokens // TILES)
        tile = tile if request.mlp_tile is None else request.mlp_tile
        yield replace(tight, loss_chunk=_loss_chunk(request, tokens), mlp_tile=tile)


def _in_chunks(request: PlanRequest, plan: Plan) -> Iterator[Plan]:
    """Somebody's own module a part of each row at a time, where it runs like that."""
    if not request.tokens:
        return
    row = replace(plan, sequence=request.tokens, microbatch_rows=1)
    for made, tokens in zip(_tighter(request, row), (LOGIT_TOKENS, 128), strict=True):
        if made != row:
            yield replace(plan, settings=made.settings, loss_chunk=_loss_chunk(request, tokens))


def _tighter(request: PlanRequest, plan: Plan) -> tuple[Plan, Plan]:
    """A plan with less and with least memory by what techniques add that the user left open."""
    some = plan
    for name, one in PLAN_SETTINGS.items():
        left_open = one.tighter is not None and request.settings.get(name) is None
        if left_open and one.refusal(plan) is None:
            less, least = one.tighter(plan)  # type: ignore[misc]
            try:
                tight = replace(plan, settings=plan.settings.having({name: least}))
            except OutsizeError:  # it does not go with what the user has said
                continue
            some, plan = replace(some, settings=some.settings.having({name: less})), tight
    return some, plan


def _graded(plan: Plan, request: PlanRequest, segments: int) -> Iterator[Plan]:
    blocks = segments - 2
    if request.tiled:
        yield replace(plan, stages=per_segment(segments, ("mlp",)))
    steps = sorted({-(-blocks * eighth // 8) for eighth in range(1, 9)})
    for count in steps:
        yield replace(plan, stages=_stages(request, segments, count))


def _stages(request: PlanRequest, segments: int, recomputed: int) -> tuple[Stage, ...]:
    """A stage a segment; as the user says, or the first `recomputed` blocks again as a whole."""
    if request.recompute is not None:
        return per_segment(segments, request.recompute)
    return tuple(
        Stage(i, i + 1, ("block",) if 0 < i <= recomputed else ()) for i in range(segments)
    )


def _row_choices(request: PlanRequest) -> list[int]:
    """Rows of a microbatch: about request.at_once tokens, then ever fewer, unless fixed."""
    own = -(-request.rows // request.mesh.rows)
    most = max(1, request.at_once // max(1, request.sequence))
    if request.mesh.pipeline > 1:
        choices = row_choices(request)
        return [rows for rows in choices if rows <= most] or choices[-1:]
    if request.microbatch_rows is not None:
        return [min(request.microbatch_rows, own)]
    rows = min(own, most)
    choices = [rows]
    while rows > 1:
        rows //= 2
        choices.append(rows)
    return choices


def _loss_chunk(request: PlanRequest, tokens: int) -> int:
    return tokens if request.loss_chunk is None else request.loss_chunk
