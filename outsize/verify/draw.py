"""Random models under random plans, one a seed: what is supported, in all its combinations.

A draw that a plan (or a family) refuses is followed by another of the same seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from itertools import pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor

from outsize.collectives import AXES, Mesh, PretendWorld
from outsize.collectives.axes import CORE
from outsize.errors import OutsizeError
from outsize.kernels.entropy import LossOptions
from outsize.models.build import build, coded_draw, initial_values
from outsize.models.coding import weight_of
from outsize.models.config import DecoderConfig
from outsize.models.declared import Initial
from outsize.models.decoder import Decoder
from outsize.models.families import parse
from outsize.models.random import fill_normal
from outsize.optim import SGD, AdamW, Muon, Optimizer
from outsize.plan import Plan, Precision, Rest, Sharding, Stage, Stream
from outsize.plan.settings import NONE, PLAN_SETTINGS, PlanSetting
from outsize.runtime.job import Fill
from outsize.runtime.recipe import Here
from outsize.runtime.runners import check_blocks
from outsize.techniques.optim.adamw8bit import AdamW8Bit, Settings
from outsize.verify import draw_pipeline as pipes
from outsize.verify.case import Case, Native
from outsize.verify.draw_data import Data, masked, sharing, unlike
from outsize.verify.shapes import shape

ATTEMPTS = 200
DEVIATION = 0.2  # of first values: no gradient is lost in rounding
RATE = 2e-3
# That of a plan, by chance: below float64 more is run, and takes longer.
PRECISIONS = (*("float64",) * 5, "float32", "bfloat16")
EPSILON = 1e-4  # of AdamW: a gradient that is zero but for rounding must not become a step
ADAMW = AdamW(RATE, (0.9, 0.95), EPSILON, weight_decay=0.1)
PARTS = (("attention",), ("mlp",), ("attention", "mlp"))
# Parameters that may be frozen, as patterns.
FROZEN = (
    ("*norm*",),
    ("blocks.0.*",),
    ("prologue.*", "blocks.0.*"),
    ("prologue.*", "blocks.0.*", "blocks.1.*"),
    ("prologue.*", "blocks.*"),
    ("*.mlp.*",),
    ("*.attention.*",),
    ("epilogue.*",),
    ("blocks.*",),
)


@dataclass(frozen=True)
class Drawn:
    """A case and what it is, by name."""

    seed: int
    case: Case
    what: Mapping[str, Any]

    def __str__(self) -> str:
        return ", ".join(f"{name} {_text(value)}" for name, value in self.what.items() if value)


def draws(seed: int, workers: int, precision: str | None = None) -> Iterator[Drawn | OutsizeError]:
    """The draws of a seed on at most so many workers, one after another; where one is refused at
    once, why. precision: that of the plan; None draws it."""
    draw = Random(seed)
    if precision is None:
        precision = Random(f"{seed} precision").choice(PRECISIONS)
    for _ in range(ATTEMPTS):
        try:
            yield _within(_case(draw, seed, workers), precision)
        except OutsizeError as error:
            yield error


def _within(drawn: Drawn, precision: str) -> Drawn:
    case = drawn.case.within(Precision.named(precision))
    if case.plan.precision != drawn.case.plan.precision:  # else it has been asked
        _refuse(case)
    shown = {} if precision == "float64" else {"precision": precision}
    return replace(drawn, case=case, what={**shown, **drawn.what})


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {v}" for k, v in value.items()) + "}"
    return str(value)


def _case(draw: Random, seed: int, workers: int) -> Drawn:
    model = shape(draw)
    mesh = _mesh(draw, workers, parse(model))
    rows, line = _rows(draw, mesh), pipes.Line()
    if mesh.pipeline > 1:
        line = pipes.line_of(draw, mesh, pipes.microbatches_of(mesh, *rows))
        model = pipes.deep(draw, model, line.least)
    config = parse(model)
    plan, shown = _plan(draw, len(config.layers) + 2, mesh, rows, line)
    plan = unlike(Random(f"{seed} shares"), plan)
    plan = sharing(Random(f"{seed} by rows"), plan, config)
    frozen = draw.choice(FROZEN) if draw.random() < 0.3 else ()
    options = LossOptions(0.1 * (draw.random() < 0.3), 1e-2 * (draw.random() < 0.3))
    clip = draw.choice((None, 0.01, 0.5)) if plan.update == "apart" else None
    optimizer, name = _optimizer(draw)
    data = Data(seed, plan, config.vocab, draw.choice((0.0, 0.0, 0.2)), masked(draw, plan))
    steps = 3
    if name == "muon" and min(data.batch(i).count() for i in range(steps)) < config.hidden:
        # Its gradients lack rank: Muon would make steps of what is zero but for rounding.
        optimizer, name = ADAMW, "adamw"
    if optimizer.approximate:
        plan = replace(plan, approximate=(*plan.approximate, optimizer.approximate))
    resume = draw.choice((0, 0, 1, 2))
    native = Native(config, Values(config), options, partial(_is_frozen, frozen))
    case = Case(native, plan, optimizer, data.batch, steps, clip, RATE, resume)
    _refuse(case)
    what = {
        "model": model, "mesh": str(mesh), **shown, "row_shares": plan.row_shares,
        **dict(plan.settings.laying.said),
        "optimizer": name, "clip": clip, "frozen": frozen,
        "label smoothing": options.label_smoothing, "z-loss": options.z_loss,
        "dropout": data.dropout, "masked rows": data.masked, "resumed": resume,
    }  # fmt: skip
    return Drawn(seed, case, what)


def _is_frozen(patterns: Sequence[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class Values:
    """Makes what writes first values: none that are special, around those that norms and biases
    usually start from. Every worker of every run of a draw asks for it."""

    config: DecoderConfig

    def __call__(self) -> Fill:
        model, starts = self._starting

        def fill(name: str, out: Tensor) -> None:
            fill_normal(out, 0, name, std=DEVIATION)
            out.add_(starts[name].value)

        return coded_draw(model, fill)

    @cached_property
    def _starting(self) -> tuple[Decoder, Mapping[str, Initial]]:
        model = build(self.config)
        return model, {weight_of(name): start for name, start in initial_values(model)}


def _refuse(case: Case) -> None:
    """OutsizeError for what is refused before a step, at shapes alone."""
    world = PretendWorld(case.plan.mesh)
    if isinstance(case.subject, Native):
        check_blocks(case.subject.config, case.plan, case.batch(0).noise is not None)
    with torch.device("meta"):
        case.subject.trainable(case.plan).part(case.plan, Here(world))


# -- the plan --------------------------------------------------------------------------------------


def _mesh(draw: Random, workers: int, config: DecoderConfig) -> Mesh:
    """Any grid of at most so many workers; the tensor axis where it may work."""
    pipeline = draw.randrange(2, workers + 1) if workers > 1 and draw.random() < 0.5 else 1
    left, mixed = workers // pipeline, any(layer.experts for layer in config.layers)
    others = [n for n, axis in AXES.items() if n not in CORE and not axis.parts]
    if mixed:  # more often, for few models have experts
        others += 2 * [n for n, axis in AXES.items() if axis.parts]
    cut: dict[str, int] = {}
    if left > 1 and others and draw.random() < (0.8 if mixed else 0.5):
        name = draw.choice(others)
        apart = AXES.get(name).parts and left > 3  # leave workers for the tensor axis beside it
        cut[name] = draw.randrange(2, (left // 2 if apart else left) + 1)
        left //= sum(cut.values())
    fitting = [n for n in range(1, left + 1) if config.heads % n == 0]
    tensor = draw.choice(fitting)
    data = draw.randrange(1, left // tensor + 1)
    return Mesh(data, tensor, pipeline, **cut)


def _rows(draw: Random, mesh: Mesh) -> tuple[int, int]:
    """Of a step, and of a microbatch."""
    rows = draw.randrange(1, 4)
    if mesh.pipeline > 1:
        return pipes.rows_of(draw, mesh, rows), rows
    return draw.randrange(mesh.rows, 3 * mesh.rows + 2), rows


def _plan(
    draw: Random, segments: int, mesh: Mesh, rows: tuple[int, int], line: pipes.Line
) -> tuple[Plan, dict[str, Any]]:
    alone = mesh.pipeline == 1
    update = "behind" if alone and draw.random() < 0.25 else "apart"
    stages = _stages(draw, segments, line.least)
    split = draw.random() < 0.3
    shards = _shards(draw, mesh.data)
    resident = draw.choice((1, 2, 2, 3))
    rest = pipes.below(draw, mesh, shards) if draw.random() < 0.25 else Rest()
    shown: dict[str, Any] = {
        "rows": rows[0],
        "microbatch_rows": rows[1],
        "sequence": pipes.tokens_of(draw, rest, rows[0]),
        "loss_chunk": draw.choice((0, 1, 5, 11)),
        "mlp_tile": draw.choice((0, 0, 3, 7)),
        "split_backward": split,
        "order": draw.choice(("microbatch", "layer")) if alone else "microbatch",
        "update": update,
        "sequence_parallel": mesh.tensor > 1 and draw.random() < 0.5,
    }
    at_rest = update == "apart" and rest.optimizer != "device"
    host = draw.choice((0, 0, 3)) if at_rest else 0
    stream = Stream(
        resident,
        draw.randrange(1, resident + 1),
        draw.choice((0, 0, 1 << 19, 1 << 21)),
        draw.choice(("belady", "lru", "static")),
        host=host,
        over=draw.randrange(1, host + 1) if host else 1,
    )
    said = line.said if alone else pipes.with_cuts(draw, line, len(stages))
    plan = Plan(
        segments, stages, mesh=mesh, shards=shards, stream=stream, pipeline=said,
        precision=Precision.named("float64"), approximate=line.approximate, **shown,
    )  # fmt: skip
    plan = plan if rest == Rest() else pipes.resting(draw, plan, rest)
    every = ((name, one) for name, one in PLAN_SETTINGS.items() if not one.by_rows)
    settings = {name: _setting(draw, one, plan) for name, one in every}
    plan, shown = replace(plan, settings=NONE.having(settings)), {**shown, **settings}
    recompute = [(s.first, s.last, *s.recompute) for s in stages]
    shown |= {"shards": shards, "stages": recompute, "stream": stream}
    if rest != Rest():
        shown["rest"] = rest, [(s.rest == rest, *s.spill) for s in plan.stages]
    if not alone:
        shown["pipeline"] = said
    return plan, shown


def _setting(draw: Random, one: PlanSetting, plan: Plan) -> int:
    return 0 if one.refusal(plan) else draw.choice(one.draws)


def _stages(draw: Random, segments: int, least: int) -> tuple[Stage, ...]:
    """Runs of segments, the blocks' with any recompute; so many at least."""
    inner = range(1, segments)
    cuts = [i for i in inner if i in (1, segments - 1) or draw.random() < 0.6]
    if draw.random() < 0.15:
        cuts = [i for i in inner if draw.random() < 0.3]
    others = [i for i in inner if i not in cuts]
    cuts = sorted((*cuts, *draw.sample(others, max(0, least - 1 - len(cuts)))))
    ends = (0, *cuts, segments)
    return tuple(Stage(a, b, _again(draw, a, b, segments)) for a, b in pairwise(ends))


