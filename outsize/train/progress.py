"""How a run shows where it is: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Column

from outsize.memory import format_bytes
from outsize.screen import say

LINE_SECONDS = 5.0  # between lines where there is no terminal
SMOOTH = 0.1  # weight of the newest step in what is shown of speed


@dataclass(frozen=True)
class Status:
    """After a step. now and peak: bytes of memory; left: seconds; moved: bytes between tiers."""

    step: int
    loss: float
    tokens_per_second: float
    now: int
    peak: int
    left: float
    moved: int = 0

    def lines(self) -> tuple[str, str]:
        """As a person reads it: how it goes, what it holds. Each fits beside a bar."""
        return (
            f"loss {self.loss:.3f}  {self.tokens_per_second:,.0f} tokens/s"
            f"  {duration(self.left)} left",
            f"memory {format_bytes(self.now)}, peak {format_bytes(self.peak)}{self._moved()}",
        )

    def _moved(self) -> str:
        return f", {format_bytes(self.moved)} moved" if self.moved else ""


@contextmanager
def progress(console: Console, steps: int, done: int) -> Iterator[Progress]:
    """The way to show `steps` steps of which `done` are done."""
    if not console.is_terminal:
        yield _Lines(console, steps)
        return
    columns = (
        TextColumn("step {task.completed}/{task.total}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True)),
    )
    with RichProgress(*columns, console=console, expand=True) as bar:
        yield _Bar(bar, steps, done)


class _Bar:
    def __init__(self, bar: RichProgress, steps: int, done: int) -> None:
        self._bar = bar
        self._task = bar.add_task("train", total=steps, completed=done, text="")

    def update(self, status: Status) -> None:
        self._bar.update(self._task, completed=status.step, text="\n".join(status.lines()))

    def say(self, text: str) -> None:
        say(self._bar.console, text)


class _Lines:
    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps, self._next = console, steps, 0.0

    def update(self, status: Status) -> None:
        now = time.monotonic()
        if now >= self._next or status.step == self._steps:
            self._next = now + LINE_SECONDS
            self.say(f"step {status.step}/{self._steps}  {'  '.join(status.lines())}")

    def say(self, text: str) -> None:
        say(self._console, text)


Progress = _Bar | _Lines  # what `progress` gives: a step's status, and lines of their own


class Speed:
    """Tokens a second and seconds left, smoothed over the steps that nothing slowed."""

    def __init__(self) -> None:
        self._seconds = 0.0  # of a step
        self._tokens = 0
        self._rough = True

    def add(self, seconds: float, tokens: int, slowed: bool) -> None:
        """Book a step; one that was slowed counts only until there is another."""
        self._tokens = tokens
        if slowed and not self._rough:
            return
        weight = 1.0 if self._rough else SMOOTH
        self._seconds += weight * (seconds - self._seconds)
        self._rough = slowed

    @property
    def tokens_per_second(self) -> float:
        return self._tokens / self._seconds if self._seconds else 0.0

    def left(self, steps: int) -> float:
        return steps * self._seconds


def resident() -> tuple[int, int]:
    """(bytes of this process in memory now, and at its peak so far)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024
    now = psutil.Process().memory_info().rss
    return now, max(now, peak * unit)  # the kernel brings its peak up to date now and then only


def duration(seconds: float) -> str:
    """ "45 s", "2 min 05 s", "3 h 20 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
