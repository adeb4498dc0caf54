"""Claim: tokens of a row cut over workers, keys and values gathered, take a worker's share of the
activations, and no more of the network than keys and values.

Grattafiori et al., "The Llama 3 Herd of Models", 2024, section 3.3.2: context parallelism by
all-gather of keys and values, the sequence in 2 x CP mirrored chunks. Claimed there: it makes
sequences longer, and the gathered keys and values are small beside the rest, heads being grouped.
Driven by the commands: `outsize plan` for 1, 2 and 4 workers (simulated), `outsize train` for 2.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from verdict import Figure, conclude

WORKERS = (1, 2, 4)
TOKENS = 1024
RUN = f"""
model: small
data: {{path: text, validation: 0}}
train: {{steps: 2, batch_tokens: {TOKENS}, sequence: {TOKENS}}}
precision: float32
device: cpu
output: run
"""


def outsize(folder: Path, *words: str) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "outsize", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def mesh(workers: int) -> tuple[str, ...]:
    return () if workers == 1 else ("--mesh", f"context={workers}", "--workers", str(workers))


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.yaml").write_text(RUN)
        (folder / "text").mkdir()
        (folder / "text" / "one.txt").write_text("what a model reads\n" * 600)
        plans: dict[int, Any] = {
            n: json.loads(outsize(folder, "plan", "run.yaml", *mesh(n), "--json")) for n in WORKERS
        }
        trained = outsize(folder, "train", "run.yaml", *mesh(2))
        steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
    kept = {n: plans[n]["peak_by_kind"]["activations"] for n in WORKERS}
    bytes_ = {n: sum(p["this_machine"] for p in plans[n]["received"].values()) for n in WORKERS}
    said = {n: plans[n]["received"].get("context", {}).get("this_machine", 0) for n in WORKERS}
    for n in WORKERS:
        print(f"{n} workers: activations at the peak {kept[n]:,} bytes, gathered {said[n]:,}")
    print(next(line for line in trained.splitlines() if line.startswith("peak memory")))
    heard = next(step["workers_bytes_read"] for step in steps if "loss" in step)
    less = {n: kept[1] / kept[n] for n in WORKERS[1:]}
    shown = " and ".join(f"{times:.2f}x ({n} workers)" for n, times in less.items())
    conclude(
        "The Llama 3 Herd of Models (Grattafiori et al., 2024), section 3.3.2",
        "longer sequences: each worker keeps its tokens' activations, and all keys and values",
        f"activations of a worker fall {shown}, weaker than the workers grow: heads are not grouped"
        f" here, and every worker keeps all keys and values; in a step of 2 workers {heard:,} bytes"
        f" from others, {bytes_[2]:,} predicted",
        f"simulated (activations) and run (2 workers); preset small, a row of {TOKENS} tokens,"
        " float32",
        *(
            Figure(f"activations of a worker, fewer on {n}", less[n], n, how="simulated")
            for n in WORKERS[1:]
        ),
    )


if __name__ == "__main__":
    main()
