"""Training steps of this checkout beside those of another one, by the command that users type.

    python benchmarks/before.py --base PATH [--rounds 3] [--cases single-fp32 ...]

`outsize train` runs from either checkout in turn, a process each, with the same settings. A figure
is the quietest step behind two warm ones, as metrics.jsonl has it, of the quietest run; a case's is
the base's over this checkout's. Losses of the third step must agree to six figures, or to three in
bfloat16: later ones part by themselves, since a sum in another order is another number. The exit
code is 1 where a case is below 0.98. Needs a quiet machine: the load at each case's begin is
printed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

LEAST, WARM = 0.98, 2
COMMON = {"train.evaluate_every": "0", "sample.tokens": "0", "train.seed": "1"}
BIG = {"model": "25m", "train.sequence": "512", "train.batch_tokens": "4096", "train.steps": "8"}
SMALL = {"model": "small", "train.sequence": "256", "train.batch_tokens": "4096"}
PAIR = {**SMALL, "train.steps": "12", "threads": "1", "precision": "float32"}
# Settings, as --set takes them; and options that stand beside them.
CASES: dict[str, tuple[dict[str, str], list[str]]] = {
    "single-fp32": ({**BIG, "precision": "float32"}, []),
    "single-bf16": ({**BIG, "precision": "bfloat16"}, []),
    "tiny": ({"model": "tiny", "train.steps": "300"}, []),
    "data": (PAIR, ["--mesh", "data=2"]),
    "zero-3": ({**PAIR, "plan.zero": "3"}, ["--mesh", "data=2"]),
    "tensor": (PAIR, ["--mesh", "tensor=2"]),
    "1f1b": (
        {**PAIR, "plan.pipeline": "1f1b", "plan.microbatch_rows": "2"},
        ["--mesh", "pipeline=2"],
    ),
    "streamed": ({**BIG, "precision": "float32"}, ["--memory", "400MiB"]),
}


def run(checkout: Path, case: str, work: Path) -> tuple[float, float]:
    """Seconds of the quietest step behind the warm ones, and the loss of the first of those."""
    settings, options = CASES[case]
    output = Path(tempfile.mkdtemp(dir=work)) / "run"
    if "--memory" in options:
        options = [*options, "--disk", f"{output.parent}:4GiB"]
    chosen = {**COMMON, **settings, "output": str(output)}
    words = [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "outsize", "train", *words, *options]
    env = {**os.environ, "PYTHONPATH": str(checkout)}
    ran = subprocess.run(command, env=env, cwd=work, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(
            f"{case}, {checkout}: exit code {ran.returncode}\n{ran.stdout}{ran.stderr}"
        )
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "seconds" in line]
    return min(step["seconds"] for step in steps[WARM:]), steps[WARM]["loss"]


def compare(base: Path, case: str, rounds: int, work: Path) -> float:
    """The base's time over this checkout's."""
    print(f"{case}: load {os.getloadavg()[0]:.2f}", flush=True)
    here = Path(__file__).parents[1]
    best = {base: math.inf, here: math.inf}
    for index in range(rounds):
        sides = (base, here) if index % 2 == 0 else (here, base)
        taken = {side: run(side, case, work) for side in sides}
        (before, old), (now, new) = taken[base], taken[here]
        near = 1e-3 if "16" in CASES[case][0].get("precision", "16") else 1e-6
        if not math.isclose(old, new, rel_tol=near):
            raise SystemExit(f"{case}: losses differ: {old} and {new}")
        print(f"  {before * 1e3:.1f} ms before, {now * 1e3:.1f} ms now", flush=True)
        best = {side: min(best[side], taken[side][0]) for side in best}
    return best[base] / best[here]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--base", type=Path, required=True, help="another checkout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    asked = parser.parse_args()
    low = []
    with tempfile.TemporaryDirectory(prefix="outsize-before.") as work:
        for case in asked.cases:
            ratio = compare(asked.base.resolve(), case, asked.rounds, Path(work))
            print(f"{case}: {ratio:.3f}x", flush=True)
            low += [case] if ratio < LEAST else []
    print(f"below {LEAST}: {', '.join(low) or 'none'}")
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())
