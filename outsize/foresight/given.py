"""Forecasts corrected by a few measured runs of the same source: a Gaussian process over runs.

What a forecast is off, in logarithms, has parts that runs share: of their publication, of its
source (as the table names it: one release of a container, one section of a log), of the model, of
dense or routed layers, of the device, of the precision. Its covariance is the sum of the parts
that two runs share; the runs that are given say what these parts are, each as far as it can
(Rasmussen and Williams, Gaussian processes for machine learning, 2006, 2.2). Where others have
published runs of a device and precision, the shared parts are known better beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from outsize.foresight.constants import Array
from outsize.foresight.runs import Run
from outsize.foresight.shape import Shape

if TYPE_CHECKING:
    from outsize.foresight.score import Row

# Deviations of logarithms: of the parts, and of what a run has for itself.
PARTS = {
    "publication": 0.05, "source": 0.05, "model": 0.2, "layers": 0.1, "device": 0.05,
    "precision": 0.1,
}  # fmt: skip
OWN = 0.22
KNOWN = 0.35  # of the parts' deviations, where others have published runs of device and precision
ALIKE = 0.99  # of the best gain: as good
WITHIN = 1.645  # deviations that nine of ten lie within


def corrected(rows: Sequence[Row], count: int) -> tuple[list[Row], list[Row]]:
    """(rows that are forecast, with what `count` runs of their source have taught; the rows of
    these). A source without more measured runs than that stays as it is."""
    made: dict[int, Row] = {}
    given: set[int] = set()
    for mine in sources(rows, count):
        known = chosen(mine, count)
        if known:
            for row, better in zip(mine, _taught(mine, known), strict=True):
                made[id(row)] = better
            keys = {_key(each[0].run) for each in known}
            given |= {id(r) for r in mine if r.measured is not None and _key(r.run) in keys}
    return (
        [made.get(id(row), row) for row in rows if id(row) not in given],
        [row for row in rows if id(row) in given],
    )


def sources(rows: Sequence[Row], count: int) -> list[list[Row]]:
    """Rows by source: as the table names it where that has more than `count` measured runs, the
    others of a publication together."""
    tables: dict[str, list[Row]] = {}
    for row in rows:
        tables.setdefault(row.run.table, []).append(row)
    found: dict[str, list[Row]] = {}
    for name, mine in tables.items():
        own = bool(chosen(mine, count))
        found.setdefault(name if own else mine[0].run.source.name, []).extend(mine)
    return list(found.values())


def chosen(rows: Sequence[Row], count: int) -> list[list[Row]]:
    """The measured rows of `count` runs, by the forecasts alone: each the one that leaves least to
    be learnt of all; of those that are as good, the one in the middle by device-seconds a token.
    None where there are no more."""
    runs: dict[Any, list[Row]] = {}
    for row in rows:
        if row.measured is not None:
            runs.setdefault(_key(row.run), []).append(row)
    if len(runs) <= count:
        return []
    order = sorted(runs.values(), key=lambda each: (-each[0].rate, each[0].run.line))
    first = [each[0].run for each in order]
    left, found = covariance(first, first), list[int]()
    for _ in range(count):
        gain = (left**2).sum(0) / (np.diag(left) + OWN**2)
        gain[found] = 0.0
        good = np.flatnonzero(gain >= ALIKE * gain.max())
        best = int(good[len(good) // 2])
        left = left - np.outer(left[:, best], left[best]) / (left[best, best] + OWN**2)
        found.append(best)
    return [order[i] for i in found]


def _taught(rows: Sequence[Row], known: Sequence[Sequence[Row]]) -> list[Row]:
    """Rows as the known runs let expect them."""
    first, part = [each[0].run for each in known], _left(rows)
    mine = _left([each[0] for each in known])
    off = np.array(
        [np.mean([math.log(row.measured or 1.0) for row in each]) - math.log(each[0].seconds)
         for each in known]
    )  # fmt: skip
    among = covariance(first, first) * np.outer(mine, mine) + OWN**2 * np.eye(len(first))
    across = covariance([row.run for row in rows], first) * np.outer(part, mine)
    weights = np.linalg.solve(among, across.T).T
    mean = weights @ off
    whole = sum(deviation**2 for deviation in PARTS.values())
    left = part**2 * whole + OWN**2 - (weights * across).sum(1)
    found = []
    for row, shift, variance in zip(rows, mean.tolist(), left.tolist(), strict=True):
        seconds, reach = row.seconds * math.exp(shift), WITHIN * math.sqrt(variance)
        found.append(
            replace(row, seconds=seconds, low=seconds * math.exp(-reach),
                    high=seconds * math.exp(reach))
        )  # fmt: skip
    return found


def _left(rows: Sequence[Row]) -> Array:
    """Of each row, the part of the deviations that is not known beforehand."""
    return np.array([KNOWN if row.known else 1.0 for row in rows])


def covariance(runs: Sequence[Run], others: Sequence[Run]) -> Array:
    """Of what two runs' forecasts are off."""
    found = np.zeros((len(runs), len(others)))
    for part, deviation in PARTS.items():
        mine = np.array([_shared(run)[part] for run in runs])
        theirs = np.array([_shared(run)[part] for run in others])
        found += deviation**2 * (mine[:, None] == theirs[None, :])
    return found


def _shared(run: Run) -> dict[str, str]:
    assert run.layout is not None and run.shape is not None
    return {
        "publication": run.source.name,
        "source": run.table,
        "model": run.model.partition("(")[0].strip(),
        "layers": _sort(run.shape),
        "device": run.device,
        "precision": run.layout.precision,
    }


def _sort(shape: Shape) -> str:
    if shape.parts.recurring:
        return "recurrent"
    return "routed" if shape.experts else "dense"


def _key(run: Run) -> Any:
    return run.shape, run.layout, run.device
