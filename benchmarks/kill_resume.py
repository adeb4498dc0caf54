"""Kill -9 at random moments, resume, and compare with the run that was never stopped.

    python benchmarks/kill_resume.py [--kills 20] [--seed 0] [--steps 300]

Each row of the table is one kill: when it fell, how far the run had come, which step it went on
from. A run is killed wherever it is: while it starts, reads data, trains, evaluates or saves. At
the end the last checkpoint's tensor files, and the metrics but for the times in them, must be
equal byte for byte to those of the uninterrupted run. Exit code 1 if they are not.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from outsize.checkpoint.store import Store
from outsize.train.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Kill:
    """One kill. after: seconds; step: the last in the metrics; saved: the last checkpoint."""

    after: float
    step: int
    saved: int | None
    went_on: str


def outsize(home: Path, *words: str) -> subprocess.Popen[str]:
    """The command, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "outsize", *words],
        cwd=home,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_words(output: str, steps: int) -> list[str]:
    """A small run that saves often, in bfloat16 with a master copy."""
    values = {
        "model": "tiny",
        "data": "text",
        "data.validation": 0.1,
        "train.steps": steps,
        "train.batch_tokens": 512,
        "train.sequence": 128,
        "train.save_every": 2,
        "train.evaluate_every": 5,
        "precision": "bfloat16",
        "device": "cpu",
        "sample.tokens": 0,
        "output": output,
    }
    return ["train", *(word for k, v in values.items() for word in ("--set", f"{k}={v}"))]


def make_text(home: Path) -> None:
    """Some modules of the standard library."""
    (home / "text").mkdir()
    for name in ("argparse", "ast", "inspect", "tarfile", "typing", "zipfile"):
        source = Path(__import__(name).__file__)
        source = source / "__init__.py" if source.is_dir() else source
        shutil.copyfile(source, home / "text" / f"{name}.txt")


def state(run: Path) -> tuple[int, int | None]:
    """(last step in the metrics, last checkpoint)."""
    step = 0
    if (run / "metrics.jsonl").exists():
        step = max((record["step"] for record in read_metrics(run)), default=0)
    return step, Store(run).latest()


def kill_once(home: Path, words: list[str], early: bool, after: float) -> tuple[Kill, bool]:
    """Run, and kill so many seconds after its start (early) or after its first step; gives also
    whether it had ended by itself before."""
    began = time.monotonic()
    process = outsize(home, *words)
    if not early:
        wait_for_step(home / "cut", process, time.time())
    try:
        printed, _ = process.communicate(timeout=after)
        ended = True
        if process.returncode:
            raise SystemExit(f"a run failed by itself:\n{printed}")
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        printed, _ = process.communicate()
        ended = False
    took = time.monotonic() - began
    went_on = re.search(r"going on from step \d+", printed)
    step, saved = state(home / "cut")
    return Kill(took, step, saved, went_on[0] if went_on else "from the start"), ended


def wait_for_step(run: Path, process: subprocess.Popen[str], since: float) -> None:
    """Until the process has trained a step, or has ended."""
    while process.poll() is None:
        step, saved = state(run)
        if step > (saved or 0) and (run / "metrics.jsonl").stat().st_mtime > since:
            return
        time.sleep(0.01)


def main() -> int:
    """The check; gives the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        make_text(home)
        start, training = uninterrupted(home, options.steps)
        print(f"uninterrupted: {start:.1f} s to start, {training:.1f} s for {options.steps} steps")
        # A quarter falls before the first step; the others let the run come to about its end.
        span = 2 * training / options.kills
        print(f"{'kill':>4} {'after':>8} {'at step':>8} {'saved':>6}  this process went on")
        kills = 0
        while kills < options.kills:
            words = next_words(home, options.steps)
            early = draw.random() < 0.25
            after = draw.uniform(0, start if early else span)
            kill, ended = kill_once(home, words, early, after)
            if ended:  # faster than the dice: begin again, so that every kill hits a live run
                shutil.rmtree(home / "cut")
                continue
            kills += 1
            row = f"{kills:>4} {kill.after:>7.2f}s {kill.step:>8} {kill.saved!s:>6}"
            print(f"{row}  {kill.went_on}", flush=True)
        last = outsize(home, *next_words(home, options.steps))
        printed, _ = last.communicate()
        if last.returncode:
            raise SystemExit(f"the last resume failed:\n{printed}")
        return compare(home)


def uninterrupted(home: Path, steps: int) -> tuple[float, float]:
    """Seconds until the first step of a run that nobody stops, and from there to its end."""
    began = time.monotonic()
    process = outsize(home, *run_words("whole", steps))
    while process.poll() is None and state(home / "whole")[0] == 0:
        time.sleep(0.02)
    start = time.monotonic() - began
    printed, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"the uninterrupted run failed:\n{printed}")
    return start, time.monotonic() - began - start


def next_words(home: Path, steps: int) -> list[str]:
    """The resume, or the first start again if the run died before it had written its file."""
    if (home / "cut" / "run.yaml").exists():
        return ["train", "--resume", "cut"]
    return run_words("cut", steps)


def compare(home: Path) -> int:
    """Byte for byte; prints what was compared."""
    wrong = 0
    one, other = (Store(home / name).load() for name in ("whole", "cut"))
    for path in sorted(one.path.glob("*.safetensors")):
        same = path.read_bytes() == (other.path / path.name).read_bytes()
        wrong += not same
        print(f"{path.name}: {path.stat().st_size:,} bytes, {'equal' if same else 'DIFFERENT'}")
    records = [read_metrics(home / name, timed=False) for name in ("whole", "cut")]
    same = records[0] == records[1]
    wrong += not same
    print(f"metrics: {len(records[0])} records, {'equal' if same else 'DIFFERENT'}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
