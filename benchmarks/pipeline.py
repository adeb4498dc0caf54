"""Outsize's pipeline schedules beside those of torch.distributed.pipelining: a step of 4 workers.

The same model, initial weights, rows of real text, microbatches, ranks and machine for both sides;
all workers of both are there at once and step in turns, so that a busy second hits both. Peers
speak gloo and train a lean Llama, cut by hand (peers/pipelined.py). Prints a table and the targets;
the exit code is 1 where one is missed. --forecast: steps predicted and measured. See README.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import torch
from support.bench_parallel import Bench
from support.bench_pipeline import OURS, PAIRS, THEIRS, WORKERS, Bout, bout
from support.figures_parallel import Verdict
from support.figures_pipeline import table, verdicts
from support.forecast_pipeline import SCHEDULES, forecast_verdicts, show

import outsize
from outsize.hardware import host
from outsize.hardware.probe import user_cache

QUIET = 10.0  # per cent of the cores that others may use


def conditions(bench: Bench, microbatches: int) -> str:
    """What the figures depend on."""
    busy = psutil.cpu_percent(interval=1.0)
    lines = (
        f"date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        f"cpu: {host.processor()}, {host.cores()} cores, {WORKERS} workers of a thread each,"
        f" {host.memory().total / 2**30:.1f} GiB of memory",
        f"software: Python {platform.python_version()}, Outsize {outsize.__version__}, torch"
        f" {torch.__version__}",
        f"job: {bench.preset}, {bench.rows} rows of {bench.sequence} tokens a step, {microbatches}"
        f" microbatches, float32; {bench.warm} steps to warm up, {bench.steps - bench.warm} that"
        " count; median",
        f"cores busy with something else before: {busy:.0f}%"
        + (": NOT QUIET, times and ratios below are no result" if busy > QUIET else ""),
    )
    return "\n".join(lines)


def contest(bench: Bench, names: list[str], microbatches: int, alone: bool) -> list[Bout]:
    """All contests, one after the other."""
    bouts = []
    for name in names:
        pair = PAIRS[name]
        print(f"{name}: {pair.theirs}, ours {pair.ours}", flush=True)
        bouts.append(bout(bench, name, microbatches, (THEIRS,) if alone else (THEIRS, OURS)))
    return bouts


def parsed() -> tuple[argparse.Namespace, Bench]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--contests", nargs="+", choices=tuple(PAIRS), default=list(PAIRS))
    add("--preset", default="25m", choices=("small", "25m"))
    add("--microbatches", type=int, default=8, help="of a step")
    add("--rows", type=int, default=1, help="of a microbatch")
    add("--sequence", type=int, default=256)
    add("--steps", type=int, default=7, help="steps that count")
    add("--warm", type=int, default=2, help="first steps, which do not count")
    add("--quick", action="store_true", help="a small model, few steps: whether it works")
    add("--peers-alone", action="store_true", help="without Outsize")
    add(
        "--forecast", nargs="*", choices=tuple(SCHEDULES),
        help="predict steps of these schedules (all) from blocks timed alone, instead",
    )  # fmt: skip
    add("--traces", type=Path, help="with --forecast: a folder for the traces of both")
    add("--cache", type=Path, default=user_cache() / "benchmarks", help="tokenizer and tokens")
    add("--json", type=Path, help="also write every step's figures to this file")
    options = parser.parse_args()
    if min(options.rows, options.sequence, options.steps, options.warm) < 1:
        parser.error("--rows, --sequence, --steps and --warm: expected 1 or more")
    if options.microbatches < 2 * WORKERS or options.microbatches % WORKERS:
        parser.error(f"--microbatches: expected a multiple of {WORKERS}, {2 * WORKERS} or more")
    if options.quick:
        options.preset, options.sequence, options.steps, options.warm = "small", 128, 2, 1
    return options, Bench(
        options.preset, options.rows * options.microbatches, options.sequence,
        options.warm + options.steps, options.warm, sys.executable, options.cache, Path(),
    )  # fmt: skip


def told(every: Iterator[Verdict]) -> int:
    """Print the verdicts; gives the exit code."""
    good = True
    for verdict in every:
        print(f"{'met' if verdict.met else 'MISSED'}: {verdict.text}")
        good = good and verdict.met
    return 0 if good else 1


def main() -> int:
    options, bench = parsed()
    print(conditions(bench, options.microbatches), flush=True)
    with tempfile.TemporaryDirectory(prefix="outsize-benchmark-") as folder:
        bench = replace(bench, folder=Path(folder))
        bench.prepare()
        if options.forecast is not None:
            chosen = options.forecast or tuple(SCHEDULES)
            found = show(bench, chosen, options.microbatches, options.traces)
            return told(forecast_verdicts(found))
        bouts = contest(bench, options.contests, options.microbatches, options.peers_alone)
    print(f"\n{table(bouts)}\n")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(b) for b in bouts], indent=1), encoding="utf-8")
    code = told(verdicts(bouts))
    if options.quick:
        print("--quick shows that it works; its times are no result")
    return code


if __name__ == "__main__":
    sys.exit(main())
