"""Callbacks of a run: told in order, what they wish is done, one that raises loses nothing."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest

import outsize
from outsize.checkpoint.adapters import model_directory
from outsize.checkpoint.store import Store
from outsize.errors import OutsizeError
from outsize.train.loop import Loop
from outsize.train.metrics import read_metrics
from outsize.train.resolve import resolve

MEASURE = "validation_bits_per_byte"


class Noted(outsize.Callback):
    """Writes down what it is told."""

    said: list[tuple[str, int]] = []  # noqa: RUF012

    def begin(self, run) -> None:
        self.said.append(("begin", len(run.records)))
        assert run.values["train.steps"] >= 8 and run.directory.is_dir()

    def step(self, record) -> None:
        self.said.append(("step", record["step"]))

    def evaluated(self, record) -> None:
        assert record[MEASURE] > 0
        self.said.append(("evaluated", record["step"]))

    def saved(self, step, path) -> None:
        assert (path / "manifest.json").is_file()
        self.said.append(("saved", step))

    def end(self, step) -> None:
        self.said.append(("end", step))


class Raising(outsize.Callback):
    def step(self, record) -> None:
        if record["step"] == 5:
            raise ValueError("a disk\nof mine is full")


class Leaving(outsize.Callback):
    def saved(self, step, path) -> None:
        sys.exit("enough")


@pytest.fixture
def mine(monkeypatch):
    module = ModuleType("mine")
    module.Noted, module.Raising, module.Leaving = Noted, Raising, Leaving
    Noted.said = []
    monkeypatch.setitem(sys.modules, "mine", module)


@pytest.fixture
def measured(monkeypatch):
    """Bits per byte of the evaluations, planted in place of those that are measured."""
    planted: list[float] = []
    write = Loop._write

    def written(loop, what, record):
        if what == "evaluated":
            record = {**record, MEASURE: planted.pop(0)}
        write(loop, what, record)

    monkeypatch.setattr(Loop, "_write", written)
    return planted


def test_it_is_told_of_steps_evaluations_and_checkpoints_in_order(runs, mine) -> None:
    runs.train(callbacks="[mine:Noted]")
    steps = [("step", number) for number in range(1, 9)]
    wanted = [
        ("begin", 0), *steps[:3], ("saved", 3), steps[3], ("evaluated", 4), *steps[4:6],
        ("saved", 6), *steps[6:], ("evaluated", 8), ("saved", 8), ("end", 8),
    ]  # fmt: skip
    assert Noted.said == wanted
    Noted.said = []
    runs.resume(runs.home / "run", "train.steps=9")
    assert Noted.said[0] == ("begin", 2) and Noted.said[-1] == ("end", 9)


def test_one_that_raises_ends_the_run_which_is_saved_first(runs, mine) -> None:
    with pytest.raises(OutsizeError) as error:
        runs.train(callbacks="[mine:Raising]")
    said = str(error.value)
    assert "callbacks: Raising.step raised ValueError: a disk of mine is full" in said
    assert "step 5 is saved: outsize train --resume" in said
    assert Store(runs.home / "run").latest() == 5


def test_one_that_leaves_is_one_that_raises(runs, mine) -> None:
    with pytest.raises(OutsizeError, match=r"Leaving\.saved raised SystemExit: enough; st"):
        runs.train(callbacks="[mine:Leaving]")
    assert Store(runs.home / "run").latest() == 4


@pytest.mark.parametrize("name", ["keep-best", "early-stopping"])
def test_what_goes_by_validations_wants_some(runs, name) -> None:
    with pytest.raises(OutsizeError, match=f"callbacks: {name} goes by validations, and nothing"):
        runs.train(callbacks=f"[{name}]", data__validation=0)
    assert Store(runs.home / "run").latest() is None


def test_the_best_step_is_kept_under_its_name_also_where_a_run_goes_on(runs, measured) -> None:
    measured += [3.0, 2.0, 2.5, 2.4]
    runs.train(callbacks="[keep-best]", train__evaluate_every=2, train__keep=1)
    run = runs.home / "run"
    assert (run / "best").resolve().name == "step-00000004"
    assert Store(run).steps() == [4, 8]
    assert model_directory(run / "best").resolve().name == "step-00000004"
    measured += [2.2, 1.5]
    runs.resume(run, "train.steps=12")
    assert (run / "best").resolve().name == "step-00000012" and Store(run).steps() == [12]


def test_a_run_ends_where_it_becomes_no_better(runs, measured) -> None:
    measured += [3.0, 2.0, 2.5, 2.4]
    said = {"callbacks__names": "[early-stopping]", "callbacks__patience": 1}
    printed = runs.train(**said, train__evaluate_every=2)
    assert "ended after step 6: 2.000 bits per byte 1 evaluations ago was better" in printed
    assert "sample" in printed and Store(runs.home / "run").latest() == 6
    assert json.loads((runs.home / "run" / "trace.json").read_text())
    assert [r["step"] for r in read_metrics(runs.home / "run") if "loss" in r][-1] == 6


def test_a_checkpoint_is_due_by_the_clock(runs, monkeypatch) -> None:
    runs.train(train__save_every="1h", train__keep="null", train__steps=4)
    assert Store(runs.home / "run").steps() == [4]
    monkeypatch.setattr("outsize.train.loop.seconds_of", lambda every: 0.0)
    runs.resume(runs.home / "run", "train.steps=7")
    assert Store(runs.home / "run").steps() == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ("callbacks=[keep-bst]", "callbacks: 'keep-bst'; did you mean 'keep-best'"),
        ("callbacks=[mine:Nothing]", "callbacks: mine:Nothing cannot be made: AttributeError"),
        ("callbacks=[builtins:object]", "builtins:object is told of nothing: it has none of begin"),
        ("callbacks=[nowhere:At]", "callbacks: nowhere:At cannot be made: ModuleNotFoundError"),
    ],
)
def test_what_is_not_there_is_refused_before_a_step(runs, mine, said, complaint) -> None:
    key, _, value = said.partition("=")
    with pytest.raises(OutsizeError, match=complaint):
        runs.train(**{key: value})
    assert Store(runs.home / "run").latest() is None


@pytest.mark.parametrize("said", ["soon", "0min", "-3s"])
def test_a_time_between_checkpoints_that_is_none_is_refused(said) -> None:
    with pytest.raises(OutsizeError, match="expected steps, or a time as 90s, 10min, 2h"):
        resolve(None, [f"train.save_every={said}"])
