"""A run that has been, step by step beside a plain loop: `outsize verify --run DIR`.

The loop reads the run's values by itself (outsize/verify/reading.py), begins with the run's first
values or with a checkpoint, computes in float64 with PyTorch alone, and says at which step the
run's record first is farther from it than rounding explains (outsize/verify/bounds.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite, sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outsize.checkpoint.opened import Checkpoint
from outsize.checkpoint.store import Store
from outsize.data import Batch, open_data
from outsize.errors import OutsizeError
from outsize.kernels.entropy import PLAIN
from outsize.models.build import shells
from outsize.models.decoder import Decoder
from outsize.optim.optimizer import precision_for
from outsize.plan import Precision
from outsize.runtime.job import Fill
from outsize.train.metrics import read_metrics
from outsize.train.model import Subject, subject, subject_of
from outsize.train.recipe import data_config, rates_of
from outsize.train.resolve import recorded_values
from outsize.train.state import OPTIMIZER, UPDATES, first_values, place_of
from outsize.verify import plain
from outsize.verify.bounds import CLEAR, FACTOR, LEAST, MORE, SAMPLES
from outsize.verify.case import Native
from outsize.verify.naive import loss_of
from outsize.verify.plain import Recipe
from outsize.verify.reading import Read
from outsize.verify.rounding import Rounding
from outsize.verify.updates import Begun

STEPS = 20  # that are replayed where nothing is said
ROWS = 64  # held-out rows that are looked at together
EXACT = 1e-12  # of numbers that no sum is in: the learning rate
NAMES = ("loss", "gradient_norm", "validation_loss")  # in metrics, what rounding moves


@dataclass(frozen=True)
class Difference:
    """Of a step, counted from 1, what the run says, what the loop says, and by how much they may
    differ."""

    step: int
    what: str
    run: float
    plain: float
    allowed: float

    @property
    def clear(self) -> bool:
        """Whether more runs would say the same."""
        return not abs(self.run - self.plain) <= CLEAR * self.allowed

    def __str__(self) -> str:
        return (
            f"step {self.step}: {self.what} is {self.run:.10g} in the run and {self.plain:.10g} in"
            f" the plain loop; {self.allowed:.1e} is allowed"
        )


@dataclass(frozen=True)
class Replayed:
    """first: the step before the first one that was compared; steps: how many were, the one that
    differs included; losses: of the run and of the loop; difference: the first, None where there is
    none."""

    first: int
    steps: int
    losses: tuple[tuple[float, float], ...]
    difference: Difference | None
    precision: str

    @property
    def holds(self) -> bool:
        return self.difference is None


@dataclass(frozen=True)
class Run:
    """What there is of a run. found: the checkpoint from which it is replayed; records: by step."""

    read: Read
    subject: Subject
    found: Checkpoint | None
    records: Mapping[int, Mapping[str, Any]]

    @property
    def first(self) -> int:
        return 0 if self.found is None else self.found.step

    @property
    def precision(self) -> Precision:
        keys = self.read.config
        made = precision_for(self.read.optimizer, Precision.named(keys.precision or "float32"))
        bare = "bfloat16-weights" in keys.plan.approximate
        return Precision(made.compute, None, made.gradients, made.optimizer) if bare else made


def opened(directory: Path, start: int | None) -> Run:
    """start: the step whose checkpoint is begun with; None: first values. OutsizeError where there
    is no such run or checkpoint, and where the run's numbers are not meant to be the plain ones."""
    resolved = recorded_values(directory)
    for name in resolved.get("plan.approximate"):
        if name not in ("bfloat16-weights", "adamw8bit"):
            raise OutsizeError(
                f"verify: the run in {directory} has {name} under plan.approximate, whose numbers"
                " are not the plain ones; expected a run without it"
            )
    if Precision.named(resolved.get("precision")).scaled:
        raise OutsizeError(
            f"verify: the run in {directory} is in float16, and a step that loss scaling skips has"
            " no twin in float64; expected a run in float64, float32 or bfloat16"
        )
    found = None if start is None else Store(directory, None).load(start)
    if found is None:
        resolved, model = subject(resolved)
    else:
        place_of(found)
        model = subject_of(found, resolved)
    data = open_data(data_config(resolved.config, model.text), model.config.vocab)
    return Run(Read(resolved.config, data), model, found, _records(directory))


def _records(directory: Path) -> Mapping[int, Mapping[str, Any]]:
    """By step, all that is said of it. OutsizeError for a step that is there twice."""
    records: dict[int, dict[str, Any]] = {}
    for record in read_metrics(directory):
        step = records.setdefault(int(record["step"]), {})
        if "loss" in record and "loss" in step:
            raise OutsizeError(
                f"verify: the metrics of {directory} hold step {record['step']} twice; expected"
                " each step once"
            )
        step.update(record)
    return records


