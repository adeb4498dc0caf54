"""Claim: AdamW with moments of 8 bits by blocks learns as AdamW does, with a quarter of the states.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021 (arXiv 2110.02861): 8-bit
optimizers keep the performance of 32-bit states on every task tried (language models of up to 1.5B
parameters among them) at 25% of the memory of states, without other hyperparameters; without
stable embeddings and block-wise scales some runs diverge.

Here the preset `small` learns bytes of the standard library by `outsize train`, once with each
optimizer and seed and every other value alike. Bytes of states are those in the checkpoint; quality
is the loss on held-out documents. Embeddings and head, 3% of the parameters, have 32-bit states.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

from safetensors.torch import load_file
from verdict import Figure, conclude

SEEDS = (1, 2)
STEPS, TOKENS, SEQUENCE = 100, 256, 64
NAMES = ("adamw", "adamw8bit")
CLAIMED = 0.25  # of the bytes of 32-bit states
SMALLER = "a model of 5.0M parameters, 100 steps"


def train(name: str, seed: int, folder: Path) -> tuple[float, int]:
    """Bits a byte on held-out text at the end, and bytes of optimizer states."""
    output = folder / f"{name}-{seed}"
    keys = {
        "model": "small", "data": "stdlib", "data.tokenizer": "bytes", "train.steps": STEPS,
        "train.batch_tokens": TOKENS, "train.sequence": SEQUENCE, "train.seed": seed,
        "train.evaluate_every": 0, "train.evaluate_tokens": 4096, "train.save_every": 0,
        "precision": "float32", "sample.tokens": 0, "optimizer.name": name, "output": output,
        "plan.approximate": "[]" if name == "adamw" else f"[{name}]",
        "data.cache": folder / "cache",
    }  # fmt: skip
    sets = [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
    subprocess.run(
        [sys.executable, "-m", "outsize", "train", *sets], check=True, stdout=subprocess.DEVNULL
    )
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    bits = [line["validation_bits_per_byte"] for line in lines if "validation_loss" in line]
    saved = next(output.glob("step-*/optimizer.safetensors"))
    return bits[-1], sum(state.nbytes for state in load_file(saved).values())


def main() -> None:
    found: dict[str, list[tuple[float, int]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            found[name] = [train(name, seed, Path(folder)) for seed in SEEDS]
            shown = ", ".join(f"{bits:.4f}" for bits, _ in found[name])
            print(
                f"  {name}: {shown} bits a byte; {found[name][0][1]:,} bytes of states", flush=True
            )
    plain, eight = (fmean(bits for bits, _ in found[name]) for name in NAMES)
    share = found["adamw8bit"][0][1] / found["adamw"][0][1]
    gap = eight / plain - 1
    seeds = [bits for bits, _ in found["adamw"]]
    apart = max(seeds) / min(seeds) - 1  # what another seed changes
    conclude(
        'Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021',
        "the performance of 32-bit states at 25% of their memory, with the same hyperparameters",
        f"{share:.1%} of the bytes of states; bits a byte {gap:+.2%} from AdamW with 32-bit states",
        f"run: preset small (5.0M), {STEPS} steps of {TOKENS} bytes of Python files, mean of"
        f" {len(SEEDS)} seeds, float32, blocks of 256; embeddings and head with 32-bit states",
        Figure("bytes of states", share, CLAIMED, "%", less=True, other=SMALLER),
        Figure(
            "bits a byte above those of AdamW",
            gap,
            apart,
            "%",
            nothing=1.0,
            less=True,
            other=SMALLER,
        ),
    )


if __name__ == "__main__":
    main()
