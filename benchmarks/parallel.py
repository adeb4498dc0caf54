"""Outsize beside PyTorch's DDP, FSDP2, DTensor and beside DeepSpeed: a step over several workers.

The same model, initial weights, rows of real text, ranks and machine for both sides of a contest;
all workers of both are there at once and step in turns, so that a busy second hits both. Peers
speak gloo; they train a lean Llama (support/llama_parallel.py). Prints a table and the targets; the
exit code is 1 where one is missed. --scaling: how a step grows over ranks and sizes; --links: three
machines, made of network namespaces, on slow links. See README.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import torch
from support.bench_parallel import CONTESTS, OURS, Bench
from support.figures_parallel import Bout, table, verdicts
from support.links_parallel import MACHINES, show_links
from support.scaling_parallel import RANKS, show_scaling
from support.worlds_parallel import Spot

import outsize
from outsize.hardware import host
from outsize.hardware.probe import user_cache

QUIET = 10.0  # per cent of the cores that others may use


def contest(bench: Bench, names: tuple[str, ...], alone: bool) -> list[Bout]:
    """All contests, one after the other."""
    bouts = []
    for name in names:
        each = CONTESTS[name]
        print(f"{name}: {each.size} ranks, beside {each.title}", flush=True)
        modules = (each.module,) if alone else (each.module, OURS)
        bouts.append(bench.bout(name, each, modules, Spot(each.size), bench.task(each)))
    return bouts


def conditions(bench: Bench) -> str:
    """What the figures depend on."""
    code = "import deepspeed, torch; print(deepspeed.__version__, 'on torch', torch.__version__)"
    zero = subprocess.run([bench.zero_python, "-c", code], capture_output=True, text=True)
    busy = psutil.cpu_percent(interval=1.0)
    lines = (
        f"date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        f"cpu: {host.processor()}, {host.cores()} cores, a thread a worker,"
        f" {host.memory().total / 2**30:.1f} GiB of memory",
        f"software: Python {platform.python_version()}, Outsize {outsize.__version__}, torch"
        f" {torch.__version__}; DeepSpeed {(zero.stdout.splitlines() or ['is not there'])[-1]}",
        f"job: {bench.preset}, {bench.rows} rows of {bench.sequence} tokens a step, float32;"
        f" {bench.warm} steps to warm up, {bench.steps - bench.warm} that count; median",
        f"cores busy with something else before: {busy:.0f}%"
        + (": NOT QUIET, times and ratios below are no result" if busy > QUIET else ""),
    )
    return "\n".join(lines)


def parsed() -> tuple[argparse.Namespace, Bench]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--contests", nargs="+", choices=tuple(CONTESTS), default=tuple(CONTESTS))
    add("--preset", default="25m", choices=("small", "25m"))
    add("--rows", type=int, default=4, help="of a step, over all workers")
    add("--sequence", type=int, default=256)
    add("--steps", type=int, default=7, help="steps that count")
    add("--warm", type=int, default=2, help="first steps, which do not count")
    add("--quick", action="store_true", help="a small model, few steps: whether it works")
    add("--peers-alone", action="store_true", help="without Outsize")
    add("--scaling", action="store_true", help="ranks 1, 2, 4, 8 and two sizes instead")
    add("--links", metavar="RATE", help="three machines on links of this rate, as 1gbit, instead")
    add("--zero-python", default=sys.executable, help="an environment with torch and deepspeed")
    add("--cache", type=Path, default=user_cache() / "benchmarks", help="tokenizer and tokens")
    add("--json", type=Path, help="also write every step's figures to this file")
    options = parser.parse_args()
    if min(options.rows, options.sequence, options.steps, options.warm) < 1:
        parser.error("--rows, --sequence, --steps and --warm: expected 1 or more")
    if options.quick:
        options.preset, options.sequence, options.steps, options.warm = "small", 128, 2, 1
    if options.scaling:
        options.rows = max(options.rows, RANKS[-1])
    if options.links is not None:
        options.rows = MACHINES * -(-options.rows // MACHINES)
    return options, Bench(
        options.preset, options.rows, options.sequence, options.warm + options.steps, options.warm,
        options.zero_python, options.cache, Path(),
    )  # fmt: skip


def main() -> int:
    options, bench = parsed()
    print(conditions(bench), flush=True)
    with tempfile.TemporaryDirectory(prefix="outsize-benchmark-") as folder:
        bench = replace(bench, folder=Path(folder))
        if options.scaling:
            show_scaling(bench)
            return 0
        bench.prepare()
        if options.links is not None:
            show_links(bench, options.links)
            return 0
        bouts = contest(bench, tuple(options.contests), options.peers_alone)
    print(f"\n{table(bouts)}\n")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(b) for b in bouts], indent=1), encoding="utf-8")
    good = True
    for verdict in verdicts(bouts):
        print(f"{'met' if verdict.met else 'MISSED'}: {verdict.text}")
        good = good and verdict.met
    if options.quick:
        print("--quick shows that it works; its times are no result")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
