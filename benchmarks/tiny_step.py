"""Steps of the preset `tiny`, where Python is the cost: this checkout beside another one.

    python benchmarks/tiny_step.py --base PATH [--profile]

Two processes, one a checkout, step in turns, so that what else the machine does is everybody's.
Processor time, of the quietest round; losses of the first step must agree to six figures, or to
three in bfloat16, as a sum in another order is another number. Cases are the plan that `outsize
train` takes for `model: tiny` and small microbatches of one row. The exit code is 1 where the
geometric mean is below 1.2 times the base's pace.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import math
import os
import pstats
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROUNDS, STEPS, WARM, LEAST = 100, 4, 12, 1.2
# Rows of a step, rows of a microbatch, tokens of a row, precision, tokens of a chunk of the loss.
CASES: dict[str, tuple[int, int, int, str, int]] = {
    "as outsize train takes it": (4, 4, 256, "bfloat16", 512),
    "4 microbatches of 64 tokens": (4, 1, 64, "float32", 0),
}


def job_of(case: str) -> tuple[Any, list[Any]]:
    """A job of the checkout on the path, and the batches that its steps take by turns."""
    from outsize.data import Batch
    from outsize.models.build import build
    from outsize.models.families import parse
    from outsize.models.presets import PRESETS
    from outsize.optim import AdamW
    from outsize.plan import Plan, Precision
    from outsize.plan.plan import per_segment
    from outsize.runtime import Job, NativeFlow

    rows, microbatch, tokens, named, chunk = CASES[case]
    precision = Precision.named(named)
    config = parse(PRESETS["tiny"])
    plan = Plan(4, per_segment(4), rows, microbatch, tokens, precision, loss_chunk=chunk)
    model = build(config, seed=1, dtype=torch.float32)
    model = model.to(getattr(torch, named))
    bounds = ((0, tokens // 3, tokens),) * rows
    torch.manual_seed(0)
    batches = []
    for _ in range(4):
        ids = torch.randint(0, config.vocab, (rows, tokens + 1))
        batches.append(Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), bounds))
    optimizer = AdamW(weight_decay=0.1)
    try:
        from outsize.runtime.recipe import Recipe
    except ImportError:  # a checkout from before recipes
        return Job(NativeFlow(model, plan), plan, optimizer, clip=1.0), batches
    return Job(NativeFlow(model, plan), plan, Recipe(optimizer, 1.0)), batches


def serve(case: str) -> None:
    """A process: for each line, some steps; gives their processor seconds and the first's loss."""
    torch.set_num_threads(1)
    job, batches = job_of(case)
    for line in sys.stdin:
        count = int(line)
        begin = time.process_time()
        losses = [float(job.step(batches[index % len(batches)], 1e-3)) for index in range(count)]
        taken = (time.process_time() - begin) / count
        print(json.dumps([taken, losses[0]]), flush=True)


def profile(case: str) -> None:
    """What a step calls, on this checkout."""
    torch.set_num_threads(1)
    job, batches = job_of(case)
    for _ in range(WARM):
        job.step(batches[0], 1e-3)
    seen = cProfile.Profile()
    seen.enable()
    for _ in range(100):
        job.step(batches[0], 1e-3)
    seen.disable()
    pstats.Stats(seen).sort_stats("tottime").print_stats(45)


class Side:
    """One checkout's process."""

    def __init__(self, checkout: Path, case: str) -> None:
        env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--serve", case]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)
        self.taken: list[float] = []
        self.loss = 0.0

    def step(self, count: int, keep: bool = True) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        print(count, file=stdin, flush=True)
        line = stdout.readline()
        if not line:
            raise SystemExit("a side ended; its error is above")
        taken, loss = json.loads(line)
        if keep:
            self.taken.append(taken)
        else:
            self.loss = loss

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(base: Path, case: str) -> float:
    """The base's time over this checkout's."""
    sides = [Side(base, case), Side(Path(__file__).parents[1], case)]
    for side in sides:
        side.step(WARM, keep=False)
    for _ in range(ROUNDS):
        for side in sides:
            side.step(STEPS)
    for side in sides:
        side.close()
    before, after = (min(side.taken) for side in sides)
    near = 1e-3 if CASES[case][3] == "bfloat16" else 1e-6
    if not math.isclose(sides[0].loss, sides[1].loss, rel_tol=near):
        raise SystemExit(f"{case}: losses differ: {sides[0].loss} and {sides[1].loss}")
    print(f"{case}: {before * 1e3:.2f} ms before, {after * 1e3:.2f} ms now: {before / after:.3f}x")
    return before / after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--base", type=Path, help="another checkout")
    parser.add_argument("--profile", action="store_true", help="the calls of a step instead")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve is not None:
        serve(asked.serve)
        return 0
    if asked.profile:
        for case in CASES:
            print(case)
            profile(case)
        return 0
    if asked.base is None:
        parser.error("--base PATH, or --profile")
    ratios = [compare(asked.base.resolve(), case) for case in CASES]
    mean = math.prod(ratios) ** (1 / len(ratios))
    print(f"geometric mean {mean:.3f}x; target {LEAST}x: {'met' if mean >= LEAST else 'MISSED'}")
    return 0 if mean >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
