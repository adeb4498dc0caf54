"""Outsize beside plain PyTorch, the Hugging Face Trainer and torch.compile: training on one CPU.

The same model (a Llama shape of 25.2M parameters), initial weights, rows of real text, steps and
threads for all; a fresh process for every contender and round, the order turned round each time, so
that a peak of memory is the contender's own and a busy minute hits everyone. Prints tables, where
Outsize's step goes, and the targets; the exit code is 1 where one is missed. See README.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import torch
from support.breakdown import Breakdown
from support.contender import Result, Task
from support.figures import (
    COMPILED,
    GIGA,
    OURS,
    TITLES,
    Contender,
    Work,
    breakdown,
    table,
    verdicts,
    work_of,
)
from support.job_data import write_rows, write_weights
from support.paths import whole_path

import outsize
from outsize.hardware import host
from outsize.hardware.probe import user_cache
from outsize.models.families import parse
from outsize.models.presets import PRESETS

HERE = Path(__file__).resolve().parent
PRESET, SEQUENCE, TOKENS = "25m", 512, 4096
MODULES = {
    OURS: "support.ours",
    "plain": "peers.plain",
    "trainer": "peers.trainer",
    COMPILED: "peers.plain",
}
PRECISIONS = ("fp32", "bf16")
SIZES, CALLS = (2048, 3072, 4096), 5  # of the products whose best rate is called the peak
QUICK_SIZES, QUICK_CALLS = (2048,), 2
PEERS_NEED = "pip install 'transformers>=5.0' accelerate"
TOLD = ("GLIBC_TUNABLES", "LD_PRELOAD", "MALLOC_", "OMP_", "MKL_", "KMP_", "TORCH", "DNNL_")
LOG_LINES = 20
QUIET = 10.0  # per cent of all cores that may be busy with something else


@dataclass(frozen=True)
class Bench:
    """What is run, and where the files of this run are."""

    contenders: tuple[str, ...]
    precisions: tuple[str, ...]
    rounds: int
    steps: int  # that count
    warm: int
    threads: int
    peer_rows: int
    peers_python: str
    quick: bool
    folder: Path

    def run(self, python: str, module: str, *arguments: str) -> None:
        """A module of this folder in a process of its own; SystemExit with its last lines where
        it fails."""
        paths = (str(HERE), str(Path(outsize.__file__).parents[1]))
        # Peers get this folder only: theirs may be another environment.
        shown = os.pathsep.join(paths if python == sys.executable else paths[:1])
        environment = {
            **os.environ,
            "PYTHONPATH": shown,
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": str(self.threads),
        }
        command = [python, "-m", module, *arguments]
        done = subprocess.run(
            command, cwd=HERE, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace",
        )  # fmt: skip
        if done.returncode:
            tail = "\n".join(done.stdout.splitlines()[-LOG_LINES:])
            raise SystemExit(f"{module} failed with exit code {done.returncode}:\n{tail}")

    def task(self, name: str, precision: str) -> str:
        """The file of a contender's task."""
        task = Task(
            weights=str(self.folder / "weights"),
            rows=str(self.folder / "rows.npy"),
            precision=precision,
            threads=self.threads,
            microbatch_rows=self.peer_rows,
            compiled=name == COMPILED,
            lr=3e-4,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.1,
            clip=1.0,
        )
        path = self.folder / f"task-{name}-{precision}.json"
        path.write_text(json.dumps(asdict(task)), encoding="utf-8")
        return str(path)

    def measure(self, name: str, precision: str) -> Result:
        """One round of one contender."""
        path = self.folder / "result.json"
        python = sys.executable if name == OURS else self.peers_python
        self.run(python, MODULES[name], self.task(name, precision), str(path))
        return Result(**json.loads(path.read_text(encoding="utf-8")))

    def peaks(self) -> dict[str, float]:
        """The matmul peak by precision, FLOP/s."""
        path = self.folder / "peak.json"
        sizes, calls = (QUICK_SIZES, QUICK_CALLS) if self.quick else (SIZES, CALLS)
        self.run(
            sys.executable, "support.matmul_peak", str(path), "--threads", str(self.threads),
            "--calls", str(calls), "--precision", *self.precisions, "--sizes", *map(str, sizes),
        )  # fmt: skip
        return dict(json.loads(path.read_text(encoding="utf-8")))

    def where(self, precision: str) -> Breakdown:
        """Where Outsize's step goes."""
        path = self.folder / "breakdown.json"
        self.run(sys.executable, "support.breakdown", self.task(OURS, precision), str(path))
        return Breakdown(**json.loads(path.read_text(encoding="utf-8")))


