"""Callbacks: ordinary objects that a run tells of its steps, evaluations and checkpoints.

    callbacks: [keep-best, early-stopping, wandb, my_package.mine:Mine]    # in a run's file

They live on the first worker alone. What they wish (to keep a checkpoint, to end the run) all
workers do alike, behind the step. One that raises ends the run, which is saved first.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outsize.errors import OutsizeError, nearest
from outsize.registry import Registry, setting, technique

KEY = "callbacks"
MEASURE = "validation_bits_per_byte"  # of what is better, the lower
Record = Mapping[str, float | int | str]


@dataclass(frozen=True)
class Settings:
    names: tuple[str, ...] = setting(
        (),
        "early-stopping, keep-best, mlflow, wandb, or MODULE:CLASS of one's own",
        may_change=True,
    )
    patience: int = setting(
        3, "early-stopping: evaluations without a better one", least=1, may_change=True
    )


@dataclass
class Running:
    """A run as a callback meets it. directory: of the run; values: every key with its value;
    records: of the evaluations before the one that it is told of, oldest first.

    reason, name: what it wishes to be done behind this step; empty: nothing.
    """

    directory: Path
    values: Mapping[str, Any]
    records: Sequence[Record]
    reason: str = ""
    name: str = ""

    def stop(self, reason: str) -> None:
        """End the run behind this step, as if that had been its last one."""
        self.reason = reason

    def keep(self, name: str) -> None:
        """Save this step, and keep it under this name until another one has it."""
        self.name = name


class Callback:
    """Told of what has happened, on the first worker; what is not wanted is left as it is."""

    def begin(self, run: Running) -> None:
        """Before the first step of this process."""

    def step(self, record: Record) -> None:
        """A step: `step`, `loss`, `gradient_norm`, `lr`, `seconds`, and more of metrics.jsonl."""

    def evaluated(self, record: Record) -> None:
        """A validation: `step`, `validation_loss` (nats a target), `validation_bits_per_byte`."""

    def saved(self, step: int, path: Path) -> None:
        """A checkpoint lies at `path`."""

    def end(self, step: int) -> None:
        """Behind the last step of this process."""


TOLD = ("begin", "step", "evaluated", "saved", "end")


class KeepBest(Callback):
    """Keeps the step with the lowest bits per byte so far, as the run's `best`."""

    def begin(self, run: Running) -> None:
        self.run, self.best = run, min(_measured(run.records), default=float("inf"))

    def evaluated(self, record: Record) -> None:
        now = float(record[MEASURE])
        if now < self.best:
            self.best = now
            self.run.keep("best")


class EarlyStopping(Callback):
    """Ends a run whose bits per byte have not become better for some evaluations."""

    def __init__(self, patience: int) -> None:
        self.patience = patience

    def begin(self, run: Running) -> None:
        self.run, self.seen = run, _measured(run.records)

    def evaluated(self, record: Record) -> None:
        self.seen.append(float(record[MEASURE]))
        best = self.seen.index(min(self.seen))
        since = len(self.seen) - 1 - best
        if since >= self.patience:
            self.run.stop(f"{self.seen[best]:.3f} bits per byte {since} evaluations ago was better")


class Wandb(Callback):
    """Weights & Biases; its settings are those of its environment (WANDB_PROJECT, WANDB_MODE)."""

    def __init__(self) -> None:
        self.package = _package("wandb", "wandb")

    def begin(self, run: Running) -> None:
        name, folder = run.directory.name, str(run.directory)
        self.run = self.package.init(name=name, dir=folder, config=dict(run.values))

    def step(self, record: Record) -> None:
        self.run.log(dict(record), step=record["step"])

    def evaluated(self, record: Record) -> None:
        self.step(record)

    def end(self, step: int) -> None:
        self.run.finish()


