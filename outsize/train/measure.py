"""Measuring while training: the ledger on few steps, the clock on the others; predicted beside it.

Counting bytes costs time in every operator, so the ledger looks at one early and one later step,
and times come from the steps that it does not look at. Under a budget it stays on, for it is what
raises, but for a few steps by the clock behind the first one, which did not raise.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.table import Table

from outsize.collectives import World, everyone
from outsize.memory import Meter, format_bytes
from outsize.report import write_timeline
from outsize.runtime import Report
from outsize.runtime.job import Job
from outsize.screen import table
from outsize.simulate import Forecast
from outsize.simulate.forecast import RankForecast
from outsize.simulate.rescaled import lanes
from outsize.trace import Trace, laid_out, write_perfetto
from outsize.trace import write as write_trace
from outsize.trace.gather import gathered
from outsize.train.progress import resident
from outsize.train.show import time_of

LATER = 10  # steps after the first that are counted again
PARTED = 16  # steps by the clock whose lanes are told apart
CLOCKED = 3  # steps after the first that are not counted, whatever the budget
PAGE, PERFETTO = "timeline.html", "trace.json"
PREDICTED, MEASURED = "predicted.json", "measured.json"


@dataclass
class Measure:
    """What the steps of one process were measured to hold and take.

    ledger: what counts, from before the job was made. first, stop: the steps of this process.
    """

    ledger: Meter
    first: int
    stop: int
    peak: int = 0  # bytes, of the steps that were counted
    times: list[float] = field(default_factory=list)  # seconds, of those that were not
    slow: list[float] = field(default_factory=list)  # seconds, of those that were
    lanes: list[Mapping[str, float]] = field(default_factory=list)  # of the first of `times`
    trace: Trace | None = None
    peaks: tuple[int, ...] = ()  # by place of the pipeline axis

    def watch(self, job: Job, step: int) -> bool:
        """Put the ledger on a job for this step, or take it off; gives whether it is on."""
        done, steps = step - self.first, self.stop - self.first
        if self.ledger.budget is None:
            on = done == 0 or (steps > 2 and done == min(LATER, steps // 2))
        else:
            on = not 1 <= done <= CLOCKED
        job.ledger = self.ledger if on else None
        return on

    def add(self, report: Report, counted: bool) -> None:
        """Book a step."""
        if not counted:
            self.times.append(report.seconds)
            if len(self.times) <= PARTED:
                self.lanes.append(lanes(report.trace))
            return
        self.slow.append(report.seconds)
        self.peak = max(self.peak, report.trace.peak())
        self.trace = report.trace

    def agree(self, world: World, device: torch.device) -> None:
        """Take the peak of the worker with the highest, which is what is predicted, and of each
        place of the pipeline axis. Every worker calls it."""
        peaks = torch.zeros(world.mesh.pipeline, dtype=torch.float64, device=device)
        peaks[world.mesh.index("pipeline", world.rank)] = self.peak
        self.peaks = tuple(map(int, everyone(world).all_reduce(peaks, "max").tolist()))
        self.peak = max(self.peaks)

    @property
    def seconds(self) -> float:
        """The middle step's time; of counted steps where there are no others."""
        return statistics.median(self.times or self.slow)

    def write(
        self, directory: Path, forecast: Forecast, title: str, world: World, device: torch.device
    ) -> None:
        """The step that was counted last, of all workers, under the predicted one: as page, for
        Perfetto, and for `outsize trace diff`. Every worker calls it; rank 0 writes. device: where
        tensors are that workers send one another."""
        if self.trace is None:
            return
        predicted = _predicted(forecast.trace, world, device)
        measured = gathered(world, self.trace, device)
        if predicted is None or measured is None:
            return
        both = [replace(trace, meta={"model": title}) for trace in (predicted, measured)]
        for trace, name in zip(both, (PREDICTED, MEASURED), strict=True):
            write_trace(trace, directory / name)
        budget = self.ledger.budget
        write_timeline(directory / PAGE, *both, budget=budget, title=f"One step of {title}")
        write_perfetto(directory / PERFETTO, *both)

    def record(self, forecast: Forecast) -> dict[str, float | int]:
        """Predicted and measured, for the metrics; of a pipeline's workers each, too."""
        each = {
            f"{name}_peak_bytes_{place}": peak
            for place, turn, measured in self._turns(forecast)
            for name, peak in (("predicted", turn.peak), ("measured", measured))
        }
        return each | {
            "predicted_peak_bytes": forecast.peak,
            "measured_peak_bytes": self.peak,
            "predicted_step_seconds": forecast.seconds,
            "measured_step_seconds": self.seconds,
        }

    def _turns(self, forecast: Forecast) -> Iterator[tuple[int, RankForecast, int]]:
        """Places of the pipeline axis, as predicted and with their peaks; none where there is no
        pipeline."""
        for place, (turn, peak) in enumerate(zip(forecast.ranks, self.peaks, strict=False)):
            yield place, turn, peak

    def table(self, forecast: Forecast) -> Table:
        """Predicted against measured."""
        made = table("", "predicted", "measured", "difference")
        peaks = (format_bytes(forecast.peak), format_bytes(self.peak))
        made.add_row("peak memory", *peaks, _difference(self.peak, forecast.peak))
        for place, turn, peak in self._turns(forecast):
            both = (format_bytes(turn.peak), format_bytes(peak))
            made.add_row(f"  of worker {place}", *both, _difference(peak, turn.peak))
        times = (time_of(forecast.seconds), time_of(self.seconds))
        note = "" if self.times else " (counting bytes, which is slower)"
        made.add_row("step time", *times, _difference(self.seconds, forecast.seconds) + note)
        _, most = resident()
        made.add_row(
            "resident memory", "-", format_bytes(most), "whole process, with Python and PyTorch"
        )
        return made


def _predicted(trace: Trace, world: World, device: torch.device) -> Trace | None:
    """What was predicted of all workers, on rank 0. A forecast of one worker is that of the worker
    that has it; one of several is of all, or of one worker of each pipeline stage."""
    mesh, count = world.mesh, len(trace.workers)
    if count < 2:
        return gathered(world, trace, device)
    if count == mesh.size:
        return trace
    return laid_out(trace, [mesh.index("pipeline", rank) for rank in range(mesh.size)])


def _difference(measured: float, predicted: float) -> str:
    return f"{(measured / predicted - 1) * 100:+.1f}%" if predicted else "-"
