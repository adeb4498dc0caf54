"""Accuracy on a table of published runs: errors, choices and verdicts together, by publication.

Low error alone certifies nothing: a sweep's rank correlation and the regret of choosing by forecast
say whether a planner would choose well, out-of-memory labels whether its choice would run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from outsize.foresight.fitted import RANK_ONLY, fitted, seconds_with, terms_of
from outsize.foresight.given import corrected
from outsize.foresight.layout import NARROW
from outsize.foresight.measured import bytes_of, seconds_of
from outsize.foresight.memory import Memory, fits, memory
from outsize.foresight.runs import MEMORY, Run, shipped

SWEEP = 5  # runs that make a rank


@dataclass(frozen=True)
class Row:
    """A row that can be forecast. seconds, low, high: of a step."""

    run: Run
    seconds: float
    low: float
    high: float
    memory: Memory
    fits: bool

    @property
    def measured(self) -> float | None:
        return seconds_of(self.run)

    @property
    def error(self) -> float | None:
        """Of the step time, as a part of what was measured."""
        found = self.measured
        return None if found is None else self.seconds / found - 1

    @property
    def rate(self) -> float:
        """Tokens a second of one device."""
        assert self.run.layout is not None
        return _tokens(self) / self.seconds / self.run.layout.devices

    @property
    def bytes(self) -> float:
        """As its publication counts them."""
        run, made = self.run, self.memory
        if run.metric == "act_mem_gib_per_gpu":
            return made.activations
        if run.metric == "params_opt_mem_gib_per_gpu":
            return sum(made.states.values())
        return made.counted(run.source.memory)

    @property
    def known(self) -> bool:
        """Whether its device and precision occur in another publication."""
        return known(self.run)


@dataclass(frozen=True)
class Score:
    """Figures of some rows; None where nothing was measured that they are of."""

    rows: int
    timed: int
    mape: float | None
    bias: float | None
    rank: float | None
    regret: float | None
    oom_precision: float | None
    oom_recall: float | None
    memory_mape: float | None
    inside: float | None


@dataclass(frozen=True)
class Report:
    """A table's forecasts, the rows that have none or were given, and the scores."""

    rows: Sequence[Row]
    missing: Sequence[Run]
    whole: Score
    sources: Mapping[str, Score]
    given: Sequence[Row] = ()


def report(runs: Sequence[Run], each_out: bool = False, given: int = 0) -> Report:
    """Forecast and score a table. each_out: with constants fitted without a row's publication;
    given: so many measured runs of each source correct the forecasts of its others."""
    left_out = (lambda run: run.source.name) if each_out else (lambda _: "")
    rows = forecasts([run for run in runs if not run.missing], left_out)
    known: list[Row] = []
    if given:
        rows, known = corrected(rows, given)
    names = list(dict.fromkeys(run.source.name for run in runs))
    sources = {name: score([r for r in rows if r.run.source.name == name]) for name in names}
    missing = [run for run in runs if run.missing]
    return Report(rows, missing, score(rows), sources, known)


def forecasts(runs: Sequence[Run], left_out: Callable[[Run], str]) -> list[Row]:
    """Of rows that can be forecast, in their order. left_out: what their constants do not know."""
    made = [terms_of(run) for run in runs]
    names = [left_out(run) for run in runs]
    seconds, reach = np.zeros(len(runs)), np.zeros(len(runs))
    for name in dict.fromkeys(names):
        mine = [i for i, other in enumerate(names) if other == name]
        with_ = fitted(name)
        seconds[mine] = seconds_with([runs[i] for i in mine], [made[i] for i in mine], with_.values)
        reach[mine] = [with_.reach if known(runs[i]) else with_.far for i in mine]
    found = []
    for run, value, off in zip(runs, seconds, reach, strict=True):
        assert run.shape is not None and run.layout is not None and run.cluster is not None
        held = memory(run.shape, run.layout)
        low, high = value * math.exp(-off), value * math.exp(off)
        ok = fits(held, run.cluster.groups[0])
        found.append(Row(run, float(value), float(low), float(high), held, ok))
    return found


# -- figures ---------------------------------------------------------------------------------------


def score(rows: Sequence[Row]) -> Score:
    """The figures of rows."""
    timed = [row for row in rows if row.error is not None]
    scored = [row for row in timed if not row.run.device.startswith(RANK_ONLY)]
    errors = [row.error or 0.0 for row in scored]
    held = [row for row in rows if row.run.metric in MEMORY and bytes_of(row.run)]
    ranks, regrets = _choices(timed)
    precision, recall = _verdicts(rows)
    return Score(
        rows=len(rows),
        timed=len(timed),
        mape=_mean(map(abs, errors)),
        bias=_mean(errors),
        rank=_mean(ranks),
        regret=_mean(regrets),
        oom_precision=precision,
        oom_recall=recall,
        memory_mape=_mean(abs(row.bytes / (bytes_of(row.run) or 1.0) - 1) for row in held),
        inside=_mean(float(r.low <= (r.measured or 0.0) <= r.high) for r in scored),
    )


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None


