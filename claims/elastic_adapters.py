"""Claim: a sub-adapter that is taken out without training is as good as one that was trained alone.

Munoz et al., "Low-Rank Adapters Meet Neural Architecture Search for LLM Compression", 2025 (arXiv
2501.16372): of Mistral-7B with half of its weights pruned, elastic ranks give 102.3% of LoRA's
accuracy on GSM8K (Shears, its table 2); elastic widths leave 5.6B of LLaMA-7B's 6.7B parameters at
99.1% of it (LoNAS, its table 1), and are not here.

A small decoder over bytes learns one half of Python's standard library, loses the smallest half of
each matrix, and is fine-tuned on the package of e-mail by one elastic adapter and, for each of its
ranks, by LoRA of that rank; each at the best of RATES. Judged is the middle rank, as in the paper.
"""

from __future__ import annotations

import copy

from lisa import RATES, STEPS, job_of, lessons, right, tuned
from perp import pruned
from slimfit import CONFIG, LAYERS, ROWS, SEQUENCE
from verdict import Figure, conclude

import outsize
from outsize.checkpoint.adapters import narrowed
from outsize.models.build import build
from outsize.models.decoder import Decoder
from outsize.models.families import parse
from outsize.techniques.elastic_adapters import KEY, ElasticAdapters

RANKS = (16, 12, 8)
CLAIMED, LEFT = 1.023, 5.6 / 6.7  # of LoRA's accuracy; of the parameters


def adapted(base: Decoder, rank: int) -> Decoder:
    model = copy.deepcopy(base)
    outsize.adapt(model, "lora", rank=rank, alpha=2.0 * rank)
    return model


def main() -> None:
    first, tuning, held = lessons()
    base = tuned(job_of(build(parse(CONFIG), seed=1), {}), first, 3e-3)
    pruned(base, 0.5)
    own, alone = ElasticAdapters(RANKS), dict[int, float]()
    tried = {}
    for rate in RATES:
        model = tuned(job_of(adapted(base, RANKS[0]), {KEY: own}), tuning, rate)
        tried[rate] = {rank: right(narrowed(model, rank), held) for rank in RANKS}
        for rank in RANKS:
            one = right(tuned(job_of(adapted(base, rank), {}), tuning, rate), held)
            alone[rank] = max(alone.get(rank, 0.0), one)
        print(f"  {rate:g}: elastic {tried[rate]}, alone so far {alone}", flush=True)
    middle = own.middle
    parts = max(tried.values(), key=lambda one: one[middle])
    before = right(base, held)
    smaller = f"a decoder of {LAYERS} blocks, {STEPS} steps"
    each = "; ".join(f"rank {r} {parts[r]:.2%}, alone {alone[r]:.2%}" for r in RANKS)
    conclude(
        'Munoz et al., "Low-Rank Adapters Meet Neural Architecture Search", 2025',
        "102.3% of LoRA's accuracy by elastic ranks on a model of which half is pruned; 0.84x the"
        " parameters at 99.1% of it by elastic widths",
        f"right bytes of what is taken out of one adapter: {each}; before {before:.2%}",
        f"run: {LAYERS} blocks of {CONFIG['hidden_size']}, half of each matrix pruned, {STEPS}"
        f" steps of {ROWS} x {SEQUENCE} bytes of e-mail's files, AdamW at the best of"
        f" {len(RATES)} rates, float32",
        Figure("of LoRA's right bytes, the middle rank", parts[middle] / alone[middle], CLAIMED,
               "%", nothing=before / alone[middle], other=smaller),
        Figure("parameters left by elastic widths", None, LEFT, less=True),
    )  # fmt: skip


if __name__ == "__main__":
    main()
