"""Foretold against measured: what runs on this machine took, and what it says of the next one.

Every run of several steps adds a line for each forecast that it had (from the machine's rates, and
from blocks that were timed) to `history.jsonl` in the user's cache directory. The next forecast of
the same kind on the same machine is corrected by that: where this very plan has run before, by what
its steps took; else, lane by lane, by what lanes of others took. Which plan is chosen never depends
on it, nor do forecasts for hardware that is declared.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Literal

import torch

from outsize import typed
from outsize.errors import OutsizeError, counted
from outsize.hardware.probe import user_cache
from outsize.plan import to_yaml
from outsize.runtime.method import method_of
from outsize.simulate.rescaled import by_lane, by_step, lanes
from outsize.texts import write_text
from outsize.train.setup import Setup

By = Literal["rates", "blocks"]
Both = tuple[float, float]  # foretold, measured
NAME = "history.jsonl"
LARGEST = 1 << 20  # bytes of the file, of which the newer half is kept then
LEAST = 2  # steps by the clock that are kept
LAST = 10  # runs that a correction is learned from
DOUBT = {True: 0.5, False: 2.0}  # runs of nothing off that count beside those of this plan, others
MOST = 4.0  # times longer, or shorter, that a correction makes a forecast at most


@dataclass(frozen=True)
class Entry:
    """One forecast of a run and what was measured. like: of the plan, model and threads; seconds:
    of a step; bytes: of the peak; lanes: seconds of a step in which each is at work; output: the
    run's directory."""

    date: str
    machine: str
    model: str
    mesh: str
    precision: str
    like: str
    by: By
    steps: int
    seconds: Both
    bytes: tuple[int, int]
    lanes: Mapping[str, Both]
    output: str

    def __post_init__(self) -> None:
        if not all(0 < value < math.inf for value in (*self.seconds, *self.bytes)):
            raise OutsizeError(f"history: seconds {self.seconds}, bytes {self.bytes}; expected > 0")


@dataclass(frozen=True)
class Learned:
    """A correction, and why."""

    step: float  # factor of a step, where `lanes` has none
    lanes: Mapping[str, float]
    said: str


# -- the file --------------------------------------------------------------------------------------


def where() -> Path:
    """The file of this person's runs."""
    return user_cache() / NAME


