"""Optimizers side by side: bytes of states beside their formula, bits a byte at equal steps beside
AdamW in 32 bits, and the time of an 8-bit update beside ours in 32 bits and other packages'.

    python -m venv peers && peers/bin/pip install torch bitsandbytes torchao
    python benchmarks/optimizers.py --peers-python peers/bin/python
    python benchmarks/optimizers.py --steps 20 --seeds 1 --only adamw,galore   # only shows it works

Every run is `outsize train` of one preset on bytes of the standard library, alike but for the
optimizer and its learning rate (AdamW's, but for those whose rate is another thing). States are
those in the last checkpoint. Times are of a processor's core, one thread. Exit code 1 where a
figure of TARGETS is missed, or bytes are not those of the formula.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from statistics import fmean, median

import torch
from safetensors.torch import load_file

from outsize.checkpoint.hub import read_config
from outsize.models.decoder import Decoder
from outsize.optim import AdamW
from outsize.optim.optimizer import Rates
from outsize.techniques.optim.adamw8bit import AdamW8Bit

PEERS = Path(__file__).parent / "peers" / "adam8bit.py"
ELEMENTS, UPDATES = 1 << 22, 20  # of an update that is timed
GAP = 50  # steps of a turn of layers, and of a subspace
Shape = tuple[int, ...]


def _low(short: int, more: int = 0) -> Callable[[Shape], int]:
    """States in a subspace of a quarter of the shorter side: two moments, a projector (short 1),
    and some more numbers, in float32."""

    def size(shape: Shape) -> int:
        rank = max(1, min(shape) // 4)
        return 4 * (2 * rank * max(shape) + short * rank * min(shape) + more)

    return size


# By optimizer: what a run sets, bytes of states of a block's matrix, and of any other parameter.
RUNS: Mapping[str, tuple[dict[str, object], Callable[[Shape], int], Callable[[Shape], int]]] = {
    "adamw": ({}, lambda s: 8 * prod(s), lambda s: 8 * prod(s)),
    "adamw8bit": (
        {},
        lambda s: 2 * prod(s) + 8 * -(-prod(s) // 256) if prod(s) >= 4096 else 8 * prod(s),
        lambda s: 8 * prod(s),
    ),
    "schedule-free": ({}, lambda s: 8 * prod(s), lambda s: 8 * prod(s)),
    "lion": ({"optimizer.lr": None}, lambda s: 4 * prod(s), lambda s: 4 * prod(s)),
    "adafactor": (
        {"optimizer.lr": None},
        lambda s: 4 * sum(s),
        lambda s: 4 * (sum(s) if len(s) > 1 else prod(s)),
    ),
    "sophia": ({"optimizer.lr": None}, lambda s: 8 * prod(s), lambda s: 8 * prod(s)),
    "muon": ({}, lambda s: 4 * prod(s), lambda s: 8 * prod(s)),
    "galore": ({"galore.gap": GAP}, _low(1), lambda s: 8 * prod(s)),
    "fira": ({"fira.gap": GAP}, _low(1, 1), lambda s: 8 * prod(s)),
    "apollo": ({"apollo.gap": GAP}, _low(0, 1), lambda s: 8 * prod(s)),
    "frugal": ({"frugal.gap": GAP}, _low(0), lambda s: 8 * prod(s)),
    "lisa": ({"lisa.gap": GAP}, lambda s: 8 * prod(s), lambda s: 8 * prod(s)),
    "badam": ({"badam.gap": GAP}, lambda s: 8 * prod(s), lambda s: 8 * prod(s)),
}
# Techniques that are no optimizer: blocks that are trained at a time, as they do by themselves, and
# whether embeddings and head are.
METHODS = {"lisa": (2, True), "badam": (1, False)}
# Most that bits a byte may be above AdamW's; and times of an update, against others'.
TARGETS = {"adamw8bit": 0.003, "frugal": 0.01}
SLOWER = {"ours in 32 bits": 1.3, "bitsandbytes": 1 / 1.5, "torchao": 1 / 10}


def trained(name: str, seed: int, options: argparse.Namespace, folder: Path) -> tuple[float, Path]:
    """Bits a byte on held-out text at the end, and the last checkpoint."""
    output = folder / f"{name}-{seed}"
    own = RUNS[name][0]
    approximate = name not in ("adamw", "schedule-free", "lion", "adafactor", "muon")
    keys = {
        "model": options.model, "data": "stdlib", "data.tokenizer": "bytes",
        "data.cache": folder / "cache", "train.steps": options.steps, "train.seed": seed,
        "train.batch_tokens": options.tokens, "train.sequence": options.sequence,
        "train.evaluate_every": 0, "train.save_every": 0, "sample.tokens": 0,
        "precision": "float32", "optimizer.lr": options.lr, "output": output,
        "optimizer.name": "adamw" if name in METHODS else name,
        "plan.approximate": f"[{name}]" if approximate else "[]", **own,
    }  # fmt: skip
    sets = [
        part for key, value in keys.items() if value is not None
        for part in ("--set", f"{key}={value}")
    ]  # fmt: skip
    command = [sys.executable, "-m", "outsize", "train", *sets]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    bits = [line["validation_bits_per_byte"] for line in lines if "validation_loss" in line]
    return bits[-1], next(output.glob("step-*"))


def states(checkpoint: Path) -> int:
    """Bytes of the optimizer's states that are saved."""
    return sum(state.nbytes for state in load_file(checkpoint / "optimizer.safetensors").values())


