"""The sample of text at the end of a run, by the job's own weights wherever they rest."""

from __future__ import annotations

import time

from torch import Tensor

from outsize.data import Tokenizer
from outsize.decode.generate import Request, check_request, play
from outsize.decode.samplers import Sampler, Sampling
from outsize.decode.text import StopStrings, pieces, prompt_ids
from outsize.runtime.trains import Trains

PATIENCE = 60.0  # seconds after which a sample ends whose every token reads weights from a tier


def sample(job: Trains, tokenizer: Tokenizer, prompt: str, tokens: int, sampling: Sampling) -> str:
    """The prompt and what follows it. Where weights stream it ends early rather than late."""
    ids, steps, ends = prompt_ids(tokenizer, prompt), job.tokens, frozenset((tokenizer.eos,))
    check_request(steps.model, ids, tokens)
    draw = hurried(sampling, tokenizer.eos) if job.placement.rooms else sampling
    request = Request(tuple(ids), tokens, draw, ends)
    drawn = (one.token for _, one in play([request], steps, steps.flow.device))
    return prompt + "".join(pieces(drawn, tokenizer.stream(), StopStrings(()), ends))


def hurried(sampling: Sampling, end: int) -> Sampler:
    """A sampler that ends the text when time is up. One worker draws for all: they end together."""
    until = time.monotonic() + PATIENCE

    def draw(logits_V: Tensor, index: int) -> int:
        late = index > 0 and time.monotonic() > until
        return end if late else sampling(logits_V, index)

    return draw