def _again(draw: Random, first: int, last: int, segments: int) -> tuple[str, ...]:
    chance = draw.random()
    if chance < 0.4 and first > 0 and last < segments:
        return ("block",)
    return draw.choice(PARTS) if chance > 0.75 else ()


def _shards(draw: Random, data: int) -> Sharding:
    """Any degrees that nest."""
    optimizer = draw.choice([n for n in range(1, data + 1) if data % n == 0])
    gradients = draw.choice([n for n in range(1, optimizer + 1) if optimizer % n == 0])
    parameters = draw.choice([n for n in range(1, gradients + 1) if gradients % n == 0])
    return Sharding(parameters, gradients, optimizer)


def _optimizer(draw: Random) -> tuple[Optimizer, str]:
    name = draw.choice(("adamw", "adamw", "adamw8bit", "sgd", "muon"))
    if name == "adamw8bit":
        least = draw.choice((1, 500))
        return AdamW8Bit(ADAMW, Settings(draw.choice((32, 64, 256)), least)), name
    if name == "sgd":
        return SGD(RATE, draw.choice((0.0, 0.9)), 0.1), name
    if name == "muon":
        return Muon(RATE, nesterov=draw.random() < 0.7, weight_decay=0.1, rest=ADAMW), name
    return ADAMW, name
