"""A verdict as tables and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isfinite
from typing import Any

from rich.table import Table

from outsize.errors import counted
from outsize.memory import format_bytes
from outsize.screen import FIGURES, table
from outsize.verify.compare import LIMIT, Comparison, Row
from outsize.verify.generated import Spoken
from outsize.verify.handed import NARROW, Handed
from outsize.verify.many import Summary
from outsize.verify.planned import Sent
from outsize.verify.replay import Replayed
from outsize.verify.verify import Verdict

MOST = 5  # numbers that are beyond, in text


def parameters(found: Comparison, limit: float = LIMIT) -> Table:
    """By parameter: the ratio and the largest difference of the gradient, and of the weight."""
    made = table("parameter", "ratio", "gradient", "weight", "", right=slice(1, 4))
    for row in found.rows:
        bad = max(row.gradient, row.weight) > limit
        made.add_row(
            row.name, _ratio(row), f"{row.gradient:.1e}", f"{row.weight:.1e}",
            "differs" if bad else "",
        )  # fmt: skip
    return made


def _ratio(row: Row) -> str:
    return "-" if row.ratio is None else f"{row.ratio:.10g}"


def steps(found: Comparison) -> Table:
    """Loss and norm by step."""
    made = table("step", "loss", "plain", "norm", "plain", right=FIGURES)
    for index, (loss, norm) in enumerate(zip(found.losses, found.norms, strict=True)):
        made.add_row(str(index + 1), *(f"{number:.12g}" for number in (*loss, *norm)))
    return made


def lines(verdict: Verdict) -> Iterator[str]:
    """What there is to say below the tables."""
    yield from _bytes(verdict.sent)
    if verdict.own is not None and verdict.usual is not None:
        own, usual = verdict.own, verdict.usual
        yield (
            f"{own.precision}: from plain float64 the plan's gradients differ by"
            f" {own.gradient:.1e} at most, its weights by {own.weight:.1e}, its loss by"
            f" {own.loss:.1e}; plain PyTorch's by {usual.gradient:.1e}, {usual.weight:.1e},"
            f" {usual.loss:.1e}"
        )
        yield from _own(own, verdict)
    if verdict.unjudged:
        yield (
            f"{verdict.unjudged}: not judged, for a step that loss scaling skips has no twin in"
            " float64"
        )
    exact = verdict.exact
    if verdict.narrow:
        yield _narrow(verdict.narrow, verdict.limit)
    if exact.differ:
        yield f"workers {', '.join(map(str, exact.differ))} have other bits than worker 0"
    word = "holds" if verdict.holds else "does not hold"
    where = "" if verdict.device == "cpu" else f" on {verdict.device}"
    yield (
        f"float64{where}: {word}; the largest difference is {exact.worst:.1e}, {verdict.limit:g} is"
        f" allowed (loss {exact.loss:.1e}, norm {exact.norm:.1e}, gradients"
        f" {exact.gradient:.1e}, weights {exact.weight:.1e})"
    )


def _own(own: Comparison, verdict: Verdict) -> Iterator[str]:
    """What rounding explains of it."""
    bounds, over = verdict.bounds, verdict.over
    if bounds is None:
        return
    if own.differ:
        yield f"{own.precision}: workers {', '.join(map(str, own.differ))} have other bits than 0"
    if bounds.blind:
        yield (
            f"{own.precision}: rounding leaves too little of the gradient of"
            f" {', '.join(bounds.blind)} to judge it"
        )
    yield from (f"{own.precision}: {one}" for one in over[:MOST])
    if over[MOST:]:
        yield f"{own.precision}: and {len(over) - MOST} more"
    word = "does not hold" if over or own.differ else "holds"
    yield (
        f"{own.precision}: {word}; {len(over)} of {len(bounds.allowed)} numbers are farther from"
        " float64 than rounding brings a plain run"
    )


def _narrow(names: tuple[str, ...], limit: float) -> str:
    one, more = len(names) == 1, len(names) - 1
    who = f"{names[0]} computes" if one else f"{names[0]} and {more} more compute"
    return (
        f"{who} in float32 inside, whatever {'it is' if one else 'they are'} given, so that"
        f" {limit:g} is allowed instead of {LIMIT:g}: keep the type of the input to prove the rest"
    )


def _bytes(sent: Sent) -> Iterator[str]:
    formula = sent.formula
    if not (sent.network or sent.compute):
        return
    most = "" if formula.exact else "at most "
    between = f" between stages {_beside(sent.stages, formula.stages)};" if sent.stages else ""
    yield (
        f"bytes of a step, all workers: states {_beside(sent.network, formula.states)};{between}"
        f" layers, loss and norm"
        f" {format_bytes(sent.compute)}, formula {most}{format_bytes(round(formula.compute))}"
    )


def _beside(sent: int, formula: float | None) -> str:
    said = "no formula" if formula is None else f"formula {format_bytes(round(formula))}"
    return f"{format_bytes(sent)}, {said}"


def as_json(verdict: Verdict) -> dict[str, Any]:
    """The whole verdict. Differences are parts of the plain run's values; null is infinite."""
    sent, formula = verdict.sent, verdict.sent.formula
    runs = {"float64": verdict.exact, "own": verdict.own, "plain": verdict.usual}
    return {
        "holds": verdict.holds,
        "limit": verdict.limit,
        "device": verdict.device,
        "narrow": verdict.narrow,
        "unjudged": verdict.unjudged,
        "over": [str(one) for one in verdict.over],
        "runs": {name: _run(found) for name, found in runs.items() if found is not None},
        "bytes": {
            "states": sent.network,
            "states_formula": formula.states,
            "stages": sent.stages,
            "stages_formula": formula.stages,
            "compute": sent.compute,
            "compute_formula": formula.compute,
            "formula_is_exact": formula.exact,
        },
    }


