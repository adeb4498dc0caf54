"""Steps of four workers predicted from what blocks take alone, beside the steps as they were."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from support.bench_parallel import Bench, Contest
from support.bench_pipeline import WORKERS, costs_of, cuts_of, ready
from support.figures_parallel import Verdict

from outsize.simulate.shared_cores import by_stage, predict
from outsize.trace import Trace, merged, read, write

FORECAST = "support.forecast_worker"
SCHEDULES = {"1f1b": 1, "gpipe": 1, "interleaved:2": 2, "zb-h1": 1, "zb-v": 2}  # stages a worker
NEAR = 0.1  # of the measured step
MESSAGE = 2e-4  # seconds between two workers of one machine


@dataclass(frozen=True)
class Predicted:
    """A schedule's step, predicted and measured. apart: how long it would take if every worker had
    a core of its own; paces: of a worker while 1, 2, ... compute."""

    schedule: str
    predicted: float
    apart: float
    measured: tuple[float, ...]
    paces: tuple[float, ...]

    @property
    def error(self) -> float:
        return self.predicted / median(self.measured) - 1


def show(
    bench: Bench, schedules: Sequence[str], microbatches: int, keep: Path | None
) -> list[Predicted]:
    """Some schedules, one after the other. keep: a folder for both traces of each."""
    found = []
    print("| schedule | predicted s | measured s | least | most | error | paces | own cores s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for schedule in schedules:
        one = _one(bench, schedule, microbatches, keep)
        found.append(one)
        paces = " ".join(f"{pace:.2f}" for pace in one.paces)
        print(
            f"| {schedule} | {one.predicted:.3f} | {median(one.measured):.3f} |"
            f" {min(one.measured):.3f} | {max(one.measured):.3f} | {one.error:+.1%} | {paces} |"
            f" {one.apart:.3f} |",
            flush=True,
        )
    return found


def _one(bench: Bench, schedule: str, microbatches: int, keep: Path | None) -> Predicted:
    plain = bench.task(Contest("", ""))
    cuts = cuts_of(costs_of(plain.config), SCHEDULES[schedule], schedule.endswith("-v"))
    task = replace(plain, pipeline=WORKERS, schedule=schedule, microbatches=microbatches, cuts=cuts)
    with ready(bench, {FORECAST: task}) as (world,):
        for number in range(bench.steps):
            world.step(number)
        world.end()
    lists = [
        pickle.loads((bench.folder / f"schedule-{rank}.pickle").read_bytes())
        for rank in range(WORKERS)
    ]
    known = {
        (label, stage): seconds
        for label, stage, seconds in json.loads((bench.folder / "durations.json").read_text())
    }
    paces = tuple(json.loads((bench.folder / "paces.json").read_text()))
    seconds = by_stage(known, lists, MESSAGE)
    traces = [_measured(bench.folder, step) for step in range(bench.warm, bench.steps)]
    told = predict(lists, seconds, paces)
    if keep is not None:
        _keep(keep, schedule, told, traces)
    apart = predict(lists, seconds).span()
    return Predicted(schedule, told.span(), apart, tuple(t.span() for t in traces), paces)


def _measured(folder: Path, step: int) -> Trace:
    return merged([read(folder / f"trace-{step}-{rank}.json") for rank in range(WORKERS)])


def _keep(folder: Path, schedule: str, told: Trace, traces: Sequence[Trace]) -> None:
    """The forecast, and the step that is the median."""
    folder.mkdir(parents=True, exist_ok=True)
    name = schedule.replace(":", "-")
    middle = sorted(traces, key=Trace.span)[len(traces) // 2]
    write(told, folder / f"{name}-predicted.json")
    write(middle, folder / f"{name}-measured.json")


def forecast_verdicts(found: Sequence[Predicted]) -> Iterator[Verdict]:
    """Within NEAR of the measured median, each."""
    for one in found:
        yield Verdict(
            abs(one.error) <= NEAR,
            f"{one.schedule}: predicted {one.predicted:.3f} s, measured {median(one.measured):.3f}"
            f" s, {one.error:+.1%} of {NEAR:.0%}",
        )
