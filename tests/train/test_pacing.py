"""Paces of workers that compute at once: measured by all before a pipeline starts, and used for the
time that is predicted of a step."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
import torch
from clocks import Clock
from rich.console import Console
from threads import play
from torch.distributed import HashStore

import outsize
from outsize.cli.main import main
from outsize.collectives import Mesh
from outsize.hardware.host import Memory
from outsize.launch import Heartbeat, Mailbox, WorkerGroup
from outsize.models.build import build
from outsize.models.families import parse
from outsize.models.presets import SHAPES
from outsize.simulate.shared_cores import on_cores
from outsize.simulate.worker_profile import durations
from outsize.train import timing
from outsize.train.opening import data_of, streamed
from outsize.train.resolve import resolve
from outsize.train.setup import Setup, set_up
from outsize.train.timing import calibrated, keep_pace, no_pace


@pytest.fixture(autouse=True)
def threads():
    """Paces are measured with the run's number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def setup(runs) -> Setup:
    return set_up(resolve(None, runs.sets(mesh="pipeline=2", threads=1)))


def together(setup: Setup) -> Setup:
    """What the first worker finds while the others keep pace."""
    mesh = setup.plan.mesh
    stream = streamed(setup, data_of(setup, Console(file=io.StringIO()), WorkerGroup())).stream
    store = HashStore()

    def run(world):
        size, rank = mesh.size, world.rank
        post = Mailbox(rank, size, rank, size, 0, store, Heartbeat(), lambda _: None)
        crew = WorkerGroup(world, post.pulse, post)
        return keep_pace(crew) if world.rank else calibrated(setup, stream, crew)

    return play(mesh, run)[0]


def test_a_step_is_predicted_by_the_paces_that_were_measured(setup, monkeypatch):
    """Work on one core for both: a step takes what all actions take alone, one after the other."""
    known: list[dict] = []

    def alike(*words):
        known.append(dict.fromkeys(durations(*words), 0.005))
        return known[-1]

    clock = Clock(monkeypatch)
    monkeypatch.setattr(timing, "PACING_SECONDS", 0.8)  # as the product has it
    monkeypatch.setattr(timing, "durations", alike)
    monkeypatch.setattr(timing, "work", lambda *words: lambda: clock.works_in_turn(0.005))
    found = together(setup)
    assert found.paces == pytest.approx((1.0, 0.5))
    same = on_cores(setup.forecast, known[0], found.paces)
    assert found.forecast.seconds == same.seconds
    apart = on_cores(setup.forecast, known[0], (1.0, 1.0))
    assert found.forecast.seconds > 1.1 * apart.seconds
    one = on_cores(setup.forecast, known[0], (1.0,))
    assert found.forecast.seconds == pytest.approx(one.seconds, rel=0.01)


def test_the_models_own_work_is_done_by_all(setup):
    found = together(setup)
    assert len(found.paces) == 2 and found.paces[0] == 1.0 and found.paces[1] > 0
    assert found.forecast.trace.span() == found.forecast.seconds > 0


def test_copies_of_a_pipeline_are_timed_too(runs):
    setup = set_up(resolve(None, runs.sets(mesh="pipeline=2,data=2", threads=1)))
    found = together(setup)
    assert len(found.paces) == 4 and found.paces[0] == 1.0
    assert found.forecast.seconds == found.forecast.trace.span() != setup.forecast.seconds
    assert found.forecast.peak == setup.forecast.peak


@pytest.mark.parametrize(
    "more",
    [
        {"mesh": "tensor=2", "adapt__loha__rank": 2},
        {"mesh": "pipeline=2", "adapt__prompt__tokens": 3, "weights": "int4:16"},
    ],
)
def test_all_workers_time_the_model_that_is_trained(runs, more):
    """Of a directory too: with its adapter, virtual tokens and codes."""
    base = runs.home / "base"
    outsize.save(build(parse({**SHAPES.get("tiny")}), seed=2), base)
    changes = {"model__name": base, "threads": 1}
    setup = set_up(resolve(None, runs.sets(**changes, **more)))
    told = timing.Subject(*timing._subject(setup, setup.plan))
    assert told.resolved()[2] == setup.subject.config
    assert together(setup).forecast.seconds > 0


def test_what_takes_long_is_left_out(setup, monkeypatch):
    monkeypatch.setattr(timing, "LONG_SECONDS", 0.0)
    assert together(setup).paces == ()
    monkeypatch.setattr(timing, "TRIAL_SECONDS", 0.0)
    assert together(setup) == setup


def test_nobody_waits_where_there_is_nothing_to_measure(setup):
    store = HashStore()

    def run(world):
        post = Mailbox(world.rank, 2, world.rank, 2, 0, store, Heartbeat(), lambda _: None)
        crew = WorkerGroup(world, post.pulse, post)
        (keep_pace if world.rank else no_pace)(crew)

    assert play(Mesh(pipeline=2), run) == [None, None]


def test_a_run_says_its_paces(runs, capfd):
    words = [w for s in runs.sets(train__steps=1, sample__tokens=0) for w in ("--set", s)]
    with pytest.raises(SystemExit) as ended:
        main(["train", *words, "--mesh", "pipeline=2"])
    printed = capfd.readouterr().out
    assert ended.value.code == 0
    said = re.search(r"alone being 1: 1: 1\.00, 2: \d+\.\d\d\n", printed)
    assert said is not None, printed


def test_freed_memory_is_kept_where_there_is_room_for_it(setup, monkeypatch):
    done: list[str] = []
    monkeypatch.setattr(timing, "keep_freed", lambda: done.append("kept"))
    monkeypatch.setattr(timing, "own_mappings", lambda: done.append("given back"))
    plan = setup.plan
    monkeypatch.setattr(timing, "memory", lambda: Memory(2**40, plan.mesh.size * 2**31))
    timing.set_heap(plan)
    timing.set_heap(replace(plan, budget=2**30))
    timing.set_heap(replace(plan, budget=2**30 + 1))
    assert done == ["kept", "kept", "given back"]
    below = replace(plan.stages[0].rest, optimizer="disk")
    stages = (replace(plan.stages[0], rest=below), *plan.stages[1:])
    timing.set_heap(replace(plan, stages=stages))
    assert done == ["kept", "kept", "given back"]