def parsed() -> tuple[Bench, Path, Path | None]:
    """What the command line asks for, the cache directory, and where the raw figures go."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="processes of each contender and precision")
    add("--steps", type=int, default=10, help="steps that count, after those that warm up")
    add("--warm", type=int, default=3, help="first steps of a process, which do not count")
    add("--precision", choices=PRECISIONS, help="one of them; both by default")
    add("--quick", action="store_true", help="a round of few steps: whether it works, no figures")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--contenders", nargs="+", choices=tuple(TITLES), default=tuple(TITLES))
    add("--peer-rows", type=int, default=TOKENS // SEQUENCE, help="rows of a peer's microbatch")
    add(
        "--peers-python",
        type=whole_path,
        default=sys.executable,
        help=f"an environment with: {PEERS_NEED}",
    )
    add("--cache", type=Path, default=user_cache() / "benchmarks", help="tokenizer and tokens")
    add("--json", type=Path, help="also write every step's figures to this file")
    options = parser.parse_args()
    if min(options.rounds, options.steps, options.threads) < 1 or options.warm < 1:
        parser.error("--rounds, --steps, --warm and --threads: expected 1 or more")
    if options.peer_rows < 1 or TOKENS // SEQUENCE % options.peer_rows:
        parser.error(f"--peer-rows {options.peer_rows}: expected a divisor of {TOKENS // SEQUENCE}")
    quick = options.quick
    bench = Bench(
        contenders=tuple(name for name in TITLES if name in options.contenders),
        precisions=PRECISIONS if options.precision is None else (options.precision,),
        rounds=1 if quick else options.rounds,
        steps=min(2, options.steps) if quick else options.steps,
        warm=1 if quick else options.warm,
        threads=options.threads,
        peer_rows=options.peer_rows,
        peers_python=options.peers_python,
        quick=quick,
        folder=Path(),
    )
    return bench, options.cache, options.json


def peers_versions(python: str) -> str:
    """What the peers' environment holds; SystemExit where something is missing."""
    code = (
        "import torch, transformers, accelerate; print(f'torch {torch.__version__}, transformers"
        " {transformers.__version__}, accelerate {accelerate.__version__}')"
    )
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    except OSError as error:
        raise SystemExit(f"--peers-python {python}: {error.strerror}") from None
    if done.returncode:
        why = (done.stderr.splitlines() or ["no reason given"])[-1]
        raise SystemExit(f"{python} lacks what the peers need ({why}): {PEERS_NEED}")
    return done.stdout.strip()


def conditions(bench: Bench) -> str:
    """What the figures depend on."""
    peers = "none" if bench.contenders == (OURS,) else peers_versions(bench.peers_python)
    chosen = {k: v for k, v in os.environ.items() if k.startswith(TOLD)}
    lines = (
        f"date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        f"cpu: {host.processor()}, {host.cores()} cores, {bench.threads} threads,"
        f" {host.memory().total / 2**30:.1f} GiB of memory",
        f"software: Python {platform.python_version()}, Outsize {outsize.__version__},"
        f" torch {torch.__version__}; peers: {peers}",
        f"environment: {' '.join(f'{k}={v}' for k, v in chosen.items()) or 'nothing set'}",
        f"job: {PRESET}, sequence {SEQUENCE}, {TOKENS} tokens a step; {bench.warm} steps to warm"
        f" up, {bench.steps} that count, {bench.rounds} rounds; peers' microbatches of"
        f" {bench.peer_rows} rows",
    )
    return "\n".join(lines)


