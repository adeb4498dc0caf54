"""Several prompts at once through one model, and sequences in pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from outsize.decode.generate import PREFILL_TOKENS, Forward, Request, direct, drawing, play
from outsize.decode.paged import PagedCache, PagedPast, Part
from outsize.decode.samplers import Sampler
from outsize.models.decoder import Decoder


class Kept:
    """Sequences of up to `capacity` tokens in pages, which lie one behind another or anywhere."""

    def __init__(self, slots: int, capacity: int, page: int = 16, anywhere: bool = False) -> None:
        each = -(-capacity // page)
        self.cache = PagedCache(slots * each, page, slots)
        self.lengths = [0] * slots
        self._pages: list[Sequence[int]] = [range(n * each, (n + 1) * each) for n in range(slots)]
        if anywhere:
            self._pages = [list(range(n, slots * each, slots))[::-1] for n in range(slots)]

    def extend(
        self, slots: Sequence[int], counts: Sequence[int], ahead: Sequence[int] | None = None
    ) -> PagedPast:
        """The next tokens of some of them."""
        parts = list[Part]()
        for slot, count, more in zip(slots, counts, ahead or [0] * len(slots), strict=True):
            parts.append(Part(self._pages[slot], self.lengths[slot], count, more, slot))
            self.lengths[slot] += count
        return PagedPast(self.cache, tuple(parts))

    def clear(self, slot: int) -> None:
        self.lengths[slot] = 0
        self.cache.clear(slot)


def run(
    requests: Sequence[Request],
    forward: Forward,
    device: torch.device,
    prefill_tokens: int = PREFILL_TOKENS,
) -> Iterator[tuple[int, int]]:
    """(index of the request, token) in the order in which tokens are drawn."""
    steps = play(requests, drawing(forward), device, prefill_tokens)
    return ((index, one.token) for index, one in steps)


def generate_many(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    samplings: Sequence[Sampler],
) -> list[list[int]]:
    """The new tokens of each prompt."""
    new: list[list[int]] = [[] for _ in prompts]
    requests = [
        Request(tuple(ids), max_new_tokens, sampling, frozenset())
        for ids, sampling in zip(prompts, samplings, strict=True)
    ]
    device = model.prologue.tokens.weight.device
    for index, token in run(requests, direct(model), device):
        new[index].append(token)
    return new
