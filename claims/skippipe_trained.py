"""Claim: training that leaves stages out converges as the full pipeline does, and half of what it
has trained loses 7% of perplexity.

Blagoev et al., "SkipPipe: Partial and Reordered Pipelining Framework for Training LLMs in
Heterogeneous Networks", 2025: LLaMa models of 500 million parameters and more. Here two runs of
`outsize train` of one small model on four workers, of the same tokens: full, and with a quarter of
the stages left out by each microbatch. Both are then asked for the perplexity of held-out text, in
a plain loop: whole, and with two of the four stages, over every choice that keeps the first, which
training never leaves out either.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import torch
import yaml
from torch import nn
from torch.nn import functional as F
from verdict import Figure, conclude

import outsize
from outsize.models.decoder import Decoder

STAGES, BLOCKS, STEPS, TOKENS, SEQUENCE = 4, 8, 600, 1024, 64
SKIPPED, HALF = 1, STAGES // 2
VOCABULARY = 264
LLAMA = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 176,
    "num_hidden_layers": BLOCKS, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": SEQUENCE, "initializer_range": 0.125, "tie_word_embeddings": False,
}  # fmt: skip
TEXTS = ("argparse", "difflib", "inspect", "typing", "tarfile", "subprocess", "socket", "pathlib")
HELD = ("shutil", "zipfile")
WAYS: dict[str, dict[str, object]] = {
    "full": {"plan.pipeline": "1f1b"},
    "partial": {
        "plan.pipeline": f"skip-pipe:{SKIPPED / STAGES}", "plan.approximate": "[partial-pipeline]",
    },
}  # fmt: skip


def source(module: str) -> Path:
    found = __import__(module).__file__
    assert found is not None
    return Path(found)


def train(folder: Path, name: str) -> Path:
    """A run by its command; its checkpoint."""
    told = {
        "model": folder / "llama", "model.weights": "random", "data.path": folder / "text",
        "data.tokenizer": "bytes", "data.validation": 0, "data.cache": folder / "cache",
        "train.sequence": SEQUENCE, "train.batch_tokens": TOKENS, "train.steps": STEPS,
        "train.evaluate_every": 0, "train.save_every": 0, "sample.tokens": 0,
        "precision": "float32", "optimizer.lr": 3e-3, "output": folder / name,
    } | WAYS[name]  # fmt: skip
    sets = [word for key, value in told.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "outsize", "train", "--mesh", f"pipeline={STAGES}", *sets]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return folder / name / f"step-{STEPS:08d}"


@torch.no_grad()
def perplexity(model: Decoder, blocks: Sequence[nn.Module], ids_BS: torch.Tensor) -> float:
    """Of rows of bytes by some of a model's blocks."""
    every, model.blocks = model.blocks, nn.ModuleList(blocks)
    logits_BSV = model(ids_BS[:, :-1]).float()
    model.blocks = every
    return math.exp(float(F.cross_entropy(logits_BSV.flatten(0, 1), ids_BS[:, 1:].flatten())))


def halves(model: Decoder, plan: Path) -> list[list[nn.Module]]:
    """The blocks of two stages of a run's plan, one of them the first."""
    cuts = yaml.safe_load(plan.read_text())["pipeline"]["cuts"]
    bounds = [0, *(cut - 1 for cut in cuts), BLOCKS]  # the embedding is a segment before them
    stages = [list(model.blocks)[a:b] for a, b in itertools.pairwise(bounds)]
    others = itertools.combinations(range(1, STAGES), HALF - 1)
    return [[b for s in (0, *kept) for b in stages[s]] for kept in others]


def main() -> None:
    whole, half = dict[str, float](), dict[str, float]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "llama").mkdir()
        (folder / "llama" / "config.json").write_text(json.dumps(LLAMA))
        (folder / "text").mkdir()
        for module in TEXTS:
            shutil.copy(source(module), folder / "text" / f"{module}.txt")
        held = b"".join(source(module).read_bytes() for module in HELD)
        count = len(held) // SEQUENCE
        ids_BS = torch.tensor(list(held[: count * SEQUENCE])).view(count, SEQUENCE)
        for way in WAYS:
            model = outsize.load(train(folder, way))
            whole[way] = perplexity(model, list(model.blocks), ids_BS)
            chosen = halves(model, folder / way / "plan.yaml")
            half[way] = mean(perplexity(model, blocks, ids_BS) for blocks in chosen)
            print(f"  {way}: perplexity {whole[way]:.2f}, with half of the blocks {half[way]:.2f}")
    worse = {way: half[way] / whole[way] - 1 for way in WAYS}
    conclude(
        'Blagoev et al., "SkipPipe", 2025',
        "convergence of the full pipeline, and a perplexity 7% worse with half of the model",
        f"perplexity of held-out bytes {whole['partial']:.2f}, of the full pipeline"
        f" {whole['full']:.2f}; with half of the model {worse['partial']:+.0%}, of what the full"
        f" pipeline has trained {worse['full']:+.0%}",
        f"run: `outsize train --mesh pipeline={STAGES}`, 0.4M parameters in {BLOCKS} blocks,"
        f" {STEPS * TOKENS:,} tokens of Python source each, float32, a quarter of the stages left"
        " out",
        Figure(
            "perplexity worse with half of the model", worse["partial"], 0.07, "%",
            nothing=worse["full"], less=True, other="of 0.4M parameters",
        ),
        Figure(
            "perplexity over the full pipeline's at equal tokens",
            whole["partial"] / whole["full"], 1.0, nothing=VOCABULARY / whole["full"],
            less=True,
            other="of 0.4M parameters",
        ),
    )  # fmt: skip


if __name__ == "__main__":
    main()