class MLflow(Callback):
    """MLflow; where it writes is said by its environment (MLFLOW_TRACKING_URI)."""

    def __init__(self) -> None:
        self.package = _package("mlflow", "mlflow")

    def begin(self, run: Running) -> None:
        self.package.start_run(run_name=run.directory.name)
        said = {key: str(value)[:500] for key, value in run.values.items()}
        self.package.log_params(said)

    def step(self, record: Record) -> None:
        numbers = {key: float(value) for key, value in record.items() if not isinstance(value, str)}
        self.package.log_metrics(numbers, step=int(record["step"]))

    def evaluated(self, record: Record) -> None:
        self.step(record)

    def end(self, step: int) -> None:
        self.package.end_run()


def _measured(records: Sequence[Record]) -> list[float]:
    return [float(record[MEASURE]) for record in records if MEASURE in record]


def _package(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise OutsizeError(
            f"{KEY}: {module} is not installed; pip install {package}, or leave it out"
        ) from None


CALLBACKS: Registry[Callable[[Settings], Callback]] = Registry("callback")
CALLBACKS.add("keep-best", lambda _: KeepBest())
CALLBACKS.add("early-stopping", lambda own: EarlyStopping(own.patience))
CALLBACKS.add("wandb", lambda _: Wandb())
CALLBACKS.add("mlflow", lambda _: MLflow())


def made(own: Settings, validates: bool) -> list[Callback]:
    """The callbacks of a run. validates: whether it holds anything out. OutsizeError for one that
    is not there, and for one that would never be told what it goes by."""
    found = [_made(name, own) for name in own.names]
    for name, one in zip(own.names, found, strict=True):
        if isinstance(one, KeepBest | EarlyStopping) and not validates:
            raise OutsizeError(
                f"{KEY}: {name} goes by validations, and nothing is held out; raise"
                " data.validation, or name files of your own in data.evaluation"
            )
    return found


def _made(name: str, own: Settings) -> Callback:
    module, colon, attribute = name.partition(":")
    if not colon:
        if CALLBACKS.find(name) is None:
            raise OutsizeError(
                f"{KEY}: {name!r}{nearest(name, CALLBACKS.names())}, or MODULE:CLASS of your own"
            )
        return CALLBACKS.get(name)(own)
    try:
        found: Callback = getattr(importlib.import_module(module), attribute)()
    except Exception as error:  # whatever somebody's module raises
        why = " ".join(str(error).split())[:160]
        raise OutsizeError(
            f"{KEY}: {name} cannot be made: {type(error).__name__}: {why}; expected MODULE:CLASS, a"
            " class that takes nothing, of a module that Python finds"
        ) from None
    if not any(hears(type(found), one) for one in TOLD):
        raise OutsizeError(
            f"{KEY}: {name} is told of nothing: it has none of {', '.join(TOLD)}; expected a class"
            " with one of these methods at least, as outsize.Callback has them"
        )
    return found


def hears(kind: type, what: str) -> bool:
    """Whether a class has a method of its own for what a run tells."""
    return getattr(kind, what, None) not in (None, getattr(Callback, what))


@dataclass
class Told:
    """The callbacks of a run on its first worker, none on the others.

    failed: what one of them raised; from then on none is told of anything.
    """

    run: Running
    callbacks: Sequence[Callback] = ()
    failed: OutsizeError | None = None

    def tell(self, what: str, *facts: Any) -> None:
        """Call a method of each."""
        for one in self.callbacks:
            if self.failed is not None:
                return
            try:
                getattr(one, what, _nothing)(*facts)
            except (Exception, SystemExit) as error:  # somebody's own
                why = " ".join(str(error).split())[:160]
                self.failed = OutsizeError(
                    f"{KEY}: {type(one).__name__}.{what} raised {type(error).__name__}: {why}"
                )

    @property
    def ending(self) -> bool:
        """Whether the run is to end behind this step."""
        return self.failed is not None or bool(self.run.reason)

    def taken(self) -> str:
        """The name under which this step is to be kept, once."""
        name, self.run.name = self.run.name, ""
        return name


def _nothing(*_: object) -> None:
    return None


technique(
    KEY, Settings, "objects that are told of steps, evaluations and checkpoints", short="names"
)