def _choices(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Of each sweep, the rank correlation of measured and forecast seconds a token, and by what the
    run that is forecast to be the fastest is slower than the fastest."""
    sweeps: dict[Any, dict[Any, list[Row]]] = {}
    for row in rows:
        same = sweeps.setdefault(row.run.sweep, {})
        same.setdefault((row.run.shape, row.run.layout), []).append(row)
    ranks, regrets = [], []
    for runs in sweeps.values():
        if len(runs) < SWEEP:
            continue
        tokens = [_tokens(each[0]) for each in runs.values()]
        measured = [
            (_mean(row.measured or 0.0 for row in each) or 0.0) / count
            for each, count in zip(runs.values(), tokens, strict=True)
        ]
        made = [each[0].seconds / n for each, n in zip(runs.values(), tokens, strict=True)]
        ranks.append(rank_correlation(made, measured))
        regrets.append(measured[int(np.argmin(made))] / min(measured) - 1)
    return ranks, regrets


def _tokens(row: Row) -> float:
    assert row.run.layout is not None
    return float(row.run.layout.batch * row.run.layout.sequence)


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's, ties sharing their ranks; 0 where one of them is constant."""
    a, b = _ranks(one), _ranks(other)
    if a.std() == 0 or b.std() == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: Sequence[float]) -> Any:
    order = np.asarray(values)
    return np.array([(order < v).sum() + ((order == v).sum() - 1) / 2 for v in order])


def _verdicts(rows: Sequence[Row]) -> tuple[float | None, float | None]:
    """(precision, recall) of saying that memory runs out, over distinct runs of publications that
    have said so of some of theirs. Rows that do not say what is computed again are left out."""
    labels: dict[Any, tuple[bool, bool]] = {}
    telling = {row.run.source.name for row in rows if row.run.metric == "oom" and row.run.value}
    for row in rows:
        run = row.run
        assert run.layout is not None
        told = run.metric == "oom" and run.value is not None
        ran = not told and row.measured is not None
        if run.source.name not in telling or "recompute" in run.layout.assumed:
            continue
        if told or ran:
            before = labels.get(key := (run.shape, run.layout, run.device), (False, False))[0]
            labels[key] = (before or bool(told and run.value), not row.fits)
    right = sum(out and said for out, said in labels.values())
    said = sum(said for _, said in labels.values())
    out = sum(out for out, _ in labels.values())
    return (right / said if said else None), (right / out if out else None)


# -- bars ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """A figure, what it must be, and whose it is."""

    what: str
    value: float
    bound: float
    under: bool

    @property
    def missed(self) -> bool:
        return not (self.value < self.bound if self.under else self.value > self.bound)

    def said(self) -> str:
        sign = "under" if self.under else "over"
        return f"{self.what}: {self.value:.3f}, expected {sign} {self.bound:g}"


def bars(made: Report) -> list[Bar]:
    """The bars of issue 16, of the figures that the table has."""
    mine = [row for row in made.rows if row.known]
    others = [row for row in made.rows if not row.known]
    found: list[Bar] = []

    def add(what: str, value: float | None, bound: float, under: bool = True) -> None:
        if value is not None:
            found.append(Bar(what, value, bound, under))

    add("step time, where device and precision occur elsewhere", score(mine).mape, 0.06)
    for name in made.sources:
        own = score([row for row in mine if row.run.source.name == name])
        add(f"step time, {name}", own.mape, 0.10)
    add("step time, elsewhere", score(others).mape, 0.06 if made.given else 0.12)
    add("inside their interval, elsewhere", score(others).inside, 0.9, under=False)
    whole = made.whole
    add("rank within sweeps", whole.rank, 0.9, under=False)
    add("regret within sweeps", whole.regret, 0.01)
    add("out-of-memory recall", whole.oom_recall, 0.98, under=False)
    add("out-of-memory precision", whole.oom_precision, 0.95, under=False)
    add("memory", whole.memory_mape, 0.08)
    return found


def worst(rows: Sequence[Row], count: int = 10) -> list[Row]:
    """The rows whose step times are furthest off."""
    timed = [row for row in rows if row.error is not None]
    key: Callable[[Row], float] = lambda row: -abs(math.log1p(row.error or 0.0))  # noqa: E731
    return sorted(timed, key=key)[:count]


def known(run: Run) -> bool:
    """Whether another publication has step times of a row's device and precision."""
    return any(name != run.source.name for name in _where().get(_class(run), ()))


def published(device: str, precision: str) -> bool:
    """Whether any publication has step times of a device and precision."""
    return bool(_where().get(_kind(device, precision)))


def _class(run: Run) -> tuple[str, str]:
    assert run.layout is not None
    return _kind(run.device, run.layout.precision)


def _kind(device: str, precision: str) -> tuple[str, str]:
    """A device as publications call it, and the bits of its products."""
    named = next((f for f in ("A100", "H100", "V100") if device.startswith(f)), device)
    return named, {"nvfp4": "4"}.get(precision, "8" if precision in NARROW else "16")


@cache
def _where() -> Mapping[tuple[str, str], set[str]]:
    """By device and precision, the publications that have measured step times."""
    found: dict[tuple[str, str], set[str]] = {}
    for run in shipped():
        if not run.missing and seconds_of(run) is not None:
            found.setdefault(_class(run), set()).add(run.source.name)
    return found
