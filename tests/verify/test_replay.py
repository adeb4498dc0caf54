"""`outsize verify --run`: a run that was, beside a plain loop; faults planted in training show at
the step where they begin."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from rates import known_hardware
from rich.console import Console

from outsize.cli.main import main
from outsize.data import TrainStream, open_data
from outsize.errors import OutsizeError
from outsize.kernels.entropy import PLAIN
from outsize.models.dropout import Noise
from outsize.runtime import Job
from outsize.train import loop, run
from outsize.train.recipe import data_config
from outsize.train.resolve import resolve
from outsize.verify.reading import Read
from outsize.verify.replay import replay

RUN = """
model: tiny
data: {path: text, validation: 0.2, cache: cache}
train: {sequence: 16, batch_tokens: 64, steps: 4, label_smoothing: 0.1, z_loss: 0.01,
        dropout: 0.1, evaluate_every: 2, evaluate_tokens: 70, save_every: 2, clip: 0.5}
learning_rate: {warmup: 2}
plan: {microbatch_rows: 3}
precision: float32
sample: {tokens: 0}
output: run
"""


@pytest.fixture
def home(tmp_path, monkeypatch, timed_once):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for i in range(10):
        (tmp_path / "text" / f"{i}.txt").write_text(f"line {i} of a text\n" * (1 + i % 4))
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.setattr("outsize.train.setup.probe", lambda kind=None: known_hardware())
    return tmp_path


def trained(home, *sets):
    quiet = Console(quiet=True)
    assert run.start(resolve(home / "run.yaml", sets), quiet) == 0
    return home / "run"


def test_a_run_holds_from_its_first_values_and_from_a_checkpoint(home):
    directory = trained(home)
    found = replay(directory, None, None)
    assert found.holds and found.steps == 4, found.difference
    later = replay(directory, 2, None)
    assert later.holds and (later.first, later.steps) == (2, 2), later.difference
    shown = CliRunner().invoke(main, ["verify", "--run", "run", "--steps", "1"])
    assert shown.exit_code == 0 and "float32: holds; 1 step behind step 0" in shown.output
    records = [json.loads(x) for x in (directory / "metrics.jsonl").read_text().splitlines()]
    records[1]["loss"] *= 1 + 1e-4
    (directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    shown = CliRunner().invoke(main, ["verify", "--run", "run"])
    assert shown.exit_code == 1 and "step 2: loss is" in " ".join(shown.output.split())
    for words, what in (
        (["--run", "run", "--mesh", "data=2"], "mesh"),
        (["--from", "2"], "from"),
        (["--run", "run", "--from", "4"], "behind step 4"),
        (["--run", "text"], "no run in text"),
    ):
        refused = CliRunner().invoke(main, ["verify", *words])
        assert refused.exit_code == 2 and what in refused.output, refused.output
    for what, wrong in (("tokens", records[0]["tokens"] + 1), ("loss", math.nan)):
        told = [{**records[0], what: wrong}, *records[1:]]
        (directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, told)))
        difference = replay(directory, None, 1).difference
        assert difference is not None and difference.what == what
    (directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, records[:1] * 2)))
    with pytest.raises(OutsizeError, match="hold step 1 twice"):
        replay(directory, None, 1)


def test_rows_of_a_mixture_are_found_by_itself(home):
    (home / "more").mkdir()
    (home / "more" / "a.txt").write_text("".join(f"another line, number {i}\n" for i in range(30)))
    found = resolve(home / "run.yaml", ("data.path={text: 3, more: 1.5}", "train.seed=4")).config
    data = open_data(data_config(found, "bytes"))
    read = Read(found, data)
    assert data.train.shares and read.rows == 4
    stream = TrainStream(data.train, 4, 4, 16)
    for step in (0, 1, 255, 256, 700):
        mine, theirs = read.batch(step), stream.batch(step)
        assert torch.equal(mine.ids_BS, theirs.ids_BS) and mine.bounds == theirs.bounds
        assert torch.equal(mine.targets_BS, theirs.targets_BS)


def unclipped(monkeypatch):
    """AdamW does not see the first one: its step is as large whatever the gradient is times."""
    plain = run.recipe_of
    monkeypatch.setattr(run, "recipe_of", lambda config: replace(plain(config), clip=None))


def bare(monkeypatch):
    monkeypatch.setattr(run, "options_of", lambda config: PLAIN)


def shuffled(monkeypatch):
    plain = TrainStream.row
    monkeypatch.setattr(
        TrainStream, "row", lambda self, sample: plain(self, sample + 1 if sample >= 8 else sample)
    )


def steep(monkeypatch):
    plain = loop.rate_of
    monkeypatch.setattr(loop, "rate_of", lambda config, step: plain(config, min(step, 2)))


def repeated(monkeypatch):
    plain = Noise.masks

    def masks(self, tokens, features, name):
        return plain(replace(self, step=0), tokens, features, name)

    monkeypatch.setattr(Noise, "masks", masks)


def doubled(monkeypatch):
    from outsize.kernels import linear

    plain = linear.add_product

    def add(grad, a, b):
        plain(grad, a, b)
        plain(grad, a, b)

    monkeypatch.setattr(linear, "add_product", add)


def remainder(monkeypatch):
    """Rows of an evaluation that no microbatch divides are left out."""
    plain = Job.evaluate

    def evaluate(self, batch, rows):
        return plain(self, batch.rows(0, max(1, rows - 1)), max(1, rows - 1))

    monkeypatch.setattr(Job, "evaluate", evaluate)


@pytest.mark.parametrize(
    ("fault", "step", "what"),
    [
        (unclipped, 2, "validation_loss"),
        (bare, 1, "loss"),
        (shuffled, 3, "loss"),
        (steep, 4, "lr"),
        (repeated, 2, "loss"),
        (doubled, 1, "gradient_norm"),
        (remainder, 2, "validation_loss"),
    ],
)
def test_a_fault_of_training_is_seen_where_it_begins(home, monkeypatch, fault, step, what):
    with monkeypatch.context() as planted:
        fault(planted)
        directory = trained(home, f"train.steps={max(2, step)}", "train.save_every=0")
    found = replay(directory, None, None)
    assert found.difference is not None
    assert (found.difference.step, found.difference.what) == (step, what), found.difference
