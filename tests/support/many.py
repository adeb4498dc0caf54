"""Several prompts at once through one model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from outsize.decode.generate import PREFILL_TOKENS, Forward, Request, direct, drawing, play
from outsize.decode.samplers import Sampler
from outsize.models.decoder import Decoder


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
