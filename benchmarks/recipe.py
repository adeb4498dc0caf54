"""Recipes of the first run, each with the same time: bits per byte of held-out text.

    python benchmarks/recipe.py [NAMES] [--minutes 1] [--turns 1]

Each is `outsize train` with other keys, in a process of its own, its training predicted to take so
many minutes; the whole process is timed too, so that what a recipe does beforehand (a tokenizer) is
seen. Those of peers (benchmarks/peers/recipe_loops.py) are plain loops of so many minutes over a
model of that size and the same tokens, at the first run's batch, and at that of nanochat's run on a
processor. A machine that does something else meanwhile favours what runs while it does not: run it
alone. Text: the standard library of this Python, so figures of two machines differ.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BYTES, SUBWORDS = {}, {"data.tokenizer": "bpe:2048"}
MUON = {"optimizer.name": "muon"}
RECIPES: dict[str, dict[str, object]] = {
    "bytes-adamw": {**BYTES},  # the first run until November 2026
    "bytes-muon": {**BYTES, **MUON, "optimizer.lr": 0.01},
    "bpe2048-adamw": {**SUBWORDS},
    "bpe2048-muon": {**SUBWORDS, **MUON, "optimizer.lr": 0.01},  # the first run now
    "bpe2048-muon-faster": {**SUBWORDS, **MUON, "optimizer.lr": 0.02},
    "bpe4096-muon": {"data.tokenizer": "bpe:4096", **MUON, "optimizer.lr": 0.01},
    "bpe2048-muon-512": {**SUBWORDS, **MUON, "optimizer.lr": 0.01, "train.batch_tokens": 512},
}
PEERS: dict[str, list[str]] = {
    f"{name}-{tokens}": [name, "--tokens", str(tokens)]
    for name in ("plain", "modded-nanogpt", "nanochat")
    for tokens in (1024, 16384)
}
LOOPS = Path(__file__).parent / "peers" / "recipe_loops.py"
HELD = 65536  # tokens of held-out text


def peer(words: list[str], minutes: float) -> dict[str, float]:
    """As `run`, of a peer."""
    command = [sys.executable, str(LOOPS), *words, "--minutes", str(minutes)]
    begin = time.monotonic()
    done = subprocess.run([*command, "--evaluate", str(HELD)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-1000:])
    found = json.loads(done.stdout.splitlines()[-1])
    return {**found, "seconds": time.monotonic() - begin}


def run(keys: dict[str, object], minutes: float) -> dict[str, float]:
    """One run: bits per byte in the end, steps, seconds of the whole process."""
    keys = {"train.evaluate_tokens": HELD, **keys}
    with tempfile.TemporaryDirectory() as folder:
        own = {"train.minutes": minutes, "sample.tokens": 0, "output": f"{folder}/run", **keys}
        sets = [word for name, value in own.items() for word in ("--set", f"{name}={value}")]
        begin = time.monotonic()
        command = [sys.executable, "-m", "outsize", "train", "--set", "model=mini", *sets]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout[-1000:] + done.stderr[-1000:])
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        seconds = time.monotonic() - begin
    records = [json.loads(line) for line in lines]
    bits = [one["validation_bits_per_byte"] for one in records if "validation_loss" in one]
    return {"bits": bits[-1], "steps": records[-1]["step"], "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*RECIPES, *PEERS])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--turns", type=int, default=1)
    asked = parser.parse_args()
    first = 0.0
    print(f"{'recipe':<22}{'bits per byte':>14}{'of the first':>14}{'steps':>8}{'seconds':>9}")
    for _ in range(asked.turns):
        for name in asked.names:
            own = RECIPES.get(name)
            found = peer(PEERS[name], asked.minutes) if own is None else run(own, asked.minutes)
            first = first or found["bits"]
            part = found["bits"] / first - 1
            print(
                f"{name:<22}{found['bits']:>14.4f}{part:>+14.1%}{found['steps']:>8.0f}"
                f"{found['seconds']:>9.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
