"""Blocks that all workers of a run time at once before it begins, and the step they foretell."""

from __future__ import annotations

import importlib
import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch.distributed import HashStore

from outsize.collectives.threads import play
from outsize.launch import Heartbeat, Mailbox, WorkerGroup
from outsize.simulate.calibrate import agreed, blocks
from outsize.train.opening import data_of, streamed
from outsize.train.resolve import resolve
from outsize.train.setup import Setup, set_up
from outsize.train.timing import calibrated, keep_pace

calibration = importlib.import_module("outsize.simulate.calibrate")  # not the function of its name

# Seconds of every action of a stage, as workers 0 and 1 have them in each of three steps.
DECLARED = {
    "FORWARD": (1.0, 1.5), "LOSS": (2.0, 2.0), "BACKWARD": (4.0, 3.0), "UPDATE": (0.25, 0.25),
    "NORM": (0.5, 9.0), "REDUCE.gradients": (9.0, 0.75), "COLLECT.parameters": (0.125, 9.0),
    "GATHER.parameters": (0.5, 9.0),
}  # fmt: skip


@pytest.fixture(autouse=True)
def threads():
    """Blocks are timed with the run's number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def together(runs, mesh: str, **changes: object) -> tuple[Setup, Setup]:
    """A setup, and what the first worker finds while the others take part."""
    setup = set_up(resolve(None, runs.sets(mesh=mesh, threads=1, **changes)))
    stream = streamed(setup, data_of(setup, Console(file=io.StringIO()), WorkerGroup())).stream
    store, size = HashStore(), setup.plan.mesh.size

    def run(world):
        post = Mailbox(world.rank, size, world.rank, size, 0, store, Heartbeat(), lambda _: None)
        crew = WorkerGroup(world, post.pulse, post)
        return keep_pace(crew) if world.rank else calibrated(setup, stream, crew)

    return setup, play(setup.plan.mesh, run)[0]


def declared(monkeypatch) -> None:
    """Steps take what is declared; they are still made, and have the actions that they have."""
    real = calibration._steps

    def steps(job, batch):
        return [{name: DECLARED[name[1]][job.world.rank] for name in real(job, batch)[0]}] * 3

    monkeypatch.setattr(calibration, "_steps", steps)


@pytest.mark.parametrize("zero", [0, 1])
def test_a_step_is_the_sum_of_its_blocks(runs, monkeypatch, zero):
    """Of four stages: the slowest worker's passes and updates one after the other, and of what
    workers say to each other what no computing hides, as whoever comes last to it has it."""
    declared(monkeypatch)
    setup, found = together(runs, "data=2", plan__zero=zero)
    assert len(setup.plan.stages) == 4 and setup.plan.microbatches == 1
    passes = 3 * 1.5 + 2.0 + 4 * 4.0
    collected = 0.125 if zero else 0.0
    norm = 0.5 * setup.forecast.parameters / elements(setup)
    assert found.forecast.seconds == pytest.approx(passes + 0.75 + norm + 4 * 0.25 + collected)
    assert found.forecast.peak == setup.forecast.peak


def elements(setup: Setup) -> int:
    """Of the model with one layer of each sort: its own layers are two of one."""
    kinds = dict(setup.forecast.segments)
    (layer,) = {kinds[name]["parameters"] for name in kinds if name.startswith("block")}
    whole = sum(kinds[name]["parameters"] for name in kinds)
    return round(setup.forecast.parameters * (whole - layer) / whole)


def test_all_make_as_many_steps_as_the_slowest_finds_enough(runs, monkeypatch):
    asked: list[float] = []
    made: dict[int, int] = {}
    real = calibration._steps

    def steps(job, batch):
        begun = job.step

        def step(*words, **keys):
            loss = begun(*words, **keys)
            made[job.world.rank] = made.get(job.world.rank, 0) + 1
            job.report = replace(job.report, seconds=1.0 + job.world.rank)
            return loss

        job.step = step
        return real(job, batch)

    monkeypatch.setattr(calibration, "_steps", steps)
    monkeypatch.setattr(calibration, "counted", lambda seconds: asked.append(seconds) or 4)
    together(runs, "data=2")
    assert made == {0: 5, 1: 5} and asked == [2.0, 2.0]


@pytest.mark.parametrize("mesh", ["context=2", "data=2,tensor=2"])
def test_every_mesh_without_a_pipeline_times_its_blocks(runs, mesh):
    setup, found = together(runs, mesh)
    assert found.forecast.seconds == found.forecast.trace.span() > 0
    assert found.forecast is not setup.forecast and found.forecast.peak == setup.forecast.peak
    names = [(e.lane, e.kind, e.stage, e.part) for e in setup.forecast.trace.events]
    both = [(e.lane, e.kind, e.stage, e.part) for e in found.forecast.trace.events]
    assert sorted(both) == sorted(names)


def test_workers_time_what_they_hold(runs, monkeypatch):
    """Rows are cut over the data axis; classes of the last matrix over the tensor axis."""
    held: dict[str, set[tuple[int, int]]] = {}
    real = calibration._steps

    def steps(job, batch):
        last = job.plan.segments - 1
        numel = sum(c.table.numel for c in job.chunks if c.table.segment == last)
        held.setdefault(str(job.plan.mesh), set()).add((len(batch.bounds), numel))
        return real(job, batch)

    monkeypatch.setattr(calibration, "_steps", steps)
    setups = [together(runs, mesh)[0] for mesh in ("data=2", "tensor=2")]
    (by_rows,), (by_weights,) = held.values()
    assert by_rows[0] * 2 == by_weights[0] == setups[0].plan.rows
    assert 0.5 <= by_weights[1] / by_rows[1] < 0.52  # its norm is not cut


def test_unlike_shares_of_rows_are_timed_as_they_are(runs):
    setup = set_up(resolve(None, runs.sets(mesh="data=2", threads=1)))
    shares = (setup.plan.rows - 1, 1)
    plan = replace(setup.plan, microbatch_rows=setup.plan.rows, row_shares=shares)
    assert blocks(plan, setup.subject.config).plan.row_shares == shares
    two = replace(plan, rows=8, row_shares=(6, 2), microbatch_rows=3)
    assert two.microbatches == 2
    chosen = blocks(two, setup.subject.config).plan
    assert chosen.row_shares == (3, 1) and chosen.microbatches == 1


def test_the_slowest_computes_and_the_last_to_come_waits_for_nobody():
    assert agreed(("compute", "FORWARD", 1), [[1.0, 9.0, 2.0], [3.0, 2.5, 2.0]]) == 2.5
    assert agreed(("compute", "NORM", -1), [[5.0, 1.0, 4.0], [1.0, 5.0, 2.0]]) == 1.0
    assert agreed(("network", "REDUCE.gradients", 1), [[5.0, 1.0, 4.0], [1.0, 5.0, 2.0]]) == 1.0
