"""Claim: with experts dealt out over workers, what a worker holds stays the same when experts and
workers grow together.

Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding",
2020, section 5.1: with a fixed number of layers, the memory of weights and that of activations on a
device stay constant as the number of experts grows. By shapes alone: weights of a worker of the
paper's 36 layers at an expert a layer and worker, 128 to 2048 of them (our experts have three
matrices, theirs two). By `outsize train`: what workers of a small model hold at the peak, with four
experts a layer and the same rows each, and that its losses are those of one worker in float64. The
paper's speed on 2048 TPU v3 cores is not judged.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from verdict import Figure, How, conclude

from outsize.collectives import Mesh, PretendWorld
from outsize.models.decoder import Decoder
from outsize.models.families import parse
from outsize.models.presets import SHAPES
from outsize.parallel.divide import divide
from outsize.plan import Plan
from outsize.plan.plan import per_segment

LAYERS, HIDDEN, INNER, HEADS, VOCAB = 36, 1024, 8192, 16, 64_000
PAPER = (128, 512, 2048)  # experts, and workers
SMALL = (1, 2, 4)  # workers
EACH = 4  # experts of each layer on each of these
TOKENS = 512  # a step, of each worker
STATES = ("parameters", "gradients", "optimizer")
RUN = """
model: {name: model, weights: random}
data: {path: text, validation: 0}
train: {steps: 3, sequence: 64}
precision: float64
device: cpu
output: run
"""


def weights(experts: int) -> int:
    """Parameters of a worker, of as many workers as experts."""
    config = parse(
        {
            "model_type": "mixtral", "vocab_size": VOCAB, "hidden_size": HIDDEN,
            "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS, "num_local_experts": experts, "num_experts_per_tok": 2,
        }
    )  # fmt: skip
    plan = Plan(LAYERS + 2, per_segment(LAYERS + 2), experts, mesh=Mesh(expert=experts))
    with torch.device("meta"):
        model = Decoder(config)
        divide(model, PretendWorld(plan.mesh), plan)
    return sum(p.numel() for p in model.parameters())


def outsize(folder: Path, *words: str) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "outsize", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def prepare(folder: Path, experts: int) -> None:
    """A run's file, its text, and the configuration of its model."""
    (folder / "text").mkdir(parents=True)
    (folder / "text" / "one.txt").write_text("what a model reads, line after line\n" * 900)
    (folder / "run.yaml").write_text(RUN)
    (folder / "model").mkdir()
    shape = {**SHAPES.get("tiny-experts"), "num_local_experts": experts}
    (folder / "model" / "config.json").write_text(json.dumps(shape))


def sizes(folder: Path, workers: int) -> tuple[int, float]:
    """Bytes of states, predicted, and of all else at the peak, measured, of one worker."""
    prepare(folder, EACH * workers)
    words = ("run.yaml", *mesh(workers), "--set", f"train.batch_tokens={TOKENS * workers}")
    made = json.loads(outsize(folder, "plan", *words, "--json"))
    states = sum(made["peak_by_kind"][kind] for kind in STATES)
    shown = outsize(folder, "train", *words)
    found = re.search(r"peak memory +[\d.]+ MiB +([\d.]+) MiB", shown)
    assert found is not None, shown
    return states, float(found[1]) * 2**20 - states


def mesh(workers: int) -> tuple[str, ...]:
    return () if workers == 1 else ("--mesh", f"expert={workers}", "--workers", str(workers))


def losses(folder: Path, workers: int) -> list[float]:
    """Of the same steps on so many workers."""
    if not folder.exists():
        prepare(folder, EACH * max(SMALL))
    words = ("run.yaml", *mesh(workers), "--set", f"output=run{workers}")
    outsize(folder, "train", *words, "--set", f"train.batch_tokens={TOKENS}")
    lines = map(json.loads, (folder / f"run{workers}" / "metrics.jsonl").open())
    return [line["loss"] for line in lines if "loss" in line]


def main() -> None:
    held = {experts: weights(experts) for experts in PAPER}
    for experts, count in held.items():
        print(f"{experts} experts on as many workers: {count:,} parameters of a worker")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = {n: sizes(folder / str(n), n) for n in SMALL}
        every = [losses(folder / "same", n) for n in SMALL]
    for n, (states, rest) in found.items():
        print(f"{EACH * n} experts on {n} workers: states {states:,} bytes, the rest {rest:,.0f}")
    apart = max(abs(a / b - 1) for one in every[1:] for a, b in zip(one, every[0], strict=True))
    assert apart < 1e-10, apart
    grows = held[PAPER[-1]] / held[PAPER[0]]
    states, rest = (found[SMALL[-1]][i] / found[SMALL[0]][i] for i in (0, 1))
    most, more = PAPER[-1] / PAPER[0], SMALL[-1] / SMALL[0]  # where nothing were dealt out
    over: list[tuple[str, float, float, How]] = [
        ("weights", grows, most, "simulated"),
        ("states", states, more, "run"),
        ("activations", rest, more, "run"),
    ]
    conclude(
        "GShard (Lepikhin et al., 2020), section 5.1",
        "memory of weights and of activations on a device stays constant as experts and devices"
        " grow together",
        f"weights {grows:.2f}x from {PAPER[0]} to {PAPER[-1]} workers at the paper's size (the"
        f" routers grow); on {SMALL[-1]} workers states {states:.2f}x and the rest {rest:.2f}x"
        " those of one, without a capacity that drops tokens; losses"
        f" {apart:.0e} from one worker's",
        f"by shapes at the paper's size; run: preset tiny-experts with {EACH} experts a layer and"
        f" worker, {TOKENS} tokens a worker, float64",
        *(
            Figure(
                f"{what} of a worker as experts grow", times, 1.0, nothing=most, less=True, how=how
            )
            for what, times, most, how in over
        ),
        holds={"losses of one worker at 1e-10": apart < 1e-10},
    )


if __name__ == "__main__":
    main()
