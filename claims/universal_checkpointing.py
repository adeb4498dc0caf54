"""Claim: a checkpoint saved under any mesh is loaded under any other, and the loss goes on as if
nothing had changed.

Lian et al., "Universal Checkpointing: Efficient and Flexible Checkpointing for Large Scale
Distributed Training", 2024. The authors train GPT-3 350M with tensor, pipeline and data axes of 2
each and ZeRO-1 for 200 steps, save at step 100, go on from there under other meshes, and draw the
losses of steps 101 to 200 over those of the source; then several sources to one target. Their files
are converted before they are loaded elsewhere; here tensors lie whole and under their own names in
every checkpoint, and each worker reads its part.

Here the commands do the same with a small GPT: `outsize train --mesh`, `outsize train --resume
--mesh`. A loss counts as the source's where the two differ by less than a line's width in such a
picture.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from verdict import Figure, conclude

SAVED, LAST, WIDTH = 100, 200, 0.01  # steps; nats
SOURCE = "tensor=2,pipeline=2,data=2"
ZERO = {"plan.zero": 1}
TARGETS: dict[str, dict[str, object]] = {
    "tensor=2,pipeline=2": {}, "data=2": {"plan.zero": 3}, "data=1": {},
}  # fmt: skip
SOURCES: dict[str, dict[str, object]] = {"data=4": ZERO}
TARGET = "tensor=2,pipeline=2"
GPT = {
    "model_type": "gpt2", "vocab_size": 264, "n_embd": 64, "n_layer": 4, "n_head": 4,
    "n_positions": 64, "n_ctx": 64,
}  # fmt: skip
OPTIONS: dict[str, object] = {
    "model.weights": "random", "data.tokenizer": "bytes", "train.sequence": 64,
    "train.batch_tokens": 1024, "train.evaluate_every": 0, "train.save_every": 0,
    "sample.tokens": 0, "precision": "float32", "optimizer.lr": 1e-3,
    "learning_rate.shape": "constant", "learning_rate.warmup": 10,  # whatever the number of steps
}  # fmt: skip


def outsize(*words: object, **keys: object) -> None:
    """Run a command."""
    sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "outsize", "train", *map(str, words), *sets]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(run.stderr)


def losses(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def train(folder: Path, name: str, mesh: str, steps: int, **keys: object) -> Path:
    """A run from its beginning."""
    words = ("--set", f"model={folder / 'gpt'}", "--set", f"data={folder / 'text'}")
    told = OPTIONS | keys | {"data.cache": folder / "cache", "output": folder / name}
    outsize(*words, "--mesh", mesh, **told, **{"train.steps": steps})
    return folder / name


def goes_on(run: Path, mesh: str, **keys: object) -> dict[int, float]:
    """The losses of a copy of a run that goes on under another mesh."""
    copy = Path(shutil.copytree(run, run.with_name(f"{run.name} on {mesh}")))
    outsize("--resume", copy, "--mesh", mesh, **keys, **{"train.steps": LAST})
    return losses(copy)


def apart(one: dict[int, float], other: dict[int, float]) -> list[float]:
    """How far losses are from each other behind the checkpoint, step by step."""
    return [abs(one[step] - other[step]) for step in range(SAVED + 1, LAST + 1)]


def main() -> None:
    found = dict[str, list[float]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "gpt").mkdir()
        (folder / "gpt" / "config.json").write_text(json.dumps(GPT))
        (folder / "text").mkdir()
        for module in ("argparse", "difflib", "inspect", "typing"):
            shutil.copy(sys.modules.get(module, __import__(module)).__file__, folder / "text")
        unbroken = losses(train(folder, "unbroken", SOURCE, LAST, **ZERO))
        saved = train(folder, "source", SOURCE, SAVED, **ZERO)
        for mesh, keys in TARGETS.items():
            found[f"{SOURCE} to {mesh}"] = apart(goes_on(saved, mesh, **keys), unbroken)
        for mesh, keys in SOURCES.items():
            run = train(folder, f"from {mesh}", mesh, SAVED, **keys)
            found[f"{mesh} to {TARGET}"] = apart(goes_on(run, TARGET), unbroken)
    every = [difference for each in found.values() for difference in each]
    same = sum(difference < WIDTH for difference in every) / len(every)
    for words, differences in found.items():
        print(f"  {words}: losses differ by {max(differences):.1e} at most")
    conclude(
        'Lian et al., "Universal Checkpointing", 2024',
        "losses of steps 101 to 200 lie on the source's, whatever the target and whatever the"
        " source (GPT-3 350M, its pictures); the cost of conversion and loading is negligible",
        f"{same:.0%} of {len(every)} losses within {WIDTH} of the unbroken run's, the largest"
        f" difference {max(every):.1e}; nothing is converted",
        f"run: a GPT of 0.2M parameters in float32, source {SOURCE} with ZeRO-1, targets"
        f" {'; '.join(TARGETS)}; sources {'; '.join(SOURCES)} to {TARGET}; commands alone",
        Figure(
            "losses that lie on the source's", same, 1.0, "%", nothing=0.0,
            other="of 0.2M parameters, not 350M",
        ),
        holds={"all behind the checkpoint": same == 1.0},
    )  # fmt: skip


if __name__ == "__main__":
    main()