def formula(name: str, checkpoint: Path) -> int:
    """What they should be."""
    with torch.device("meta"):
        model = Decoder(read_config(checkpoint))
    _, inside, others = RUNS[name]
    layers, ends = METHODS.get(name, (len(model.config.layers), True))
    total = 0
    for key, parameter in model.named_parameters():
        shape, block = tuple(parameter.shape), key.startswith("blocks.")
        if not (int(key.split(".")[1]) < layers if block else ends):
            continue  # all blocks are alike
        total += inside(shape) if block and len(shape) > 1 else others(shape)
    return total


def update_seconds(optimizer: AdamW | AdamW8Bit) -> float:
    """Of a core, for an update of ELEMENTS."""
    generator = torch.Generator().manual_seed(0)
    weights, gradients = torch.randn(2, ELEMENTS, generator=generator)
    kept = {}
    for spec in optimizer.states:
        count = spec.elements((ELEMENTS,))
        kept[spec.name] = torch.full((count,), spec.initial, dtype=spec.dtype or torch.float32)
    took = []
    for step in range(1, UPDATES + 4):
        begin = time.process_time()
        optimizer.update(weights, gradients, kept, Rates(step, 1e-4, 0.1))
        took.append(time.process_time() - begin)
    return median(took[3:])


def times(peers: str | None) -> list[str]:
    """The table of updates; lines of what is missed."""
    torch.set_num_threads(1)
    mine = update_seconds(AdamW8Bit())
    others: dict[str, float | str] = {"ours in 32 bits": update_seconds(AdamW())}
    if peers is not None:
        command = [peers, str(PEERS), str(ELEMENTS), str(UPDATES)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        others |= json.loads(said.splitlines()[-1])
    print(f"\nupdate of {ELEMENTS:,} parameters, a core: 8 bits {mine * 1e3:.2f} ms")
    missed = []
    for name, took in others.items():
        if isinstance(took, str):
            print(f"  {name}: none ({took})")
            continue
        print(f"  {name}: {took * 1e3:.2f} ms; ours in 8 bits takes {mine / took:.2f} of that")
        if mine > SLOWER[name] * took:
            missed.append(f"an 8-bit update takes {mine / took:.2f} of {name}'s time, not at most"
                          f" {SLOWER[name]:.2f}")  # fmt: skip
    return missed


def compared(options: argparse.Namespace, folder: Path) -> list[str]:
    """The table of runs; lines of what is missed."""
    names = ["adamw", *(n for n in options.only if n != "adamw")]
    missed, plain = [], 0.0
    print(
        f"{options.model}, {options.steps} steps of {options.tokens} bytes, {options.seeds} seeds"
    )
    for name in names:
        runs = [trained(name, seed, options, folder) for seed in range(1, options.seeds + 1)]
        bits, found = fmean(one for one, _ in runs), states(runs[0][1])
        wanted = formula(name, runs[0][1])
        plain = plain or bits
        each = " ".join(f"{one:.4f}" for one, _ in runs)
        print(f"  {name:10} {found:12,} bytes of states, {bits:.4f} bits a byte"
              f" ({bits / plain - 1:+.2%}; {each})", flush=True)  # fmt: skip
        if found != wanted:
            missed.append(f"{name}: {found:,} bytes of states; the formula says {wanted:,}")
        if bits > plain * (1 + TARGETS.get(name, float("inf"))):
            missed.append(f"{name}: {bits / plain - 1:+.2%} bits a byte")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="small")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2048, help="of a step")
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[*RUNS])
    parser.add_argument("--peers-python", help="of an environment with bitsandbytes and torchao")
    options = parser.parse_args()
    if unknown := set(options.only) - {*RUNS}:
        parser.error(f"--only: {', '.join(sorted(unknown))}; known: {', '.join(RUNS)}")
    with tempfile.TemporaryDirectory() as folder:
        missed = compared(options, Path(folder))
    missed += times(options.peers_python)
    for line in missed:
        print(f"missed: {line}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
