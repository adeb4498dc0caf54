"""Many draws, each verified in float64: what holds, what does not and how to see it again."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import inf
from typing import Any, Protocol

from outsize.errors import OutsizeError
from outsize.models.wiring import WIRES
from outsize.plan import Plan
from outsize.verify.bounds import numbers
from outsize.verify.case import Case
from outsize.verify.compare import LIMIT
from outsize.verify.draw import ATTEMPTS, Drawn, draws
from outsize.verify.planned import Stopped
from outsize.verify.verify import Verdict, own_rounding, verify

_FEATURES = ("loss_chunk", "mlp_tile", "split_backward", "sequence_parallel")
_STATES = ("parameters", "gradients", "optimizer", "activations")
ROUNDED = "the plain run comes as far from itself when its first values are rounded once"
USUAL = "plain PyTorch in that precision is beyond what rounding explains"
Verifier = Callable[[Case], Verdict | str]  # a text: how it failed


class Repeatable(Protocol):
    """What was drawn; its text says what that is."""

    @property
    def seed(self) -> int: ...


@dataclass(frozen=True)
class Outcome:
    """One draw. fault: what is wrong with it; empty where it holds. refused: the reasons of draws
    before it. seconds: that it took."""

    drawn: Repeatable
    worst: float
    fault: str
    refused: tuple[str, ...]
    seconds: float

    @property
    def holds(self) -> bool:
        return not self.fault


@dataclass(frozen=True)
class Summary:
    """Of many draws. refused: how often each reason came up; covered: how many held by feature."""

    held: int
    faults: tuple[Outcome, ...]
    worst: float
    seconds: float
    refused: Mapping[str, int]
    covered: Mapping[str, int] = field(default_factory=dict)


def outcomes(
    seeds: Iterable[int],
    workers: int,
    judge: Verifier | None = None,
    precision: str | None = None,
    device: str = "cpu",
) -> Iterator[Outcome]:
    """Draw and verify, seed by seed. judge: gives the verdict; usually on threads. precision: that
    of the plans; None draws it. device: as a Case has it."""
    for seed in seeds:
        yield _outcome(seed, workers, judge or verify, precision, device)


def _outcome(
    seed: int, workers: int, judge: Verifier, precision: str | None, device: str
) -> Outcome:
    refused, begin = [], time.perf_counter()
    for drawn in draws(seed, workers, precision):
        if isinstance(drawn, OutsizeError):
            refused.append(_reason(drawn))
            continue
        worst, fault = float("inf"), ""
        try:
            found = judge(replace(drawn.case, device=device))
            if isinstance(found, str):
                fault = found
            elif _rounded(drawn.case, found.exact.worst):
                refused.append(ROUNDED)
                continue
            elif _usual(found):
                refused.append(USUAL)
                continue
            else:
                worst, fault = found.exact.worst, _fault(found)
        except Stopped as error:
            fault = str(error)
        except OutsizeError as error:
            refused.append(_reason(error))
            continue
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            fault = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        return Outcome(drawn, worst, fault, tuple(refused), time.perf_counter() - begin)
    raise OutsizeError(
        f"verify: no draw of seed {seed} in {ATTEMPTS} is one that is supported; the last:"
        f" {refused[-1]}"
    )


def _rounded(case: Case, worst: float) -> bool:
    """Whether a difference above the limit says nothing, since the plain run comes as far from
    itself (an ill-conditioned draw: a norm over values of the size of rounding), to three figures:
    a moment on the border of two codes makes both part by the same, and rounding moves the rest."""
    return LIMIT < worst < inf and worst <= 1.001 * own_rounding(case)


def _usual(found: Verdict) -> bool:
    """Whether plain PyTorch too is farther from float64 than rounding explains."""
    if found.exact.worst > LIMIT or not found.over or None in (found.bounds, found.usual):
        return False
    assert found.bounds is not None and found.usual is not None
    return bool(found.bounds.over(numbers(found.usual)))


def _reason(error: OutsizeError) -> str:
    """What it is about: the words before the first number."""
    words = str(error).split()
    end = next((i for i, w in enumerate(words) if any(c.isdigit() for c in w)), len(words))
    return " ".join(words[: min(end, 6)])


def _fault(found: Verdict) -> str:
    """What is wrong, the farthest parameter first."""
    exact, sent = found.exact, found.sent
    between = sent.formula.stages
    if found.holds and between is not None and abs(sent.stages - between) > sent.formula.rounded:
        return f"{sent.stages} bytes between stages; the formula gives {between:.0f}"
    if found.holds:
        return ""
    if exact.holds() and found.over:
        assert found.own is not None
        return f"{found.own.precision}: {found.over[0]}; {len(found.over)} numbers in all"
    if exact.differ:
        return f"workers {', '.join(map(str, exact.differ))} have other bits than worker 0"
    row = max(exact.rows, key=lambda one: max(one.gradient, one.weight))
    ratio = "-" if row.ratio is None else f"{row.ratio:.6g}"
    return (
        f"{exact.worst:.2g} is above {LIMIT:g}: loss {exact.loss:.2g}, norm {exact.norm:.2g};"
        f" {row.name}: gradient {row.gradient:.2g} (ratio {ratio}), weight {row.weight:.2g}"
    )


def command(
    drawn: Repeatable,
    workers: int,
    processes: bool = False,
    precision: str | None = None,
    device: str = "auto",
) -> str:
    """What repeats a draw. precision, device: that all draws were asked to have."""
    more = " --processes" if processes else ""
    more += "" if precision is None else f" --precision {precision}"
    more += "" if device == "auto" else f" --device {device}"
    return f"outsize verify --random 1 --seed {drawn.seed} --workers {workers}{more}"


def summary(
    found: Iterable[Outcome], named: Callable[[Any], Iterable[str]] | None = None
) -> Summary:
    """All outcomes in a few numbers. named: what a draw has; None: as `features` says it."""
    every = list(found)
    has: Callable[[Any], Iterable[str]] = named or features
    held = [one for one in every if one.holds]
    refused = Counter(reason for one in every for reason in one.refused)
    return Summary(
        len(held),
        tuple(one for one in every if not one.holds),
        max((one.worst for one in held), default=0.0),
        sum(one.seconds for one in every),
        dict(refused.most_common()),
        dict(Counter(name for one in held for name in has(one.drawn)).most_common()),
    )


def features(drawn: Drawn) -> Iterator[str]:
    """What a draw has, by name."""
    case, what = drawn.case, drawn.what
    plan = case.plan
    yield f"model {what['model']['model_type']}"
    yield f"workers {plan.mesh.size}"
    yield f"optimizer {what['optimizer']}"
    yield f"precision {plan.precision.compute}"
    yield from _meshes(plan)
    for name in _FEATURES:
        if getattr(plan, name):
            yield name
    yield from (name for name, _ in plan.settings.said)
    for name, has in (
        ("shards of parameters", plan.shards.parameters > 1),
        ("shards of gradients", plan.shards.gradients > 1),
        ("shards of optimizer states", plan.shards.optimizer > 1),
        ("recompute", any(stage.recompute for stage in plan.stages)),
        ("order layer", plan.order == "layer"),
        ("update behind", plan.update == "behind"),
        ("uneven rows", plan.rows % plan.mesh.rows > 0),
        ("shares of rows", bool(plan.row_shares)),
        *((key, what["model"].get(key) is not None) for key in WIRES.names()),
        ("tied", bool(what["model"].get("tie_word_embeddings"))),
        ("clip", case.clip is not None),
        ("updates on the host", plan.stream.host > plan.stream.over),
        ("stream.over", plan.stream.over > 1),
        ("masked rows", what["masked rows"] != (0, 0)),
        ("uneven stages", bool(plan.pipeline.cuts)),
        (" ".join(map(str, plan.pipeline.ends or ())), plan.pipeline.ends is not None),
        *((f"below: {state}", plan.rests_below(state)) for state in _STATES),
    ):
        if has:
            yield name
    if plan.mesh.pipeline > 1:
        yield f"schedule {plan.pipeline.schedule}"
    yield from (n for n in ("frozen", "label smoothing", "z-loss", "dropout", "resumed") if what[n])


def _meshes(plan: Plan) -> Iterator[str]:
    """Every two axes that have several workers."""
    axes = [axis.name for axis in plan.mesh.axes]
    yield from (f"mesh {one} x {other}" for one, other in combinations(axes, 2))
