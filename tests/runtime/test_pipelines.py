"""Workers of a pipeline, as threads: the numbers of one worker, whatever the schedule.

Two workers with everything else that a plan says, step after step: tests/verify/test_matrix.py;
one step tells the schedules and their stages apart."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from piped import SEGMENTS, check, model, piped
from plain import batches, loss_of
from streamed import resting, small
from subjects import SEQUENCE, VOCAB
from threads import play

from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.optim import AdamW
from outsize.optim.parse import parse
from outsize.parallel.divide import divide
from outsize.plan import Pipelined, Plan, Stage, zero
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.schedule import Kind, Schedule, prove

# With the vocabulary cut where the matrix has two workers of the schedule without.
CUT = {"interleaved:2": 1, "zb-v": 2, "chimera": 1}
ONE_EACH = ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-2p", "chimera", "dualpipe")
SEVERAL = (
    "interleaved:2", "breadth-first:2", "zb-v", "v-half", "v-min", "hanayo:1", "bitpipe:2",
    "dualpipe-v",
)  # fmt: skip


@pytest.mark.parametrize("schedule", [*ONE_EACH, *SEVERAL])
def test_four_workers_give_the_numbers_of_one(schedule):
    """As many stages as its workers need, or one more; one microbatch more than workers, or as many
    as it needs."""
    segments, microbatches = 5 if schedule in ONE_EACH else 8, 8 if "dual" in schedule else 5
    said = Pipelined(schedule, vocabulary=CUT.get(schedule, 0))
    plan = piped(schedule, 4, microbatches, segments=segments, pipeline=said)
    check(plan, "llama, untied", steps=1)


def test_with_both_other_axes():
    mesh = Mesh(2, 2, 2)
    changes = {"shards": zero(3, 2), "sequence_parallel": True}
    check(piped("interleaved:2", 2, 2, mesh=mesh, segments=5, **changes), steps=1)


MIXED = (
    Stage(0, 1), Stage(1, 2, ("attention",)), Stage(2, 4, ("block",)), Stage(4, 5, ("mlp",)),
    Stage(5, 6, ("block",)), Stage(6, 7),
)  # fmt: skip
WAYS = {
    "uneven": {"pipeline": Pipelined("1f1b", (4,))},
    "the embedding alone": {"pipeline": Pipelined("1f1b", (1,))},
    "one block a stage": {"mesh": Mesh(pipeline=6), "pipeline": Pipelined("1f1b"), "segments": 6},
}


@pytest.mark.parametrize("changes", WAYS.values(), ids=WAYS)
def test_with_the_rest_of_a_plan(changes):
    check(piped("1f1b", 2, 4, **{"segments": 5, **changes}), steps=1)


@pytest.mark.parametrize("schedule", ["zb-h1", "dualpipe"])
def test_recomputed_stages_whose_gradients_come_apart(schedule):
    check(piped(schedule, segments=7, stages=MIXED), steps=1)


FROZEN = {
    "first stages": lambda name, _: "prologue" in name or ".0." in name,
    "all but the head": lambda name, _: "epilogue" not in name,
    "biases and norms": lambda name, p: p.ndim == 2,
    "one stage between": lambda name, _: ".1." in name,
    "first worker": lambda name, _: not ("epilogue" in name or ".2." in name),
}


@pytest.mark.parametrize(
    ("frozen", "schedule"),
    list(zip(FROZEN.values(), ("1f1b", "zb-h1", "chimera", "zb-h1", "1f1b"), strict=True)),
    ids=FROZEN,
)
def test_frozen_parameters(frozen, schedule):
    check(piped(schedule, 2, 3, segments=5), "llama, untied", frozen=frozen, steps=1)


TIERS = {
    "everything": {n: "disk" for n in ("parameters", "gradients", "optimizer", "activations")},
    "parameters": {"parameters": "host"},
}


@pytest.mark.parametrize(
    ("tiers", "schedule"),
    [
        (TIERS["everything"], "interleaved:2"), (TIERS["everything"], "zb-v"),
        (TIERS["parameters"], "1f1b"),
    ],
)  # fmt: skip
def test_states_below_the_device(tiers, schedule, monkeypatch):
    small(monkeypatch)
    check(resting(piped(schedule, 2, 3, segments=5), **tiers), "llama, untied")


def lists(plan: Plan, family="llama, untied") -> list[Schedule]:
    """Every worker's schedule."""

    def run(world):
        mine = model(family)
        job = Job(NativeFlow(mine, plan), plan, Recipe(AdamW()), Here(world))
        job.close()
        return job.schedule

    return play(plan.mesh, run)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "dualpipe"])
def test_the_validator_misses_nothing_of_a_workers_list(schedule):
    for made in lists(piped(schedule), "llama"):
        prove(made)
        actions = made.workers[0]
        for index, action in enumerate(actions):
            with pytest.raises(OutsizeError):  # left out
                prove(replace(made, workers=((*actions[:index], *actions[index + 1 :]),)))
            with pytest.raises(OutsizeError):  # twice
                prove(replace(made, workers=((*actions[:index], action, *actions[index:]),)))