def _run(found: Comparison) -> dict[str, Any]:
    return {
        "precision": found.precision,
        "worst": _number(found.worst),
        "losses": found.losses,
        "norms": found.norms,
        "workers_that_differ": found.differ,
        "parameters": {
            row.name: {
                "ratio": row.ratio,
                "gradient": _number(row.gradient),
                "weight": _number(row.weight),
            }
            for row in found.rows
        },
    }


def _number(value: float) -> float | None:
    return value if isfinite(value) else None


# -- runs that have been ---------------------------------------------------------------------------


def replayed(found: Replayed) -> Table:
    """The losses of the steps that were compared."""
    made = table("step", "loss", "plain", right=FIGURES)
    for step, pair in enumerate(found.losses, start=found.first + 1):
        made.add_row(str(step), *(f"{loss:.12g}" for loss in pair))
    return made


def replayed_line(found: Replayed) -> str:
    """What the comparison comes to."""
    if found.difference is not None:
        return f"{found.precision}: does not hold; {found.difference}"
    return (
        f"{found.precision}: holds; {counted(found.steps, 'step')} behind step {found.first} are no"
        " farther from the plain loop than rounding brings it from itself"
    )


# -- generation ------------------------------------------------------------------------------------


def spoken(found: Spoken) -> Table:
    """By prompt: the tokens, and how far their log-probabilities are from the plain loop's."""
    made = table("prompt", "tokens", "chosen", "log-probabilities", "", right=slice(0, 2))
    for row in found.rows:
        said = "" if row.holds else "differs"
        if row.differs is not None:
            said = f"token {row.differs + 1} differs"
        made.add_row(
            str(row.prompt), str(len(row.tokens)), row.drawn, f"{row.logprob:.1e}", said
        )  # fmt: skip
    return made


def spoken_lines(found: Spoken) -> Iterator[str]:
    """What there is to say below the table."""
    if found.bounds is not None:
        yield from (f"{found.precision}: {one}" for one in found.over[:MOST])
        word = "does not hold" if found.over else "holds"
        yield (
            f"{found.precision}: {word}; {len(found.over)} of {len(found.bounds.allowed)}"
            " log-probabilities and choices are farther from float64 than rounding brings a plain"
            " loop"
        )
    yield from _handed(found.handed)
    if found.differ:
        yield f"workers {', '.join(map(str, found.differ))} have other tokens than worker 0"
    exact = all(row.holds for row in found.rows) and not found.differ
    worst = max(row.logprob for row in found.rows)
    yield (
        f"float64: {'holds' if exact else 'does not hold'}; tokens are compared one by one, the"
        f" largest difference of a log-probability is {worst:.1e}, {LIMIT:g} is allowed"
    )


def _handed(found: Handed) -> Iterator[str]:
    """What other programs have of it."""
    if found.said not in ("", found.stored):
        yield f"config.json says {found.said}, its weights are {found.stored}"
    if found.left:
        yield f"transformers: not compared, for {found.left}"
    elif found.logits is not None:
        word = "has other logits" if found.logits > NARROW else "has the same logits"
        yield (
            f"transformers: {word}; the largest difference is {found.logits:.1e}, {NARROW:g} is"
            " allowed, since its norms and rotary tables are float32"
        )


# -- draws -----------------------------------------------------------------------------------------


def draws_line(found: Summary) -> str:
    """All draws in a line."""
    total, refused = found.held + len(found.faults), sum(found.refused.values())
    return (
        f"{found.held} of {total} draws hold in float64 and in their own precision, the farthest in"
        f" float64 at {found.worst:.1e} ({LIMIT:g} is allowed), in {found.seconds:.0f} s;"
        f" {refused} refused draws were drawn again"
    )


def draws_json(found: Summary, again: Callable[[Any], str]) -> dict[str, Any]:
    """All draws as JSON. again: what repeats one."""
    return {
        "held": found.held,
        "worst": found.worst,
        "seconds": found.seconds,
        "refused": found.refused,
        "covered": found.covered,
        "faults": [
            {
                "seed": one.drawn.seed,
                "fault": one.fault,
                "draw": str(one.drawn),
                "again": again(one.drawn),
            }
            for one in found.faults
        ],
    }