def replay(directory: Path, start: int | None, count: int | None) -> Replayed:
    """Compare `count` steps of the run in `directory`, as long as they do not differ."""
    run = opened(directory, start)
    last = max((step for step, said in run.records.items() if "loss" in said), default=0)
    count = min(last - run.first, STEPS if count is None else count)
    if count < 1:
        raise OutsizeError(
            f"verify: the run in {directory} has recorded no step behind step {run.first}; expected"
            " one at least: begin earlier (--from), or train on"
        )
    moved = [_played(run, count, seed) for seed in range(SAMPLES)]
    losses, difference = list[tuple[float, float]](), None
    for step, truth in enumerate(_played(run, count, None), start=run.first + 1):
        others = [next(one) for one in moved]
        said = run.records.get(step, {})
        losses.append((float(said.get("loss", inf)), truth["loss"]))
        difference = _differs(run, step, truth, others)
        if difference is not None and not difference.clear:
            runs = (_played(run, step - run.first, seed) for seed in range(MORE))
            more = [list(one)[-1] for one in runs]
            difference = _differs(run, step, truth, more)
        if difference is not None:
            break
    return Replayed(run.first, len(losses), tuple(losses), difference, run.precision.compute)


Numbers = Mapping[str, float]


def _differs(run: Run, step: int, truth: Numbers, moved: list[Numbers]) -> Difference | None:
    """The first number of a step that is beyond what is allowed."""
    said, read = run.records.get(step, {}), run.read
    rate, tokens = read.rate(step - 1), float(step * read.rows * read.sequence)
    for what, right, allowed in (("lr", rate, EXACT * rate), ("tokens", tokens, 0.0)):
        own = float(said.get(what, inf))
        if not abs(own - right) <= allowed:
            return Difference(step, what, own, right, allowed)
    for what in NAMES:
        if what not in truth or (what == "validation_loss" and what not in said):
            continue
        own, right = float(said.get(what, inf)), truth[what]
        apart = [one[what] - right for one in moved]
        allowed = FACTOR * sqrt(sum(x**2 for x in apart) / len(apart)) + LEAST * abs(right)
        if not isfinite(own) or not abs(own - right) <= allowed:
            return Difference(step, what, own, right, allowed)
    return None


# -- the loop --------------------------------------------------------------------------------------


def _played(run: Run, count: int, seed: int | None) -> Iterator[Numbers]:
    """So many steps of the plain loop in float64; seed: with results moved at random."""
    read, first = run.read, run.first
    exact = Precision("float64", "float64" if run.precision.master else None, "float64", "float64")
    native = Native(run.subject.config, partial(_values, run), read.options)
    made = native.plain(exact)
    assert isinstance(made.model, Decoder)
    rates = tuple(read.rate(step) for step in range(first, first + count))
    matrices = native.matrices() if read.optimizer.rest is not None else frozenset[str]()
    factors = native.factors(rates_of(read.config))
    clip, begun = read.config.train.clip, _begun(run.found)
    recipe = Recipe(read.optimizer, rates, clip, matrices, begun, factors)
    rounding = None if seed is None else Rounding(run.precision, seed)
    batches = (read.batch(step) for step in range(first, first + count))
    held, step = read.held_out(), first
    for found in plain.steps(made, recipe, batches, rounding):
        step += 1
        numbers = {"loss": found.loss, "gradient_norm": found.norm}
        if held is not None and "validation_loss" in run.records.get(step, {}):
            numbers["validation_loss"] = _evaluated(made.model, held, rounding)
        yield numbers


def _evaluated(model: Decoder, held: Batch, rounding: Rounding | None) -> float:
    """The mean loss of all held-out rows, some at a time."""
    total, count = 0.0, 0.0
    with torch.no_grad(), rounding or nullcontext():
        for row in range(0, len(held.ids_BS), ROWS):
            rows = held.rows(row, min(row + ROWS, len(held.ids_BS)))
            loss, weight = loss_of(model, rows, PLAIN)
            total, count = total + float(loss), count + float(weight)
    return total / count


def _values(run: Run) -> Fill:
    return first_values(
        shells(run.subject.config, torch.float32, "cpu"), run.read.config, run.found
    )


def _begun(found: Checkpoint | None) -> Begun | None:
    """What a checkpoint keeps of the optimizer."""
    if found is None:
        return None
    states: dict[str, Tensor] = {n: found.tensor(OPTIMIZER, n) for n in found.names(OPTIMIZER)}
    updates = found.meta[UPDATES]
    assert isinstance(updates, dict)
    return Begun({str(name): int(str(count)) for name, count in updates.items()}, states)
