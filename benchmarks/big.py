"""Full fine-tuning of a model far larger than memory: every state on disk, under a hard cap.

    python benchmarks/big.py [--model llama-1.1b] [--cap 3GiB] [--tokens 1024] [--disk DIR]
    python benchmarks/big.py --model llama-7b --cap 6GiB --precision bfloat16-weights --tokens 256

AdamW over random data, in a child process whose control group may hold so many bytes, interpreter
and page cache included. Parameters are made chunk by chunk: the model is never in memory. Prints
what was predicted beside what was measured. Exit code 1 where the cap was broken, more bytes moved
than the formula allows, the peak left the forecast, or (on a quiet machine) the disk or the
clock did: `--lenient` only reports those two.

Bytes on disk: 16 a parameter in float32 (weights, gradients, two moments: 17.6 GB for 1.1G
parameters), 18 in bfloat16 with a float32 master, 8 with everything in bfloat16 (53.9 GB for
6.74G: the 7B shape needs this choice, which is approximate).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from support import streaming
from support.cgroup import run_capped
from support.streaming import BFLOAT16_ALL, Bytes, Work

from outsize.hardware import Hardware, form
from outsize.hardware.probe import probe
from outsize.memory import Ledger
from outsize.memory.sizes import format_bytes, parse_bytes
from outsize.memory.tiers import TierSpec, disk_tier, measured, open_stores
from outsize.models.config import DecoderConfig
from outsize.models.families import parse
from outsize.models.presets import PRESETS
from outsize.optim import AdamW
from outsize.plan import Plan, Precision, Rest, Stream
from outsize.report.timeline import write_timeline
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.search import PlanRequest
from outsize.simulate import Forecast
from outsize.trace.text import dumps as trace_text
from outsize.trace.text import write_text

PRECISIONS = ("float32", "bfloat16", "bfloat16-weights")
BYTES_MOVED, BANDWIDTH, CLOCK, PEAK = 1.02, 0.9, 0.15, 0.95
LIMIT = 3600.0
ROUNDING = 64  # bytes: scalars that no rehearsal has


@dataclass(frozen=True)
class Settings:
    """What the child is told. hardware: path of the measured rates; result: where it answers."""

    model: str
    tokens: int
    sequence: int
    microbatches: int
    precision: str
    steps: int
    update: str
    activations: str
    resident: int
    pool: int
    parts: int
    disk: str
    hardware: str
    result: str
    trace: str

    def config(self) -> DecoderConfig:
        return parse(dict(PRESETS[self.model]))

    def work(self) -> Work:
        named = self.precision != "bfloat16-weights"
        precision = Precision.named(self.precision) if named else BFLOAT16_ALL
        return streaming.work_of(self.tokens, self.sequence, self.microbatches, precision)

    def plan(self) -> Plan:
        rest = Rest("disk", "disk", "disk", self.activations)
        stream = Stream(self.resident, 1, self.pool, parts=self.parts)
        return streaming.plan_of(self.config(), self.work(), rest, stream, update=self.update)

    def clip(self) -> float | None:
        return None if self.update == "behind" else 1.0


@dataclass(frozen=True)
class Result:
    """What the child found. steps: seconds, read and written bytes and peak of each; the rest is
    of the last step, predicted first where there are two."""

    parameters: int
    below: int
    setup: float
    losses: list[float]
    seconds: list[float]
    read: list[int]
    written: list[int]
    peaks: list[int]
    formula: Bytes
    schedule: Bytes
    predicted_peak: int
    predicted_seconds: float
    predicted_computing: float
    pool: int
    computing: float
    moving: float
    both: float
    kinds: dict[str, float]
    flops: float


def predicted(settings: Settings, hardware: Hardware) -> Forecast:
    work = settings.work()
    bounds = (0, work.sequence)
    plan = settings.plan()
    request = PlanRequest(
        work.rows, work.sequence, work.precision, AdamW(), clip=settings.clip(),
        approximate=plan.approximate, documents=bounds,
    )  # fmt: skip
    return streaming.predict_sampled(settings.config(), request, plan, hardware)


def inside(settings: Settings) -> None:
    """The child: train under the cap that it finds itself in."""
    hardware = form.read(settings.hardware)
    forecast = predicted(settings, hardware)
    gc.collect()
    begin = time.perf_counter()
    work, config = settings.work(), settings.config()
    with open_stores([disk_tier(settings.disk)]) as stores:
        model = streaming.shells(config, getattr(torch, work.precision.compute))
        job = Job(
            NativeFlow(model, forecast.plan),
            forecast.plan,
            Recipe(AdamW(), settings.clip()),
            Here(ledger=Ledger(), stores=stores),
            fill=streaming.quick_fill(model, 0),
        )
        setup, disk = time.perf_counter() - begin, stores["disk"]
        said(f"states made and written in {setup:.1f} s, pool {format_bytes(job.placement.pool)}")
        seconds, read, written, peaks, losses = [], [], [], [], []
        for step in range(settings.steps):
            before = disk.bytes_read, disk.bytes_written
            losses.append(float(job.step(streaming.random_batch(config, work, step), 1e-5)))
            seconds.append(job.report.seconds)
            read.append(disk.bytes_read - before[0])
            written.append(disk.bytes_written - before[1])
            peaks.append(job.report.trace.peak())
            said(
                f"step {step}: loss {losses[-1]:.4f}, {seconds[-1]:.1f} s,"
                f" {work.tokens / seconds[-1]:.1f} tokens/s, {format_bytes(read[-1])} read,"
                f" {format_bytes(written[-1])} written"
            )
        placement, trace = job.placement, job.report.trace
        spent = streaming.overlap(trace)
        result = Result(
            sum(t.numel for t in placement.chunks.tables), forecast.below.get("disk", 0), setup,
            losses, seconds, read, written, peaks, streaming.formula(placement),
            streaming.moving(job.schedule, placement), forecast.peak, forecast.seconds,
            streaming.overlap(forecast.trace).computing, placement.pool, spent.computing,
            spent.moving, spent.both, streaming.by_kind(trace), forecast.flops,
        )  # fmt: skip
    Path(settings.result).write_text(json.dumps(asdict(result)), encoding="utf-8")
    if settings.trace:
        write_text(trace_text(trace), settings.trace)
        page = Path(settings.trace).with_suffix(".html")
        write_timeline(page, forecast.trace, trace, title=f"A streamed step of {settings.model}")
        said(f"trace {settings.trace}, timeline {page}")


def said(line: str) -> None:
    print(line, flush=True)


def rates(folder: Path) -> Hardware:
    """This machine, with the disk under a folder as a tier at its direct bandwidth."""
    spec = TierSpec("disk", "disk", (folder,), 1 << 30)
    known = probe("cpu", quick=False, directory=folder)
    return streaming.with_tiers(known, [measured(spec, time.strftime("%Y-%m-%d"))])


def read_result(path: Path) -> Result:
    plain = json.loads(path.read_text(encoding="utf-8"))
    for name in ("formula", "schedule"):
        plain[name] = Bytes(**plain[name])
    return Result(**plain)


@dataclass(frozen=True)
class Check:
    """One figure against its target. timed: it depends on how quiet the machine is."""

    name: str
    text: str
    good: bool
    timed: bool = False


def checks(result: Result, hardware: Hardware, cap: int, peak: int, spills: bool) -> list[Check]:
    disk = hardware.tier("disk")
    assert disk.read is not None and disk.write is not None
    last, made = result.seconds[-1], result.peaks[-1] / result.predicted_peak
    planned = result.schedule.read + result.schedule.written
    by_formula = result.formula.read + result.formula.written
    moved = result.read[-1] + result.written[-1]
    ideal = result.read[-1] / disk.read.value + result.written[-1] / disk.write.value
    band = ideal / result.moving if result.moving else 0.0
    off = last / result.predicted_seconds
    found = [
        Check("cap", f"{format_bytes(peak)} of {format_bytes(cap)}, everything counted",
              peak <= cap),
        Check("peak", f"{format_bytes(result.peaks[-1])} measured,"
              f" {format_bytes(result.predicted_peak)} predicted: {made:.4f}",
              PEAK <= made <= 1.0),
        Check("schedule", f"{format_bytes(planned)} a step of states, formula"
              f" {format_bytes(by_formula)}: {planned / by_formula:.3f}",
              planned <= BYTES_MOVED * by_formula),
        Check("bytes", f"{format_bytes(result.read[-1])} read and"
              f" {format_bytes(result.written[-1])} written by the disk: {moved / planned:.3f} of"
              f" the schedule's{', activations beside them' if spills else ''}",
              spills or moved <= BYTES_MOVED * planned),
        Check("disk", f"{band:.2f} of its direct bandwidth while bytes move"
              f" ({disk.read.value / 1e9:.1f} GB/s read, {disk.write.value / 1e9:.1f} written)",
              band >= BANDWIDTH, timed=True),
        Check("clock", f"{last:.1f} s a step, {result.predicted_seconds:.1f} predicted: {off:.2f}",
              abs(off - 1) <= CLOCK, timed=True),
    ]  # fmt: skip
    return found


def show(result: Result, settings: Settings, found: list[Check]) -> None:
    rate = settings.tokens / result.seconds[-1]
    hidden = result.both / result.moving if result.moving else 1.0
    print(
        f"{settings.model}: {result.parameters / 1e9:.2f}G parameters,"
        f" {format_bytes(result.below)} of states on disk, {settings.precision},"
        f" update {settings.update}, {settings.tokens} tokens a step in"
        f" {settings.microbatches} microbatches"
    )
    print(
        f"{rate:.1f} tokens/s, {result.flops / result.seconds[-1] / 1e9:.0f} GFLOP/s;"
        f" computing {result.computing:.1f} s ({result.predicted_computing:.1f} predicted), bytes"
        f" moving {result.moving:.1f} s, of it {hidden:.0%} under computation"
    )
    print("seconds by kind: " + ", ".join(f"{k} {s:.1f}" for k, s in result.kinds.items()))
    for check in found:
        word = "met" if check.good else "MISSED"
        print(f"{check.name:9} {word:7} {check.text}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=sorted(PRESETS), default="llama-1.1b")
    parser.add_argument("--cap", type=parse_bytes, default=3 << 30)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--precision", choices=PRECISIONS, default="float32")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--update", choices=("behind", "apart"), default="behind")
    parser.add_argument("--activations", choices=("device", "disk"), default="disk")
    parser.add_argument("--resident", type=int, default=2, help="stages in the pool at once")
    parser.add_argument("--pool", type=parse_bytes, default=0, help="0: the least")
    parser.add_argument("--parts", type=int, default=11, help="of an update, in the pool together")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--trace", type=Path, help="trace.json; the HTML timeline goes beside it")
    parser.add_argument("--lenient", action="store_true", help="times may miss: a busy machine")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(Settings(**json.loads(Path(options.inside).read_text(encoding="utf-8"))))
        return 0
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outsize-big-")))
        hardware = rates(options.disk)
        (home / "hardware.yaml").write_text(form.dumps(hardware), encoding="utf-8")
        settings = Settings(
            options.model, options.tokens, options.sequence, options.microbatches,
            options.precision, options.steps, options.update, options.activations,
            options.resident, options.pool, options.parts, str(options.disk),
            str(home / "hardware.yaml"), str(home / "result.json"),
            str(options.trace.resolve()) if options.trace else "",
        )  # fmt: skip
        (home / "settings.json").write_text(json.dumps(asdict(settings)), encoding="utf-8")
        command = [sys.executable, __file__, "--inside", str(home / "settings.json")]
        ended = run_capped(
            command, options.cap, LIMIT, {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        )
        if not ended.good:
            print(f"the child {ended}; {format_bytes(ended.peak)} at most", file=sys.stderr)
            return 1
        result = read_result(home / "result.json")
    found = checks(result, hardware, options.cap, ended.peak, options.activations == "disk")
    show(result, settings, found)
    return 0 if all(check.good or (check.timed and options.lenient) for check in found) else 1


if __name__ == "__main__":
    sys.exit(main())