def append(entries: Iterable[Entry]) -> None:
    """Add entries; processes that do so at once come one after the other. A folder that cannot be
    written costs the next forecast its correction, which is no reason to fail a run."""
    text = "".join(json.dumps(typed.plain(entry)) + "\n" for entry in entries)
    with contextlib.suppress(OSError, OutsizeError), _alone() as path:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
        if path.stat().st_size > LARGEST:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
            write_text("".join(lines[len(lines) // 2 :]), path)


def read() -> tuple[list[Entry], int]:
    """(entries in the order of their runs, lines that are none)."""
    try:
        text = where().read_text(encoding="utf-8", errors="replace")
    except OSError:
        return [], 0
    found, wrong = list[Entry](), 0
    for line in text.splitlines():
        try:
            found.append(typed.read(Entry, json.loads(line), NAME))
        except (ValueError, RecursionError):
            wrong += 1
    return found, wrong


def clear() -> int:
    """Forget all; gives the entries that there were."""
    found, wrong = read()
    with contextlib.suppress(FileNotFoundError), _alone() as path:
        path.unlink()
    return len(found) + wrong


@contextlib.contextmanager
def _alone() -> Iterator[Path]:
    """The file, while no other process writes it."""
    path = where()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path


# -- of a run --------------------------------------------------------------------------------------


def noted(setup: Setup, by: By) -> Setup:
    """The setup, which knows what its forecast of this kind is; measured figures are those foretold
    until there are any."""
    made = setup.forecast
    entry = Entry(
        "",
        _machine(setup),
        setup.config.model.name,
        str(made.plan.mesh),
        str(made.plan.precision),
        _like(setup),
        by,
        0,
        (made.seconds, made.seconds),
        (made.peak, made.peak),
        {lane: (spent, spent) for lane, spent in lanes(made.trace).items()},
        "",
    )
    return replace(setup, foretold=(*setup.foretold, entry))


def record(setup: Setup, steps: Sequence[Mapping[str, float]], seconds: float, peak: int) -> None:
    """Keep what a run has measured. steps: by step, seconds of lanes; fewer than LEAST say little.
    seconds: of one in the middle; peak: bytes."""
    if len(steps) < LEAST or peak <= 0:
        return
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    output = str(Path(setup.config.output or ".").resolve())
    spent = {lane: median(step.get(lane, 0.0) for step in steps) for lane in steps[0]}
    made = (measured(entry, seconds, peak, spent) for entry in setup.foretold)
    append(replace(each, date=now, output=output, steps=len(steps)) for each in made)


def measured(entry: Entry, seconds: float, peak: int, spent: Mapping[str, float]) -> Entry:
    """The same with what was measured; lanes that only one of both has are left out."""
    return replace(
        entry,
        seconds=(entry.seconds[0], seconds),
        bytes=(entry.bytes[0], peak),
        lanes={
            lane: (before, spent[lane])
            for lane, (before, _) in entry.lanes.items()
            if spent.get(lane, 0.0) > 0
        },
    )


def corrected(setup: Setup) -> Setup:
    """The setup with its forecast corrected by runs before it, which `why` says."""
    made, mine = setup.forecast, setup.foretold[-1]
    found, wrong = read()
    known = learned(found, mine, not made.ranks and method_of(made.plan.approximate).rehearsed)
    if known is None:
        return setup
    again = by_lane(made, known.lanes) if known.lanes else by_step(made, known.step)
    left_out = f"; {counted(wrong, 'line')} of {where()} cannot be read" if wrong else ""
    reason = f"{known.said}; {made.seconds:.3g} s by {_BY[mine.by]}{left_out}"
    return replace(setup, forecast=replace(again, why=(*made.why, ("step time", reason))))


def learned(entries: Sequence[Entry], mine: Entry, single: bool) -> Learned | None:
    """What runs before say of a forecast; None where they say nothing. single: its lanes can be
    played anew."""
    near = [e for e in entries if (e.machine, e.by) == (mine.machine, mine.by)]
    same = [e for e in near if e.like == mine.like][-LAST:]
    if same:
        factor = _factor([e.seconds for e in same], DOUBT[True])
        said = f"{counted(len(same), 'run')} of this plan here: {factor:.2f} times as long"
        return Learned(factor, {}, said)
    others = [e for e in near if (e.mesh, e.precision) == (mine.mesh, mine.precision)][-LAST:]
    if not others:
        return None
    if not single:
        factor = _factor([e.seconds for e in others], DOUBT[False])
        said = f"{counted(len(others), 'run')} on {mine.mesh} here: {factor:.2f} times as long"
        return Learned(factor, {}, said)
    factors = {}
    for lane in mine.lanes:
        if pairs := [e.lanes[lane] for e in others if lane in e.lanes]:
            factors[lane] = _factor(pairs, DOUBT[False])
    if not factors:
        return None
    each = ", ".join(f"{lane} {factor:.2f}" for lane, factor in factors.items())
    return Learned(1.0, factors, f"{counted(len(others), 'other run')} here, times as long: {each}")


_BY: Mapping[By, str] = {"rates": "the machine's rates", "blocks": "timed blocks"}


def _factor(pairs: Sequence[Both], doubt: float) -> float:
    """How many times longer than foretold: the middle of logarithms, less where runs are few."""
    off = median(math.log(after / before) for before, after in pairs)
    factor = math.exp(off * len(pairs) / (len(pairs) + doubt))
    return min(MOST, max(1 / MOST, factor))


def _machine(setup: Setup) -> str:
    """What times depend on beside the plan."""
    device = setup.hardware.devices[0]
    threads = torch.get_num_threads()
    return f"{device.name} x {device.count}, {threads} threads, PyTorch {torch.__version__}"


def _like(setup: Setup) -> str:
    """A digest of what makes two runs take the same time."""
    plan = to_yaml(replace(setup.plan, budget=None))
    model = json.dumps(typed.plain(setup.subject.config), sort_keys=True, default=str)
    text = f"{plan}\n{model}\n{setup.config.optimizer.name}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