def test_a_stage_on_another_worker_is_refused():
    one, other = lists(piped("1f1b"))
    foreign = next(a for a in other.workers[0] if a.kind is Kind.FORWARD)
    with pytest.raises(OutsizeError, match="another worker's"):
        prove(replace(one, workers=((foreign, *one.workers[0]),)))


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (lambda: piped("1f1b", 9, 9), "expected at most 8 workers"),
        (lambda: piped("interleaved:5"), "without blocks"),
        (lambda: piped("1f1b", pipeline=Pipelined("1f1b", (9,))), "expected 1 numbers below 8"),
        (lambda: piped("chimera", 3), "even"),
        (lambda: piped("dualpipe", 4, 4), "microbatches"),
        (lambda: piped("skip-pipe", 4, 8), "changes the maths"),
        (lambda: piped("1g1b"), "unknown"),
        (lambda: piped("1f1b", order="layer"), "order"),
        (lambda: piped("1f1b", update="behind"), "update"),
        (lambda: resting(piped("chimera"), gradients="host"), "let them rest on device"),
        (
            lambda: piped("zb-h1", segments=7, stages=MIXED, sequence_chunk=7),
            "sequence_chunk is 7, and pipel",
        ),
    ],
)
def test_what_cannot_run_is_refused(plan, said):
    with pytest.raises(OutsizeError, match=said):
        lists(plan())


def test_what_a_worker_does_not_hold_has_no_memory():
    def run(world):
        mine = model("llama, untied")
        plan = piped("1f1b")
        job = Job(NativeFlow(mine, plan), plan, Recipe(AdamW()), Here(world))
        mine_too = sum(table.numel for table in job.placement.chunks.tables)
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in mine.parameters()}
        bytes_held = sum(storage.nbytes() for storage in storages.values())
        job.close()
        return mine_too, bytes_held, sum(p.numel() for p in mine.parameters())

    first, second = play(Mesh(pipeline=2), run)
    assert first[0] + second[0] == first[2]
    for mine, nbytes, whole in (first, second):
        assert 8 * mine <= nbytes <= 8 * (mine + 100) < 8 * whole


PARTIAL = [(4, 0.5, 0), (4, 0.25, 1), (3, 0.34, 2)]


@pytest.mark.parametrize(("devices", "number", "vocabulary"), PARTIAL)
def test_partial_paths_train_what_they_visit(devices, number, vocabulary):
    """Against plain PyTorch over the stages of each microbatch, in its order."""
    said = Pipelined(f"skip-pipe:{number}", vocabulary=vocabulary)
    plan = piped("1f1b", devices, 8, pipeline=said, approximate=("partial-pipeline",))
    (batch,) = batches(1, plan.rows, SEQUENCE, VOCAB)

    def run(world):
        mine = model("llama, untied")
        optimizer, cuts = parse("sgd", 1e-2, 0.0, (0.0, 0.0)), divide(mine, world, plan)
        job = Job(NativeFlow(mine, plan), plan, Recipe(optimizer), Here(world), cuts=cuts)
        evaluated = job.evaluate(batch, plan.rows)
        loss = float(job.step(batch, 1e-2))
        weights = {name: w.clone() for name, w in job.weights()}
        job.close()
        assert job.placement.chunks.pipelining is not None
        return loss, job.placement.chunks.pipelining.paths, weights, evaluated

    results = play(plan.mesh, run)
    paths = results[0][1]
    assert any(len(path) < SEGMENTS for path in paths)
    plain = model("llama, untied")
    total, count = 0.0, batch.count()
    for m, path in enumerate(paths):
        rows = batch.rows(*plan.rows_of(m))
        positions = rows.positions().reshape(-1)
        context = plain.context(positions, rows.flat_bounds())
        x = rows.ids_BS.reshape(-1)
        for stage in path:
            if stage == 0:
                x = plain.prologue(x, context)
            elif stage < SEGMENTS - 1:
                x = plain.blocks[stage - 1](x, context)
        logits = plain.epilogue.logits(plain.epilogue(x, context))
        total = total + torch.nn.functional.cross_entropy(
            logits, rows.targets_BS.reshape(-1), ignore_index=-100, reduction="sum"
        )
    mean = total / count
    mean.backward()
    whole = count * float(loss_of(plain, batch).detach())  # evaluations leave nothing out
    for found, _, mine, evaluated in results:
        assert found == pytest.approx(mean.item(), rel=1e-10)
        assert evaluated == pytest.approx((whole, count), rel=1e-10)
        for name, parameter in plain.named_parameters():
            step = 0.0 if parameter.grad is None else 1e-2 * parameter.grad
            torch.testing.assert_close(mine[name], parameter - step, rtol=1e-10, atol=1e-10)


def test_a_message_that_fails_ends_the_step(monkeypatch):
    def awaited(send):
        def call(*message):
            gone = send(*message)
            assert gone._over.wait(600)
            return gone

        return call

    def run(world):
        mine, plan = model("llama, untied"), piped("1f1b")
        job = Job(NativeFlow(mine, plan), plan, Recipe(AdamW()), Here(world))
        if world.rank == 0:
            for sender in job.stage_links._senders.values():
                sender._pair = None  # every message fails, before the next is sent
                monkeypatch.setattr(sender, "send", awaited(sender.send))
        with pytest.raises((AttributeError, threading.BrokenBarrierError)) as caught:
            try:
                job.step(batches(1, plan.rows, SEQUENCE, VOCAB)[0], 1e-2)
            except AttributeError:
                world._board.fail()  # as a run's launcher does
                raise
        with suppress(Exception):  # the threads that send end; what failed is said again
            job.close()
        return caught.type

    assert play(Mesh(pipeline=2), run) == [AttributeError, threading.BrokenBarrierError]


def test_workers_that_would_play_different_schedules_are_refused():
    """As where each has measured costs of its own."""
    plans = [piped("1f1b", pipeline=Pipelined("1f1b", cuts)) for cuts in ((3,), (4,))]

    def run(world):
        with pytest.raises(OutsizeError, match="would play different schedules"):
            mine = plans[world.rank]
            Job(NativeFlow(model("llama"), mine), mine, Recipe(AdamW()), Here(world))

    play(Mesh(pipeline=2), run)
