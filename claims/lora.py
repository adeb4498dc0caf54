"""Claim: far fewer parameters are trained, in a third of the memory, and nothing is slower after.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021: for GPT-3 175B 10,000 times
fewer trainable parameters and 3 times less memory than Adam (350 GB for 1.2 TB); "no additional
inference latency" once the update is merged. What the paper trains of GPT-3 and judges (its table
4) are 4.7M parameters, rank 1 on the queries' and values' weights, and 37.7M; with rank 4 on these
it gives "roughly" 10,000 times smaller checkpoints (35 MB for 350 GB), of which the count stands
beside. GPT-3's shape is counted, with bytes of 16-bit weights and gradients and 32-bit moments.
What the paper says of any large transformer with Adam, up to two thirds less where the rank is far
below the width, is run: GPT-2 medium, which it trains too, takes steps with and without the
adapter, in float32, and the ledger counts weights, gradients and moments. A small model's tokens
are timed plain, merged and with the adapter beside its weights, each in turn, by the processor's
time of the one thread, with copies of the plain model, which say what this machine can tell apart.
Judged is what decides a token's time: a merged model must call the plain one's operators on the
same shapes, one by one.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from verdict import Figure, conclude

import outsize
from outsize.models.build import build
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.models.families import parse
from outsize.techniques.adapt.lora import Lora

GPT3 = {
    "model_type": "gpt2", "vocab_size": 50257, "n_embd": 12288, "n_layer": 96, "n_head": 96,
    "n_positions": 2048,
}  # fmt: skip
SMALL = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 688,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
MEDIUM = {
    "model_type": "gpt2", "vocab_size": 50257, "n_embd": 1024, "n_layer": 24, "n_head": 16,
    "n_positions": 1024,
}  # fmt: skip
ADAPTER = {"lora": {"rank": 4, "alpha": 4.0, "targets": ["q", "v"]}}
JUDGED, ROUND = (Lora(rank=rank, alpha=float(rank), targets=("q", "v")) for rank in (1, 4))
TOKENS, TURNS, COPIES = 8, 20, 3
CLAIMED, MEMORY = 10_000, 3.0  # times fewer trained parameters, times less memory
HALF, ADAM = 2, 2 + 2 + 4 + 4  # bytes: a weight; a weight, its gradient and two moments


def counts(config: DecoderConfig) -> tuple[int, int]:
    """Parameters of a model, and those that are trained."""
    with torch.device("meta"):
        model = Decoder(config)
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, _ in sizes), sum(n for n, learns in sizes if learns)


def trained(model: Decoder, adapter: bool) -> tuple[int, int]:
    """Bytes of weights, gradients and optimizer states, and the peak of a step, by the ledger."""
    if adapter:
        outsize.adapt(model, ADAPTER)
    job = outsize.prepare(model, "adamw", memory="12GiB")
    ids = torch.randint(0, model.config.vocab, (1, 64))
    for _ in range(2):
        job.step(ids, 1e-2)
    live = job.report.trace.events[0].live
    states = sum(live[f"device/{kind}"] for kind in ("parameters", "gradients", "optimizer"))
    peak = job.report.trace.peak()
    job.close()
    return states, peak


class Called(TorchDispatchMode):
    """Notes every operator and the shapes that it is called on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[tuple[int, ...], ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        shapes = tuple(tuple(one.shape) for one in args if isinstance(one, torch.Tensor))
        self.calls.append((str(func), shapes))
        return func(*args, **(kwargs or {}))


def called(model: Decoder) -> list[tuple[str, tuple[tuple[int, ...], ...]]]:
    """Of a generation."""
    with Called() as mode:
        outsize.generate(model, [1, 2, 3], TOKENS)
    return mode.calls


def seconds(models: list[Decoder]) -> list[float]:
    """The least of TURNS generations of each, one after the other in turn, of one thread."""
    best = [float("inf")] * len(models)
    for _ in range(TURNS):
        for i, model in enumerate(models):
            begin = time.thread_time()
            outsize.generate(model, [1, 2, 3], TOKENS)
            best[i] = min(best[i], time.thread_time() - begin)
    return best


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    whole, learnt = counts(replace(parse(GPT3), adapter=JUDGED))
    all_, four = counts(replace(parse(GPT3), adapter=ROUND))
    full, adapted = (whole - learnt) * ADAM, (whole - learnt) * HALF + learnt * ADAM
    states, peak = trained(build(parse(MEDIUM), seed=1), adapter=False)
    few_states, few_peak = trained(build(parse(MEDIUM), seed=1), adapter=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        outsize.save(build(parse(SMALL), seed=1), folder)
        beside = outsize.load(folder)
        trained(beside, adapter=True)
        outsize.save(beside, Path(name) / "adapter")
        merged = outsize.merge(outsize.load(Path(name) / "adapter"))
        plain, unmerged = outsize.load(folder), outsize.load(Path(name) / "adapter")
        copies = [plain, *(outsize.load(folder) for _ in range(COPIES - 1))]
        *same_as, alone, beside_it = seconds([*copies, merged, unmerged])
        expected = outsize.generate(unmerged, [1, 2, 3], TOKENS)
        same = outsize.generate(merged, [1, 2, 3], TOKENS) == expected
        calls, of_merged, more = (called(model) for model in (plain, merged, unmerged))
    fewer, less, quickest = whole / learnt, full / adapted, min(same_as)
    slower, apart = alone / quickest, max(same_as) / quickest
    conclude(
        'Hu et al., "LoRA", 2021',
        "10,000x fewer trainable parameters, 3x less memory (GPT-3 175B, 4.7M trained: rank 1 on"
        " queries and values); no additional inference latency once merged",
        f"GPT-3's shape: {learnt:,} of {whole:,} trained, {fewer:,.0f}x fewer; with rank 4"
        f" {four:,}, {all_ / four:,.0f}x ({four * HALF / 2**20:.0f} MiB for"
        f" {all_ * HALF / 1e9:.0f} GB; the paper: roughly 10,000x, 35 MB); weights, gradients"
        f" and Adam's states {less:.1f}x less, counted. GPT-2 medium, run: {states:,} bytes of them"
        f" to {few_states:,}, {states / few_states:.2f}x less, the peak of a step of 64 tokens"
        f" {peak / few_peak:.2f}x. Small model, run: a token merged takes {slower:.3f} of the"
        f" quickest plain copy, the slowest copy {apart:.3f}, unmerged {beside_it / quickest:.3f};"
        f" {len(of_merged)} operators merged, {len(calls)} plain, {len(more)} unmerged;"
        f" {'the same tokens' if same else 'OTHER TOKENS'}",
        f"counts by formula of the shape; GPT-2 medium and a small model of"
        f" {sum(p.numel() for p in plain.parameters()):,} parameters, float32 on the CPU, {TOKENS}"
        f" tokens, processor time of one thread, the least of {TURNS}; {COPIES} plain copies",
        Figure("fewer trained parameters", fewer, CLAIMED),
        Figure(
            "less memory of weights, gradients and states, GPT-3", less, MEMORY, how="simulated"
        ),
        Figure("the same, GPT-2 medium", states / few_states, MEMORY),
        Figure(
            "operators of a merged token over a plain one's",
            len(of_merged) / len(calls),
            1.0,
            nothing=len(more) / len(calls),
            less=True,
        ),
        holds={
            "merged, the same tokens": same,
            "merged, the plain model's operators and shapes": of_merged == calls,
        },
    )


if __name__ == "__main__":
    main()
