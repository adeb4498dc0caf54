"""Claim: BitPipe by time, beside interleaved pipelines and Hanayo.

Wu et al., "BitPipe: Bidirectional Interleaved Pipeline Parallelism for Accelerating Large Models
Training", 2024. Run: `outsize train --mesh pipeline=2` on two cores, a core a worker, with as many
microbatches as workers, twice and eight times as many; the sums over the two copies of each stage
included. Runs take turns; of each the median second of a step. The authors have up to 32 devices,
on which a step waits longer than on two.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from verdict import Figure, conclude

WORKERS, COUNTS, STEPS, WARM, TURNS, TOKENS = 2, (2, 4, 16), 10, 2, 2, 256
SCHEDULES = ("bitpipe:2", "1f1b", "interleaved:2", "hanayo:2", "chimera")
OPTIONS: dict[str, object] = {
    "model": "small", "train.sequence": TOKENS, "train.steps": STEPS, "train.evaluate_every": 0,
    "train.save_every": 0, "sample.tokens": 0, "precision": "float32", "plan.microbatch_rows": 1,
    "threads": 1,
}  # fmt: skip


def seconds(folder: Path, schedule: str, count: int, turn: int) -> float:
    """The median of a run's steps."""
    run = folder / f"{schedule} {count} {turn}"
    told = OPTIONS | {
        "plan.pipeline": schedule, "train.batch_tokens": count * TOKENS, "output": run,
        "data.cache": folder / "cache",
    }  # fmt: skip
    sets = [word for key, value in told.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "outsize", "train", "--mesh", f"pipeline={WORKERS}", *sets]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return median([line["seconds"] for line in lines if "loss" in line][WARM:])


def main() -> None:
    gains, words = dict[int, dict[str, float]](), []
    with tempfile.TemporaryDirectory() as name:
        for count in COUNTS:
            took: dict[str, list[float]] = {schedule: [] for schedule in SCHEDULES}
            for turn in range(TURNS):
                for schedule in SCHEDULES:
                    took[schedule].append(seconds(Path(name), schedule, count, turn))
            best = {schedule: min(each) for schedule, each in took.items()}
            ours = best.pop(SCHEDULES[0])
            gains[count] = {schedule: each / ours for schedule, each in best.items()}
            shown = ", ".join(f"{gain:.2f}x {one}" for one, gain in gains[count].items())
            words.append(f"m = {count}: {shown} ({ours * 1e3:.0f} ms)")
            print(f"  {words[-1]}")
    conclude(
        'Wu et al., "BitPipe", 2024',
        "1.05x to 1.28x the throughput of other synchronous pipelines",
        "; ".join(words),
        f"run: `outsize train --mesh pipeline={WORKERS}`, preset small, microbatches of {TOKENS}"
        f" tokens, float32, {STEPS - WARM} steps, best of {TURNS} runs in turn",
        *(
            Figure(
                f"over the best of the others, m = {count // WORKERS}p",
                min(gains[count].values()), 1.05, timed=True,
                other=f"{WORKERS} workers on a processor",
            )
            for count in COUNTS
        ),
        Figure(
            "over the slowest of the others, m = p", max(gains[COUNTS[0]].values()), 1.28,
            timed=True, other=f"{WORKERS} workers on a processor",
        ),
    )  # fmt: skip


if __name__ == "__main__":
    main()
