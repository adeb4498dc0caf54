"""The candidates of one device in order of rising time, all exact.

They differ in how many rows a microbatch has, how many logits and feed-forward activations exist at
once, and what is computed again: nothing, parts, or some or all of the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from outsize.plan import Plan, Sharding, Stage, Stream
from outsize.plan.plan import per_segment
from outsize.search.pipelined import playing, row_choices, splits
from outsize.search.wish import Wish

# Where memory allows: calls cost less the larger they are. 25M model, 2 cores: 2, 4, 8 rows of 512
# gave 1,640, 1,750, 1,780 tokens/s in float32 and 3,800, 4,050, 4,340 in bfloat16.
TOKENS_AT_ONCE = 4096
LEAST_CHUNK = 64  # tokens of a chunk of the sequence: a tile of our attention
TILES = 16  # of the feed-forward layer in a chunk of the sequence, at most
LOGIT_TOKENS = 512  # logits of so many tokens at once: products lose nothing, memory stays small


def candidates(wish: Wish, segments: int) -> Iterator[Plan]:
    """Plans in order of rising time: fewer rows first, then recompute of ever more, then tiles."""
    sizes = _row_choices(wish)
    if wish.sequence_chunk and wish.recompute is None:  # chunks are of blocks that run again
        wish = replace(wish, recompute=("block",))
    if splits(wish):  # weight gradients kept for later would hold every chunk
        wish = replace(wish, sequence_chunk=0)
    line = playing(wish)
    if line.vocabulary:  # all workers must know the sums of a microbatch before its losses are made
        wish = replace(wish, loss_chunk=wish.loss_chunk or 0)
        wish = replace(wish, sequence_chunk=wish.sequence_chunk or 0)
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
        order=wish.order or "microbatch",
        sequence_chunk=wish.sequence_chunk or 0,
        mesh=wish.mesh,
        shards=wish.shards or Sharding(1, 1, wish.mesh.data),
        stream=Stream(resident=min(wish.gathered, segments)),
        sequence_parallel=wish.sequence_parallel,
        overlap=wish.overlap,
        pipeline=line,
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
        # Less than a part of a chunk saves next to nothing, and every tile is rehearsed.
        tile = max(tokens, short // TILES) if wish.mlp_tile is None else wish.mlp_tile
        logits = _loss_chunk(wish, tokens)
        yield replace(tight, loss_chunk=logits, mlp_tile=tile, sequence_chunk=short)


def _sequence_chunks(wish: Wish, tight: Plan) -> tuple[int, int]:
    """Tokens of a microbatch in a block at once: an eighth, then so few that the rest of a step
    needs more; or as the user says, or all where the workers share them out."""
    tokens = tight.microbatch_rows * wish.sequence
    whole = any(stage.whole for stage in tight.stages) and not wish.split_backward
    fixed = wish.sequence_chunk is not None or wish.sequence_parallel
    if fixed or not whole or tokens < 2 * LEAST_CHUNK:
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
    own = -(-wish.rows // wish.mesh.data)
    most = max(1, TOKENS_AT_ONCE // max(1, wish.sequence))
    if wish.mesh.pipeline > 1:
        choices = row_choices(wish)
        return [rows for rows in choices if rows <= most] or choices[-1:]
    if wish.microbatch_rows is not None:
        return [min(wish.microbatch_rows, own)]
    rows = min(own, most)
    choices = [rows]
    while rows > 1:
        rows //= 2
        choices.append(rows)
    return choices


def _loss_chunk(wish: Wish, tokens: int) -> int:
    return tokens if wish.loss_chunk is None else wish.loss_chunk
