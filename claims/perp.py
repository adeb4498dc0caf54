"""Claim: biases and norms alone bring back what magnitude pruning took, as all weights would.

Zimmer et al., "PERP: Rethinking the Prune-Retrain Paradigm in the Era of LLMs", 2023 (arXiv
2312.15230): 0.01% to 0.05% of the parameters of GPTs, retrained after pruning, match full
retraining; at high sparsity low-rank updates do that keep the zeros when they are merged.

The share is counted of OPT-2.7B's shape, which has GPT-2's parts. Quality: a small GPT-2 over bytes
learns Python's standard library, loses the smallest half, or seven tenths, of each matrix, and is
retrained on the same text: its biases and norms, masked low-rank updates beside them, or all of it,
with zeros put back after each step; each at the best of RATES.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from lisa import RATES, best, job_of, right, tuned
from slimfit import LAYERS, ROWS, SEQUENCE, batches, text
from torch import Tensor
from verdict import Figure, conclude

import outsize
from outsize.checkpoint.pruning import Pruning
from outsize.data import Batch
from outsize.models.build import build
from outsize.models.decoder import Decoder
from outsize.models.families import parse
from outsize.models.linear import linears

OPT = {
    "model_type": "gpt2", "vocab_size": 50272, "n_embd": 2560, "n_layer": 32, "n_head": 32,
    "n_positions": 2048, "tie_word_embeddings": True,
}  # fmt: skip
CONFIG = {
    "model_type": "gpt2", "vocab_size": 256, "n_embd": 64, "n_layer": LAYERS, "n_head": 4,
    "n_positions": SEQUENCE, "initializer_range": 0.125,
}  # fmt: skip
BEFORE, STEPS, HELD, RANK, SHARES = 400, 100, 32, 8, (0.5, 0.7)
CLAIMED = 0.0005  # of the parameters


def few(model: Decoder) -> Decoder:
    """Biases and norms are trained, alone: what is no matrix."""
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 1)
    return model


def share() -> float:
    """Of OPT-2.7B's parameters."""
    with torch.device("meta"):
        model = few(Decoder(parse(OPT)))
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, learns in sizes if learns) / sum(n for n, _ in sizes)


@torch.no_grad()
def pruned(model: Decoder, part: float) -> dict[str, Tensor]:
    """Prune in place; what stays of each matrix."""
    for _, linear in linears(model):
        Pruning(part)(linear.weight)
    return {name: linear.weight != 0 for name, linear in linears(model)}


def masked(base: Decoder, data: Sequence[Batch], rate: float) -> Decoder:
    """Biases, norms and masked low-rank updates trained; the updates merged."""
    model = copy.deepcopy(base)
    outsize.adapt(model, "masked_lora", rank=RANK, alpha=2.0 * RANK)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.requires_grad or parameter.dim() == 1)
    return outsize.merge(tuned(job_of(model, {}), data, rate))


def whole(base: Decoder, stays: dict[str, Tensor], data: Sequence[Batch], rate: float) -> Decoder:
    """All trained, with zeros put back after each step."""
    job = job_of(copy.deepcopy(base), {})
    kept = {name: (linear.weight, stays[name]) for name, linear in linears(job.flow.model)}
    for step, batch in enumerate(data):
        job.step(batch, rate * (1 - step / len(data)))
        with torch.no_grad():
            for weight, mask in kept.values():
                weight.mul_(mask)
    job.close()
    return job.flow.model


def main() -> None:
    words = text("[a-m]*.py", 1 << 21)
    model = tuned(job_of(build(parse(CONFIG), seed=1), {}), batches(words, BEFORE, 1), 3e-3)
    data, held = batches(words, STEPS, 3), batches(text("[n-z]*.py", 1 << 20), HELD, 2)
    dense, found, zeros = right(model, held), dict[str, dict[str, float]](), True
    for part in SHARES:
        base = copy.deepcopy(model)
        stays = pruned(base, part)
        merged = masked(base, data, RATES[0])
        zeros &= all(torch.equal(one.weight != 0, stays[n]) for n, one in linears(merged))
        ways = {
            "few": lambda r, b=base: tuned(job_of(few(copy.deepcopy(b)), {}), data, r),
            "masked": lambda r, b=base: masked(b, data, r),
            "all": lambda r, b=base, s=stays: whole(b, s, data, r),
        }
        at = f"{part:.0%} pruned"
        found[at] = {"none": right(base, held)}
        found[at] |= {way: best(f"{at}, {way}", tune, held) for way, tune in ways.items()}
    half, most = found.values()
    counted, smaller = share(), f"a decoder of {LAYERS} blocks, {STEPS} steps"
    said = "; ".join(
        f"{at}: {one['none']:.1%}, biases and norms {one['few']:.1%}, masked low rank too"
        f" {one['masked']:.1%}, all {one['all']:.1%}"
        for at, one in found.items()
    )
    conclude(
        'Zimmer et al., "PERP", 2023',
        "0.01% to 0.05% of a GPT's parameters, retrained, match full retraining; low-rank updates"
        " that keep zeros close the gap at high sparsity",
        f"biases and norms are {counted:.3%} of OPT-2.7B's shape; right bytes {dense:.1%} dense;"
        f" {said}",
        f"run: GPT-2 of {LAYERS} blocks of {CONFIG['n_embd']}, {BEFORE} steps of {ROWS} x"
        f" {SEQUENCE} bytes of Python files, {STEPS} more after pruning, rank {RANK}, AdamW at the"
        f" best of {len(RATES)} rates, float32",
        Figure("parameters retrained", counted * 1e4, CLAIMED * 1e4, "of 10,000", nothing=1e4,
               less=True),
        Figure("of full retraining's right bytes, half pruned", half["few"] / half["all"], 1.0,
               "%", nothing=half["none"] / half["all"], other=smaller),
        Figure("the same with masked low rank, 70% pruned", most["masked"] / most["all"], 1.0,
               "%", nothing=most["few"] / most["all"], other=smaller),
        holds={"zeros are zeros when merged": zeros},
    )  # fmt: skip


if __name__ == "__main__":
    main()