@dataclass
class Figures:
    """Everything that was measured."""

    results: dict[tuple[str, str], list[Result]]
    peaks: dict[str, list[float]]
    load: list[float]  # per cent of all cores that others used before each round


def rounds(bench: Bench) -> Figures:
    """All rounds: contenders in turn, then in the opposite order, and so on."""
    keys = [(precision, name) for precision in bench.precisions for name in bench.contenders]
    found = Figures({key: [] for key in keys}, {p: [] for p in bench.precisions}, [])
    for number in range(bench.rounds):
        found.load.append(psutil.cpu_percent(interval=1.0))
        for precision, peak in bench.peaks().items():
            found.peaks[precision].append(peak)
        for precision, name in keys if number % 2 == 0 else keys[::-1]:
            print(f"round {number + 1} of {bench.rounds}: {precision}, {TITLES[name]}", flush=True)
            found.results[precision, name].append(bench.measure(name, precision))
    return found


def show(bench: Bench, found: Figures, work: Work) -> bool:
    """Print everything; whether every target is met."""
    load = ", ".join(f"{share:.0f}%" for share in found.load)
    print(f"\ncores busy with something else before each round: {load}")
    if max(found.load) > QUIET:
        print("THE MACHINE WAS NOT QUIET: times and ratios below are no result")
    print(f"model FLOPs: {work.formula}")
    print("MFU: those FLOPs over the step's time, as a fraction of the matmul peak\n")
    good = True
    for precision in bench.precisions:
        peaks = found.peaks[precision]
        here = {
            name: Contender(name, found.results[precision, name], bench.warm, work.tokens)
            for name in bench.contenders
        }
        print(
            f"## {precision}\n\nmatmul peak: {max(peaks) / GIGA:.0f} GFLOP/s, the best of all"
            f" rounds ({', '.join(f'{p / GIGA:.0f}' for p in peaks)})\n"
        )
        print(table(here, work, max(peaks)))
        if OURS in here:
            print(f"\nOutsize's plan: {here[OURS].results[0].notes}\n")
            print(breakdown(bench.where(precision), work, max(peaks)))
        print()
        for verdict in verdicts(here, precision):
            word = {True: "met", False: "MISSED", None: "open"}[verdict.met]
            print(f"{word}: {verdict.text}")
            good = good and bool(verdict.met)
        print(flush=True)
    return good


def record(path: Path, told: str, found: Figures) -> None:
    """Every step's seconds and losses, as JSON."""
    plain = {
        "conditions": told,
        "peaks": found.peaks,
        "load": found.load,
        "results": [
            {"precision": precision, "contender": name, "round": number, **asdict(result)}
            for (precision, name), results in found.results.items()
            for number, result in enumerate(results)
        ],
    }
    path.write_text(json.dumps(plain, indent=1), encoding="utf-8")


def main() -> int:
    bench, cache, raw = parsed()
    told = conditions(bench)
    print(told, flush=True)
    with tempfile.TemporaryDirectory(prefix="outsize-benchmark-") as folder:
        bench = replace(bench, folder=Path(folder))
        config = parse(PRESETS[PRESET])
        rows, steps = TOKENS // SEQUENCE, bench.warm + bench.steps
        write_rows(bench.folder / "rows.npy", cache, steps, rows, SEQUENCE, config.vocab)
        parameters = write_weights(bench.folder / "weights", config)
        work = work_of(parameters, len(config.layers), SEQUENCE, config.hidden, TOKENS)
        found = rounds(bench)
        if raw is not None:
            record(raw, told, found)
        good = show(bench, found, work)
    if bench.quick:
        print("--quick shows that it works; its times are no result")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
