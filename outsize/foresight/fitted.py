"""The constants that ship: fitted on the package's table, with each publication left out in turn.

A forecast of a row takes those fitted without its own publication where that is asked, so that it
follows from the other publications alone, whatever the table that is scored has in its measured
columns. `refit` makes them anew (tools/accuracy.py writes the file and checks it).

A second hold-out cuts the models of each publication in two by their names; constants of one half
forecast the other.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from outsize.foresight.constants import Array, Model, batch_of, tags_of
from outsize.foresight.fit import fit
from outsize.foresight.measured import seconds_of
from outsize.foresight.runs import Run, data, shipped
from outsize.foresight.step import Terms, terms

FILE = "constants.json"
DIGITS = 4
HALVES = ("half of the models", "the other half")
INSIDE = 0.9  # of rows lie in their interval
RANK_ONLY = ("V100",)  # devices whose published times are noisy by 40%


@dataclass(frozen=True)
class Fitted:
    """Constants by name (logarithms), and what a forecast may be off: the 0.9 quantile of
    absolute errors (logarithms) that other publications had, each held out and one voice; far,
    where nobody has published runs of the device and precision: with the largest of one of them."""

    values: Mapping[str, float]
    reach: float
    far: float


@cache
def fitted(left_out: str = "") -> Fitted:
    """Those of the file, without what is named: a publication that the table has, or half of the
    models."""
    every = _file()
    found = every.get(left_out, every[""])
    return Fitted(found["values"], found["reach"], found["far"])


@cache
def _file() -> Mapping[str, Any]:
    read: Mapping[str, Any] = json.loads(data(FILE))
    return read


def terms_of(run: Run) -> Terms:
    """Terms of a row that can be forecast."""
    assert run.shape is not None and run.layout is not None and run.cluster is not None
    return terms(run.shape, run.layout, run.cluster)


def seconds_with(runs: list[Run], made: list[Terms], values: Mapping[str, float]) -> Array:
    """Seconds of a step of each row, with constants by name."""
    batch = batch_of(made, [tags_of(run) for run in runs])
    model = Model.of(batch)
    total: Array = model.seconds(batch, model.read(values)).total
    return total


def refit() -> dict[str, dict[str, object]]:
    """Everything that the file has."""
    runs = [run for run in shipped() if not run.missing and seconds_of(run) is not None]
    made = [terms_of(run) for run in runs]
    names = list(dict.fromkeys(run.source.name for run in runs))
    whole = without("", runs, made)
    values = {"": whole} | {name: without(name, runs, made, whole) for name in (*names, *HALVES)}
    errors = {}
    for name in names:
        mine = [i for i, run in enumerate(runs) if run.source.name == name]
        held = [runs[i] for i in mine]
        if any(run.device.startswith(RANK_ONLY) for run in held):
            continue
        made_of = np.log(seconds_with(held, [made[i] for i in mine], values[name]))
        errors[name] = np.abs(made_of - np.log([seconds_of(run) or 1.0 for run in held]))
    found = {}
    for name, known in values.items():
        reach = reach_of(errors, name)
        far = math.hypot(reach, _most(errors, name))
        found[name] = {
            "values": known, "reach": round(reach, DIGITS), "far": round(far, DIGITS),
        }  # fmt: skip
    return found


def without(
    name: str, runs: list[Run], made: list[Terms], start: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Constants of all rows but those of a publication or of half of the models. start: those of
    all, where they are known."""
    kept = [i for i, run in enumerate(runs) if name not in (run.source.name, half(run))]
    batch = batch_of([made[i] for i in kept], [tags_of(runs[i]) for i in kept])
    model = Model.of(batch)
    measured = np.array([seconds_of(runs[i]) or 1.0 for i in kept])
    begin = None if start is None else model.read(start)
    found = fit(model, batch, measured, [runs[i].source.name for i in kept], begin)
    return {key: round(float(value), DIGITS) for key, value in zip(model.names, found, strict=True)}


def half(run: Run) -> str:
    """Which half of the models a row is of."""
    return HALVES[zlib.crc32(f"{run.source.name} {run.model}".encode()) % 2]


def reach_of(errors: Mapping[str, Array], name: str) -> float:
    """What 0.9 of the rows of the other publications lie within, each publication one voice: a new
    one is as any of them."""
    others = [found for key, found in errors.items() if key != name]
    every, voice = np.concatenate(others), [np.full(len(one), 1 / len(one)) for one in others]
    order = np.argsort(every)
    heard = np.cumsum(np.concatenate(voice)[order])
    return float(every[order][np.searchsorted(heard, INSIDE * len(others))])


def _most(errors: Mapping[str, Array], name: str) -> float:
    """The largest 0.9 quantile of another publication."""
    return max(float(np.quantile(found, INSIDE)) for key, found in errors.items() if key != name)
