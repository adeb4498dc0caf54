"""How packed documents lie: stretches of equal length, chunks of queries, virtual tokens.

C queries of a chunk, L keys it can see.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Queries handled at once where scores or a mask are made: large enough for full speed, small
# enough that a chunk's scores stay small beside the activations.
CHUNK_LEAST, CHUNK_MOST = 256, 1024
VIRTUAL = 0  # the id of a virtual token (outsize/models/virtual.py); any would do


def runs(bounds: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """(first token, documents, tokens each) for stretches of documents of equal length."""
    first, documents, length = 0, 0, 0
    for start, stop in itertools.pairwise(bounds):
        if stop - start != length and documents:
            yield first, documents, length
            first, documents = start, 0
        length = stop - start
        documents += 1
    if documents:
        yield first, documents, length


def clip(bounds: tuple[int, ...], start: int, stop: int) -> tuple[int, ...]:
    """The documents, or parts of them, that lie in tokens start .. stop, counted from start."""
    inner = bounds[bisect_right(bounds, start) : bisect_left(bounds, stop)]
    return (0, *(bound - start for bound in inner), stop - start)


def past(bounds: tuple[int, ...], start: int) -> int:
    """Tokens before `start` that belong to the document it lies in."""
    return start - bounds[bisect_right(bounds, start) - 1]


def stretches(bounds: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[slice, slice, int]]:
    """(queries, keys, documents) of stretches of equally long documents, or parts of them, among
    the tokens start .. stop: queries counted from `start`, keys from the first token of all. A
    document that began earlier is on its own, with the keys before `start` too."""
    inner, before = clip(bounds, start, stop), past(bounds, start)
    first = inner[1] if before else 0
    if first:
        yield slice(0, first), slice(start - before, start + first), 1
    for begin, documents, length in runs(clip(inner, first, inner[-1])):
        if length:
            low, high = first + begin, first + begin + documents * length
            yield slice(low, high), slice(start + low, start + high), documents


def chunks(length: int, window: int | None, past: int = 0) -> Iterator[tuple[int, int, int]]:
    """(first query, end of queries, first key) of chunks of the queries past .. length; a chunk's
    last key is its last query."""
    span = length if window is None else min(window, length)
    size = min(max(span, CHUNK_LEAST), CHUNK_MOST)
    for start in range(past, length, size):
        first_key = 0 if window is None else max(0, start - window + 1)
        yield start, min(start + size, length), first_key


def visible(start: int, stop: int, low: int, window: int | None, device: torch.device) -> Tensor:
    """(C, L) bool: which keys low..stop the queries start..stop see."""
    query_C1 = torch.arange(start, stop, device=device).unsqueeze(1)
    key_L = torch.arange(low, stop, device=device)
    seen_CL = key_L <= query_C1
    return seen_CL if window is None else seen_CL & (key_L > query_C1 - window)


def prompted(ids: Sequence[int], count: int) -> tuple[int, ...]:
    """A prompt behind so many virtual tokens."""
    return (VIRTUAL,) * count + tuple(ids)


def begun(ids_T: Tensor, bounds: tuple[int, ...], count: int) -> tuple[Tensor, tuple[int, ...]]:
    """Documents laid flat with so many virtual tokens before each, and their bounds."""
    if not count:
        return ids_T, bounds
    before = ids_T.new_full((count,), VIRTUAL)
    parts = [torch.cat((before, ids_T[first:last])) for first, last in itertools.pairwise(bounds)]
    return torch.cat(parts), tuple(at + i * count for i, at in enumerate(bounds))


def without(x_T: Tensor, bounds: tuple[int, ...], count: int) -> Tensor:
    """Of what `begun` documents gave, (more than T, ...), what their own tokens, of these bounds,
    did."""
    if not count:
        return x_T

    def own() -> Iterator[Tensor]:
        for i, (first, last) in enumerate(itertools.pairwise(bounds), start=1):
            yield x_T[first + i * count : last + i * count]

    return torch.cat(list(own()))
