"""A plan as a noun: made, written, read again, given to prepare and to train."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rates import known_hardware
from rich.console import Console

import outsize
from outsize import OutsizeError
from outsize.collectives import Mesh
from outsize.collectives.threads import play
from outsize.models.build import build
from outsize.models.families import parse
from outsize.models.presets import PRESETS
from outsize.optim import AdamW
from outsize.plan import Precision, Sharding, from_yaml, to_yaml
from outsize.plan.file import PlanFile, read_plan, write_plan
from outsize.search import PlanRequest, forecaster_of
from outsize.search.candidates import candidates
from outsize.train.planned import file_of, with_plan
from outsize.train.resolve import resolve
from outsize.train.run import start
from outsize.train.setup import set_up

KEYS = {"train.sequence": 32, "train.batch_tokens": 128, "plan.microbatch_rows": 2}


def decoder(name: str = "tiny"):
    return build(parse(dict(PRESETS[name])), 0)


@pytest.fixture
def planned(monkeypatch, known_rates) -> outsize.Plan:
    return outsize.plan("tiny", settings=KEYS, memory="16MiB")


def test_a_plan_is_that_of_the_command_and_is_simulated(planned) -> None:
    assert isinstance(planned, outsize.Plan)
    sets = [f"{name}={value}" for name, value in KEYS.items()]
    setup = set_up(resolve(None, ["model=tiny", *sets, "memory=16MiB"]))
    assert planned == setup.plan
    trace = outsize.simulate("tiny", planned)
    assert isinstance(trace, outsize.Trace) and trace.peak() == setup.forecast.peak
    assert trace.span() == pytest.approx(setup.forecast.seconds)
    with pytest.raises(OutsizeError, match=r"4 segments, and model small has 8"):
        outsize.simulate("small", planned)
    with pytest.raises(OutsizeError, match=r"expected an outsize\.Plan"):
        outsize.simulate("tiny", 3)  # type: ignore[arg-type]


def test_packages_that_are_called_stay_packages() -> None:
    from outsize.plan import Plan
    from outsize.simulate import Forecast

    assert outsize.plan.Plan is Plan is outsize.Plan and outsize.simulate.Forecast is Forecast


def test_a_file_gives_the_plan_back(planned, tmp_path: Path) -> None:
    config = decoder().config
    write_plan(tmp_path / "p.yaml", file_of(planned, "tiny", config))
    assert read_plan(tmp_path / "p.yaml").plan == planned
    (tmp_path / "old.yaml").write_text(to_yaml(planned))  # as runs keep it
    assert read_plan(tmp_path / "old.yaml") == PlanFile(planned, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("version: 7\nplan: {}", "version 7 of plan files; expected 1 or 2"),
        ("steps: 3", "is no plan"),
        ("[1]", "is no plan"),
        ("version: 2\nplan: {segments: 4, stages: [], rows: 0}", "p.yaml: "),
        ("version: 2\nplan: {segments: 4, stages: [], wings: 2}", "unknown key"),
    ],
)
def test_bad_files_are_refused_in_one_line(text, said, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(OutsizeError, match=said) as caught:
        read_plan(tmp_path / "p.yaml")
    assert "\n" not in str(caught.value)


def test_a_run_trains_under_a_plan_as_it_is(runs, planned) -> None:
    """Its numbers are those of a run that says the same keys."""
    sets = {name.replace(".", "__"): value for name, value in KEYS.items()}
    steps = {"train__steps": 3, "sample__tokens": 0, "train__save_every": 0}
    runs.train(**sets, **steps, output=runs.home / "plain")
    recompute = [replace(s, recompute=("block",) * (0 < s.first < 3)) for s in planned.stages]
    plan = replace(planned, stages=tuple(recompute))
    path = runs.home / "p.yaml"
    write_plan(path, file_of(plan, "tiny", decoder().config))
    said = [s for s in runs.sets(**steps, plan_file=path) if s.split("=")[0] not in KEYS]
    assert start(with_plan(resolve(None, said)), Console(quiet=True)) == 0
    kept = from_yaml((runs.home / "run" / "plan.yaml").read_text())
    assert kept == replace(plan, budget=None)
    weights = [dict(outsize.load(runs.home / name).named_parameters()) for name in ("plain", "run")]
    for name, value in weights[0].items():
        assert torch.allclose(value, weights[1][name], rtol=0, atol=1e-6), name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "small"}, "4 segments, and model small has 8"),
        ({"model.vocabulary": 512}, "was made for tiny, and model tiny has other parameters"),
        ({"train.sequence": 64}, "train.sequence is 64 (--set), and the plan in"),
        ({"workers": 2}, "workers is 2, and the plan in"),
        ({"memory": "64KiB"}, "too small for the plan"),
    ],
)
def test_a_plan_for_another_run_is_refused(changes, said, planned, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    setup = set_up(resolve(None, ["model=tiny", *[f"{k}={v}" for k, v in KEYS.items()]]))
    write_plan(path, file_of(planned, "tiny", setup.subject.config))
    values = {"model": "tiny", "plan_file": path, **changes}
    with pytest.raises(OutsizeError) as caught:
        set_up(with_plan(resolve(None, [f"{name}={value}" for name, value in values.items()])))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_prepare_takes_a_plan(planned, tmp_path: Path) -> None:
    model, ids = decoder(), torch.randint(0, 250, (4, 32))
    plain = outsize.prepare(decoder(), "adamw", microbatches=2)
    plan = replace(planned, budget=None)
    job = outsize.prepare(model, "adamw", plan=plan)
    for _ in range(2):
        assert float(job.step(ids)) == pytest.approx(float(plain.step(ids)), rel=1e-5)
    assert job.plan == plan and job.forecast is not None
    write_plan(tmp_path / "p.yaml", file_of(planned, "tiny", model.config))
    again = outsize.prepare(decoder(), "adamw", plan=tmp_path / "p.yaml")
    again.step(ids)
    assert again.plan == planned


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda m, p: outsize.prepare(m, "adamw", plan=p, microbatches=2), "microbatches is given"),
        (lambda m, p: outsize.prepare(m, "adamw", plan=3), "plan is a int; expected an outsize"),
        (lambda m, p: outsize.prepare(decoder("small"), "adamw", plan=p), "4 segments, and this"),
        (
            lambda m, p: outsize.prepare(m, "adamw", plan=p).step(torch.ones(3, 32).long()),
            "plan is for rows 4, and the batch has 3",
        ),
        (
            lambda m, p: outsize.prepare(m, "adamw", plan=p).step(torch.ones(4, 16).long()),
            "plan is for sequence 32, and the batch has 16",
        ),
        (lambda m, p: outsize.prepare(m, "adamw", "1MiB", plan=p).step(torch.ones(4, 32).long()),
         "too small"),
    ],
)  # fmt: skip
def test_prepare_refuses_a_plan_of_something_else(planned, how, said) -> None:
    with pytest.raises(OutsizeError, match=said):
        how(decoder(), planned)


def test_prepare_refuses_a_plan_of_more_workers(monkeypatch) -> None:
    plan = outsize.plan("tiny", settings=KEYS, mesh="data=2")
    with pytest.raises(OutsizeError, match="plan is for 2 workers, and 1 started"):
        outsize.prepare(decoder(), "adamw", plan=plan)


def test_prepare_asks_the_planner_of_runs(monkeypatch) -> None:
    """The same plans at every budget, down to where a block's tokens are computed in parts."""
    monkeypatch.setattr("outsize.train.prepared.making.probe", lambda device: known_hardware())
    model = decoder()
    request = PlanRequest(
        2, 256, Precision.named("float32"), AdamW(), microbatch_rows=1, documents=(0, 256),
        shards=Sharding(),
    )  # fmt: skip
    forecaster = forecaster_of(model.config, request, known_hardware())
    plans = list(candidates(request, len(model.blocks) + 2))
    assert plans[-1].sequence_chunk and plans[-1].mlp_tile
    for plan in (plans[0], plans[-1]):
        peak = forecaster.forecast(plan).peak
        budget = peak + (0 if plan == plans[-1] else 1 << 16)
        job = outsize.prepare(decoder(), "adamw", budget, microbatches=2)
        job.step(torch.randint(0, 250, (2, 256)))
        assert replace(job.plan, budget=None) == plan
        assert budget >= job.forecast.peak >= job.report.trace.peak()
        job.close()


