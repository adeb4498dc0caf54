"""ISO: a prompt in two halves, the sums of one beside the computation of the other.

Under tensor parallelism a prompt alternates between computing and summing. Of two halves of its
tokens one can always compute while the other's branch is summed: the second half's attention needs
of the first only the keys and values of the same layer, which are there when its turn comes (Xiao
and Su, "ISO: Overlap of Computation and Communication within Sequence for LLM Inference", 2024).
Exact: every token's numbers are those of the whole prompt, up to the rounding of a batch's shape.

T tokens, N sequences, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from outsize.decode.cache import CachedAttend
from outsize.decode.generate import Forward, direct
from outsize.errors import OutsizeError
from outsize.models.decoder import Block, Decoder
from outsize.models.linear import Linear
from outsize.models.seams import Context
from outsize.parallel.courier import Flight
from outsize.parallel.overlap_products import Overlap, all_reduce

LEAST = 32  # tokens of a step below which its sums are too short to be worth a thread

Walk = Generator[Tensor, Tensor, Tensor]  # yields summands, is sent sums, returns what it is for


def in_halves(model: Decoder, overlap: Overlap, least: int = LEAST) -> Forward:
    """How generation goes through a model that `split` has cut for a tensor axis: steps of `least`
    tokens and more in two halves, others as they are.

    overlap: its axis has the same workers. OutsizeError for a model that sums in other places:
    ladder and Kraken models overlap by themselves, a stream cut by tokens has no halves.
    """
    blocks = [block for block in model.blocks if isinstance(block, Block)]
    if len(blocks) < len(model.blocks):
        raise OutsizeError(
            "iso: a ladder or Kraken model sums beside its own branches; generate without iso"
        )
    whole = direct(model)

    def forward(
        ids_T: Tensor, positions_T: Tensor, bounds: tuple[int, ...], attend: CachedAttend
    ) -> Tensor:
        tokens = bounds[-1]
        if tokens < max(2, least):
            return whole(ids_T, positions_T, bounds, attend)
        halves = []
        for first, last in ((0, tokens // 2), (tokens // 2, tokens)):
            here, part = slice(first, last), part_of(attend, first, last)
            ctx = model.context(positions_T[here], part.bounds, part, lengths=part.lengths)
            x_TD = model.prologue(ids_T[here], ctx)
            halves.append(_walk(blocks, x_TD, ctx))
        x_TD = torch.cat(_together(halves, overlap))
        last_N = torch.tensor(bounds[1:], device=x_TD.device) - 1
        logits_NV: Tensor = model.epilogue.logits(model.epilogue(x_TD[last_N]))
        return logits_NV

    return forward


def part_of(attend: CachedAttend, first: int, last: int) -> CachedAttend:
    """A step's Attend for its tokens first .. last alone; those before must have come."""
    slots, starts, counts, ahead = [], [], [], []
    spans = pairwise(attend.bounds)
    each = zip(attend.slots, attend.starts, attend.ahead, spans, strict=True)
    for slot, start, more, (begin, end) in each:
        a, b = max(begin, first), min(end, last)
        if a < b:
            slots.append(slot)
            starts.append(start + a - begin)
            counts.append(b - a)
            ahead.append(more + end - b)
    bounds = (0, *accumulate(counts))
    return replace(
        attend, slots=tuple(slots), starts=tuple(starts), bounds=bounds, ahead=tuple(ahead)
    )


def _together(walks: list[Walk], overlap: Overlap) -> list[Tensor]:
    """Take the walks by turns: while one computes, what the others gave is summed."""
    results: dict[int, Tensor] = {}
    waiting: dict[int, tuple[Flight, Tensor] | None] = dict.fromkeys(range(len(walks)))
    while waiting:
        for i in list(waiting):
            flown = waiting[i]
            try:
                if flown is None:
                    summand = next(walks[i])
                else:
                    flown[0].wait()
                    summand = walks[i].send(flown[1])
            except StopIteration as end:
                results[i] = end.value
                del waiting[i]
                continue
            summand = summand.contiguous()
            work = partial(all_reduce, overlap.axis, summand)
            waiting[i] = overlap.send(work, summand.device), summand
    return [results[i] for i in range(len(walks))]


def _walk(blocks: list[Block], x_TD: Tensor, ctx: Context) -> Walk:
    """Through the blocks; what branches give goes out to be summed."""
    for block in blocks:
        attended_TD = yield _summand(block.attention, block.attention_norm(x_TD), ctx)
        attended_TD = _biased(block.attention, attended_TD)
        if block.parallel:
            fed_TD = yield _summand(block.mlp, block.mlp_norm(x_TD), ctx)
            x_TD = x_TD + attended_TD + _biased(block.mlp, fed_TD)
            continue
        x_TD = block.add(x_TD, attended_TD, block.attention_out_norm)
        fed_TD = yield _summand(block.mlp, block.mlp_norm(x_TD), ctx)
        x_TD = block.add(x_TD, _biased(block.mlp, fed_TD), block.mlp_out_norm)
    return x_TD


def _summand(branch: nn.Module, h_TD: Tensor, ctx: Context) -> Tensor:
    """What this worker's part of a branch gives: its hooks, which sum, are left out."""
    y_TD: Tensor = branch.forward(h_TD, ctx)
    return y_TD


def _biased(branch: nn.Module, y_TD: Tensor) -> Tensor:
    """With the bias of the row weight, which `split` left out of its product."""
    for bias in _biases(branch):
        y_TD = y_TD + bias
    return y_TD


def _biases(branch: nn.Module) -> Iterator[Tensor]:
    for row in branch.children():
        if isinstance(row, Linear) and row.use == "row" and row.bias is not None:
            yield row.bias
