"""`outsize verify`: what it prints, its exit codes, its targets, threads and processes."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from rates import known_hardware
from torch import nn

from outsize.cli.main import main
from outsize.verify import Adopted
from outsize.verify.draw import Drawn, draws

RUN = """
model: tiny
data: {path: text, validation: 0.1}
train: {sequence: 16, batch_tokens: 96, steps: 2, label_smoothing: 0.1}
precision: float64
sample: {tokens: 0}
output: run
"""


@pytest.fixture
def home(tmp_path, monkeypatch, timed_once):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for i in range(8):
        (tmp_path / "text" / f"{i}.txt").write_text(f"line {i} of a text\n" * (60 + i))
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.setattr("outsize.train.setup.probe", lambda kind=None: known_hardware())
    return tmp_path


def invoke(*words):
    result = CliRunner().invoke(main, ["verify", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_run_on_a_mesh(home):
    words = (
        "run.yaml",
        "--mesh",
        "data=2,tensor=2",
        "--zero",
        3,
        "--set",
        "plan.microbatch_rows=2",
    )
    more = ("--sequence-parallel", "--resume", "--json", "--steps", 2)
    found = json.loads(invoke(*words, *more).stdout)
    assert found["holds"] and found["limit"] == 1e-10
    assert found["bytes"]["states"] == pytest.approx(found["bytes"]["states_formula"], rel=1e-3)
    assert found["bytes"]["compute"] == pytest.approx(found["bytes"]["compute_formula"], rel=1e-3)
    own = found["runs"]["float64"]["parameters"]["epilogue.head.weight"]
    assert own["ratio"] == pytest.approx(1, abs=1e-12) and own["gradient"] < 1e-10


def test_a_run_on_a_pipeline(home):
    words = ("run.yaml", "--mesh", "pipeline=2,data=2", "--set", "plan.pipeline=zb-h1")
    more = ("--set", "plan.microbatch_rows=1", "--zero", 1, "--json", "--steps", 2)
    found = json.loads(invoke(*words, *more).stdout)
    assert found["holds"]
    for name in ("states", "stages", "compute"):
        assert found["bytes"][name] == pytest.approx(found["bytes"][f"{name}_formula"], rel=1e-3)
    assert found["bytes"]["stages"] == 2 * 6 * 16 * 64 * 8  # there and back: rows, tokens, features


def test_a_run_whose_vocabulary_is_cut_over_a_pipeline(home):
    words = ("run.yaml", "--mesh", "pipeline=3", "--resume")
    words = (*words, "--set", "plan.pipeline=zb-h1+vocabulary:2")
    more = ("--set", "train.batch_tokens=112", "--set", "plan.loss_chunk=8")
    shown = invoke(*words, *more)
    assert shown.exit_code == 0, shown.output
    assert "blocks.1.mlp.down.weight" in shown.output and "float64: holds" in shown.output
    assert "bytes of a step, all workers: states" in shown.output
    assert "between stages" in shown.output


def test_a_plan_that_is_wrong_is_said_and_exits_with_1(home, monkeypatch):
    from outsize.runtime.storage.shard_groups import ShardGroups

    plain = ShardGroups.reduce

    def reduce(self, index, chunk, last):
        plain(self, index, chunk, last)
        chunk.gradients.mul_(2)

    monkeypatch.setattr(ShardGroups, "reduce", reduce)
    shown = invoke("run.yaml", "--workers", 2, "--zero", 1, "--set", "optimizer.name=sgd",
                   "--set", "train.clip=null", "--steps", 1)  # fmt: skip
    assert shown.exit_code == 1
    assert "float64: does not hold" in shown.output and "differs" in shown.output
    line = next(x for x in shown.output.splitlines() if x.startswith("epilogue.norm.weight"))
    assert line.split()[1] == "2"


def test_a_runs_directory_and_a_models(home):
    """Weights and plan of the run, on another mesh than it had."""
    assert CliRunner().invoke(main, ["train", "run.yaml"]).exit_code == 0
    found = json.loads(invoke("run", "--workers", 2, "--json", "--steps", 1).stdout)
    assert found["holds"]
    first = found["runs"]["float64"]["losses"][0][0]
    fresh = json.loads(invoke("run.yaml", "--json", "--steps", 1).stdout)
    assert first < fresh["runs"]["float64"]["losses"][0][0], "the trained weights"
    model = ("run/step-00000002", "--set", "data.path=text", "--set", "train.sequence=16")
    more = ("--set", "train.batch_tokens=64", "--set", "optimizer.name=muon")
    stored = invoke(*model, *more, "--mesh", "tensor=2", "--steps", 1)
    assert stored.exit_code == 0, stored.output


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("run.yaml", "--set", "plan.approximate=[zeroth-order]"), "holds zeroth-order, whose"),
        (("nowhere:factory",), "nowhere:factory cannot be imported"),
        (("math:pi",), "math:pi is a float"),
        (("math:gcd",), "gives a int; expected"),
        (("run.yaml", "--mesh", "tensor=3"), "attention heads do not divide evenly over 3"),
        (("run.yaml", "--workers", "3", "--mesh", "data=2"), "has 2 workers, and there are 3"),
        (("run.yaml", "--workers", "2", "--shards", "1,x"), "expected three numbers"),
        (("nonsense",), "neither a preset nor a directory"),
        (("run.yaml", "--steps", "1", "--resume"), "expected --steps 2 or more"),
    ],
)
def test_bad_input(home, words, what):
    shown = invoke(*words)
    assert shown.exit_code == 2 and what in shown.output, shown.output
    assert len(shown.output.strip().splitlines()) == 1


def test_random_draws_and_how_to_repeat_them(home, monkeypatch):
    shown = invoke("--random", 2, "--seed", 11, "--workers", 2)
    assert shown.exit_code == 0 and "2 of 2 draws hold in float64" in shown.output
    from outsize.verify import many

    monkeypatch.setattr(many, "LIMIT", 0.0)
    monkeypatch.setattr(many, "own_rounding", lambda case: 0.0)
    monkeypatch.setattr(many.Verdict, "holds", property(lambda self: False))
    shown = invoke("--random", 1, "--seed", 5, "--workers", 2)
    assert shown.exit_code == 1 and "0 of 1 draws hold" in shown.output
    assert "outsize verify --random 1 --seed 5 --workers 2" in shown.output
    found = json.loads(invoke("--random", 1, "--seed", 5, "--workers", 2, "--json").stdout)
    assert found["faults"][0]["again"] == "outsize verify --random 1 --seed 5 --workers 2"


def test_draws_say_how_far_they_are_and_what_there_was_when_they_are_interrupted(monkeypatch):
    from outsize.verify import many

    drawn = next(one for one in draws(1, 1) if isinstance(one, Drawn))

    def interrupted(*_):
        yield from (many.Outcome(drawn, 1e-12, "", (), 1.0) for _ in range(41))
        raise KeyboardInterrupt

    monkeypatch.setattr(many, "outcomes", interrupted)
    shown = invoke("--random", 100, "--workers", 1)
    assert shown.exit_code == 130
    assert shown.stdout.splitlines()[:2] == ["20 of 100 draws", "40 of 100 draws"]
    assert "41 of 41 draws hold in float64" in shown.stdout


# -- somebody's own module -------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.last = nn.Linear(8, 3)

    def forward(self, x, target):
        h = self.first(x)
        for layer in self.layers:
            h = h + layer(h).tanh()
        return self.last(h)


def factory() -> Adopted:
    """What a user's factory looks like."""

    def batch(step, rows):
        generator = torch.Generator().manual_seed(step)
        target = torch.randint(0, 3, (rows,), generator=generator)
        target[::3] = -100
        return {"x": torch.randn(rows, 5, generator=generator), "target": target}

    def loss(output, batch):
        return nn.functional.cross_entropy(output, batch["target"], reduction="sum")

    def count(batch):
        return (batch["target"] != -100).sum().item()

    return Adopted(Net(), batch, loss, count, "layers.*")