def test_two_workers_train_under_a_plan_file(runs) -> None:
    """The numbers of one worker without one; prepare takes the same file."""
    plan = outsize.plan("tiny", settings=KEYS, mesh="data=2", hardware=known_hardware())
    path = runs.home / "p.yaml"
    write_plan(path, file_of(plan, "tiny", decoder().config))
    steps = {"train__steps": 2, "sample__tokens": 0, "train__save_every": 0}
    keys = {name.replace(".", "__"): value for name, value in KEYS.items()}
    runs.train(**keys, **steps, output=runs.home / "one")
    sets = [s for s in runs.sets(**steps) if s.split("=")[0] not in KEYS]
    words = [word for one in sets for word in ("--set", one)]
    process = runs.command("train", "--plan", str(path), "--workers", "2", *words)
    code, said = runs.ended(process)
    assert code == 0, said
    kept = from_yaml((runs.home / "run" / "plan.yaml").read_text())
    assert kept == replace(plan, budget=None) and kept.mesh == Mesh(data=2)
    weights = [dict(outsize.load(runs.home / name).named_parameters()) for name in ("one", "run")]
    for name, value in weights[0].items():
        assert torch.allclose(value, weights[1][name], rtol=0, atol=1e-6), name


def test_two_workers_prepare_under_a_plan_file(near, monkeypatch, tmp_path: Path) -> None:
    plan = outsize.plan("tiny", settings=KEYS, mesh="data=2", hardware=known_hardware())
    write_plan(tmp_path / "p.yaml", file_of(plan, "tiny", decoder().config))
    monkeypatch.setattr("outsize.train.prepared.making.probe", lambda device: known_hardware())
    ids = torch.randint(0, 250, (4, 32))
    alone = outsize.prepare(decoder(), "adamw", microbatches=2)
    wanted = [float(alone.step(ids)) for _ in range(2)]
    models = [decoder(), decoder()]
    monkeypatch.setenv("WORLD_SIZE", "2")

    def work(world):
        mine = ids[2 * world.rank : 2 * world.rank + 2]
        job = outsize.prepare(models[world.rank], "adamw", plan=tmp_path / "p.yaml")
        losses = [float(job.step(mine)) for _ in range(2)]
        return losses, job.plan

    for losses, made in play(Mesh(data=2), near(work)):
        assert losses == pytest.approx(wanted, rel=1e-5) and made == plan


def test_a_worker_with_another_model_than_the_first_is_refused(runs, monkeypatch) -> None:
    """What the first worker has seen to of its model, nobody sees to again."""
    monkeypatch.setattr("outsize.train.run.mark", lambda config: str(os.getpid()))
    sets = runs.sets(train__steps=2, sample__tokens=0, train__save_every=0)
    words = [word for one in sets for word in ("--set", one)]
    code, said = runs.ended(runs.command("train", "--workers", "2", *words))
    assert code == 2 and "rank 1: model: 'tiny' is another model here than on rank 0" in said
