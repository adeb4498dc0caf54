"""Claim: gated linear attention takes time in proportion to the length, generates in constant
memory, and as a layer is faster than flash attention from a length of about 1,000 tokens on.

Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training", 2023, section
4.4 and figure 3 (a GPU). Here: steps (forward and backward) of the preset `tiny-gla` and of the
preset `tiny` at the same vocabulary, width and depth, in turns, one document as long as said; and
`outsize generate --memory` with 30 and with 1,000 new tokens, which prints the bytes of the cache.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from verdict import Figure, conclude

import outsize
from outsize.models.build import build
from outsize.models.decoder import Decoder
from outsize.models.families import parse
from outsize.models.presets import SHAPES

LENGTHS, ROUNDS = (512, 1024, 2048, 4096, 8192), 3
NEW = (30, 1000)
CROSSING = 1024  # tokens from which the paper's layer is faster than attention
GLA, ATTENTION = "tiny-gla", "tiny"


def model(preset: str) -> Decoder:
    return build(parse(SHAPES.get(preset)), seed=0)


def step(one: Decoder, ids: torch.Tensor) -> float:
    begin = time.process_time()
    F.cross_entropy(one(ids[:-1]), ids[1:]).backward()
    return time.process_time() - begin


def times(models: dict[str, Decoder], length: int) -> dict[str, float]:
    """The least of some rounds, in turns."""
    ids = torch.randint(256, (length + 1,), generator=torch.Generator().manual_seed(0))
    found = [{name: step(one, ids) for name, one in models.items()} for _ in range(ROUNDS)]
    return {name: min(each[name] for each in found) for name in models}


def cached(one: Decoder, new: int) -> str:
    """What generation prints of its cache."""
    with tempfile.TemporaryDirectory() as folder:
        outsize.save(one, Path(folder) / "model")
        command = [
            *(sys.executable, "-m", "outsize", "generate", str(Path(folder) / "model")),
            *("--prompt", "a", "--max-tokens", str(new), "--memory", "4MiB"),
            *("--tokenizer", "bytes"),
        ]
        made = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"cache ([\d.]+ \w+)", made.stdout + made.stderr)
    assert found is not None, "generation prints the bytes of its cache"
    return found[1]


def main() -> None:
    models = {name: model(name) for name in (GLA, ATTENTION)}
    found = {length: times(models, length) for length in LENGTHS}
    for length, each in found.items():
        shown = ", ".join(f"{name} {seconds * 1e6 / length:.1f}" for name, seconds in each.items())
        print(f"{length:6,} tokens: microseconds a token {shown}")
    caches = {name: [cached(one, new) for new in NEW] for name, one in models.items()}
    for name, sizes in caches.items():
        print(f"{name}: cache of {NEW[0]} new tokens {sizes[0]}, of {NEW[1]:,} {sizes[1]}")
    growth = {
        name: (found[LENGTHS[-1]][name] / LENGTHS[-1]) / (found[LENGTHS[1]][name] / LENGTHS[1])
        for name in models
    }
    faster = [length for length in LENGTHS if found[length][GLA] < found[length][ATTENTION]]
    crossing = min(faster, default=1 << 30)
    constant = caches[GLA][0] == caches[GLA][1] and caches[ATTENTION][0] != caches[ATTENTION][1]
    conclude(
        "Gated Linear Attention (Yang et al., 2023)",
        "linear time, constant memory in generation; faster than flash attention from 1K tokens on",
        f"time a token at {LENGTHS[-1]:,} tokens is {growth[GLA]:.2f}x that at {LENGTHS[1]:,}"
        f" (attention {growth[ATTENTION]:.2f}x); cache {' and '.join(caches[GLA])} (attention"
        f" {' and '.join(caches[ATTENTION])}); whole steps faster from"
        f" {crossing:,} tokens on",
        f"run; presets {GLA} and {ATTENTION}, float32, one document, processor time",
        Figure(
            "tokens from which steps are faster than attention's",
            crossing,
            CROSSING,
            "tokens",
            nothing=math.inf,
            less=True,
            timed=True,
            other="a processor",
        ),
        Figure(
            "time a token at the longest over at 1,024 tokens",
            growth[GLA],
            1.0,
            nothing=growth[ATTENTION],
            less=True,
            timed=True,
        ),
        holds={"the cache stays, and attention's grows": constant},
    )


if __name__ == "__main__":
    main()