@pytest.fixture
def importable(monkeypatch):
    monkeypatch.setitem(sys.modules, "their_model", sys.modules[__name__])


def test_a_factory_on_a_pipeline(importable):
    shown = invoke("their_model:factory", "--mesh", "pipeline=2,data=2", "--zero", 1, "--resume")
    assert shown.exit_code == 0, shown.output
    assert "between stages" in shown.output and "no formula" in shown.output


def test_a_factory(importable):
    """Without shards: as below, of a module that computes in float32."""
    shown = invoke("their_model:factory", "--workers", 3, "--zero", 3, "--resume")
    assert shown.exit_code == 0, shown.output
    assert "layers.2.bias" in shown.output and "float32: from plain float64" in shown.output


class Float32Norm(nn.Module):
    """As many norms of today's models: it sums in float32 whatever it is given."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 1.5))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (wide * self.weight.float()).to(x.dtype)


def narrow_factory() -> Adopted:
    made = factory()
    for index, layer in enumerate(made.model.layers):
        made.model.layers[index] = nn.Sequential(Float32Norm(), layer)
    return made


def test_a_module_that_computes_in_float32_is_named(importable, monkeypatch):
    words = ("their_model:narrow_factory", "--workers", 2, "--steps", 1)
    shown = invoke(*words)
    assert shown.exit_code == 0, shown.output
    line = (
        "layers.0.0 and 2 more compute in float32 inside, whatever they are given, so that 0.0001"
    )
    assert line in shown.output and "differs" not in shown.output
    found = json.loads(invoke(*words, "--json").stdout)
    assert found["narrow"] == [f"layers.{i}.0" for i in range(3)] and found["limit"] == 1e-4
    assert found["holds"] and found["runs"]["float64"]["worst"] > 1e-10
    judging = importlib.import_module("outsize.verify.verify")
    compared = judging.compare
    monkeypatch.setattr(judging, "compare", lambda mine, *rest: compared(_off(mine), *rest))
    wrong = invoke(*words)
    assert wrong.exit_code == 1 and "float64: does not hold" in wrong.output


def _off(steps):
    return [replace(step, loss=step.loss * 1.001) for step in steps]


def test_a_factory_on_the_tensor_axis_is_refused(importable):
    shown = invoke("their_model:factory", "--mesh", "tensor=2")
    assert shown.exit_code == 2 and "Net is an adopted module" in shown.output


# -- processes -------------------------------------------------------------------------------------


def test_processes(home):
    """Real workers: a draw, a case of their own, and a refusal, which is one line."""
    draw = invoke("--random", 1, "--seed", 3, "--workers", 4, "--processes")
    assert draw.exit_code == 0, draw.stderr
    assert "1 of 1 draws hold" in draw.stdout
    words = ("--set", "data.path=text", "--set", "train.sequence=16", "--workers", 2, "--zero", 2)
    named = invoke(*words, "--processes", "--json", "--steps", 2)
    assert named.exit_code == 0, named.stderr
    assert json.loads(named.stdout)["holds"]
    refused = invoke(*words, "--processes", "--set", "plan.zero=9")
    assert refused.exit_code == 2 and refused.stderr.startswith("error: ")
    assert refused.stderr.count("\n") == 1
