"""Measuring while training: the ledger on few steps, the clock on the others; foretold beside it.

Counting bytes costs time in every operator, so the ledger looks at one early and one later step,
and times come from the steps that it does not look at. Under a budget it stays on: it is what
raises.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.table import Table

from outsize.memory import Meter, format_bytes
from outsize.report import write_timeline
from outsize.runtime import Job, Report
from outsize.simulate import Forecast
from outsize.trace import Trace, write_perfetto
from outsize.train.progress import resident
from outsize.train.show import time_of

LATER = 10  # steps after the first that are counted again
PAGE, PERFETTO = "timeline.html", "trace.json"


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
    trace: Trace | None = None

    def watch(self, job: Job, step: int) -> bool:
        """Put the ledger on a job for this step, or take it off; gives whether it is on."""
        later = self.first + min(LATER, (self.stop - self.first) // 2)
        on = self.ledger.budget is not None or step in (self.first, later)
        job.ledger = self.ledger if on else None
        return on

    def add(self, report: Report, counted: bool) -> None:
        """Book a step."""
        if not counted:
            self.times.append(report.seconds)
            return
        self.slow.append(report.seconds)
        self.peak = max(self.peak, report.trace.peak())
        self.trace = report.trace

    @property
    def seconds(self) -> float:
        """The middle step's time; of counted steps where there are no others."""
        return statistics.median(self.times or self.slow)

    def write(self, directory: Path, forecast: Forecast, title: str) -> None:
        """The step that was counted last, under the foretold one, as page and for Perfetto."""
        if self.trace is None:
            return
        meta = {"model": title}
        both = [replace(trace, meta=meta) for trace in (forecast.trace, self.trace)]
        budget = self.ledger.budget
        write_timeline(directory / PAGE, *both, budget=budget, title=f"One step of {title}")
        write_perfetto(directory / PERFETTO, *both)

    def record(self, forecast: Forecast) -> dict[str, float | int]:
        """Foretold and measured, for the metrics."""
        return {
            "foretold_peak_bytes": forecast.peak,
            "measured_peak_bytes": self.peak,
            "foretold_step_seconds": forecast.seconds,
            "measured_step_seconds": self.seconds,
        }

    def table(self, forecast: Forecast) -> Table:
        """Foretold against measured."""
        table = Table("", "foretold", "measured", "difference", box=None, pad_edge=False)
        peaks = (format_bytes(forecast.peak), format_bytes(self.peak))
        table.add_row("peak memory", *peaks, _difference(self.peak, forecast.peak))
        times = (time_of(forecast.seconds), time_of(self.seconds))
        note = "" if self.times else " (counting bytes, which is slower)"
        table.add_row("step time", *times, _difference(self.seconds, forecast.seconds) + note)
        _, most = resident()
        table.add_row(
            "resident memory", "-", format_bytes(most), "whole process, with Python and PyTorch"
        )
        return table


def _difference(measured: float, foretold: float) -> str:
    return f"{(measured / foretold - 1) * 100:+.1f}%" if foretold else "-"
