"""Schedules that stream, damaged at random: each is refused with a reason, or plays exactly.

The judge is the runtime: two steps by what was accepted leave the weights and optimizer states of
two steps by the compiled schedule. Two, since a step begins with what the one before left behind.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import streamed
import torch
from mutants import Judge, mutated
from streamed import ALL, memory, resting

from outsize.collectives import Mesh
from outsize.collectives.threads import play
from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.families import parse
from outsize.optim import SGD
from outsize.plan import Plan, Precision, Sharding, Stage, Stream
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import ALONE, Here, Recipe
from outsize.schedule import Action, Kind, Lane, State, prove
from outsize.schedule.proof.sums import Sums
from outsize.schedule.residency import Residency

ROWS, SEQUENCE, VOCAB = 2, 6, 17
MUTATIONS = 45  # of each plan
PIECE = 128  # elements of a part: a block has four
CONFIG = {
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "vocab_size": VOCAB,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 16, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": True,
}  # fmt: skip
BASE = Plan(4, per_segment(4), ROWS, 1, SEQUENCE, Precision.named("float64"), loss_chunk=4)
AGAIN = per_segment(4, ("block",))
HOST = {"gradients": "host", "optimizer": "host"}
BELOW = {"parameters": "disk", "gradients": "disk", "optimizer": "disk"}


def cases() -> dict[str, Plan]:
    """Plans to damage. Made late: parts are small only within a test."""
    parts = Stream(part=PIECE, host=2)
    layer = replace(BASE, order="layer")
    mixed = Precision("float32", "float64", "float64", "float64")
    return {
        "all, layers": resting(layer, **ALL),
        "all, behind, again": resting(replace(layer, update="behind", stages=AGAIN), **ALL),
        "below, behind, microbatches": resting(replace(BASE, update="behind"), **BELOW),
        "parameters, three resident": resting(
            replace(layer, stream=Stream(resident=3, returned=2)), parameters="disk"
        ),
        "gradients, microbatches": resting(BASE, gradients="disk", activations="disk"),
        "all, microbatches, two stages": resting(
            replace(BASE, stages=(Stage(0, 2), Stage(2, 4)), stream=Stream(part=PIECE)), **ALL
        ),
        "host updates": resting(replace(layer, stream=parts), **HOST),
        "host updates of what streams": resting(
            replace(layer, stream=parts), parameters="host", **HOST
        ),
        "master below": resting(
            replace(layer, precision=mixed, stream=Stream(part=PIECE)), **BELOW
        ),
        "master below, behind": resting(
            replace(layer, precision=mixed, update="behind", stages=AGAIN), **BELOW
        ),
    }


def job_of(plan: Plan, stores, world=ALONE.world) -> Job:
    model = build(parse(CONFIG), seed=1, dtype=torch.float64)
    optimizer = SGD(0.5, momentum=0.9)
    return Job(NativeFlow(model, plan), plan, Recipe(optimizer), Here(world, stores=stores))


NAMES = [
    "all, layers", "all, behind, again", "below, behind, microbatches",
    "parameters, three resident", "gradients, microbatches", "all, microbatches, two stages",
    "host updates", "host updates of what streams", "master below", "master below, behind",
]  # fmt: skip


WORKERS = {
    "replicated": Sharding(),
    "optimizer": Sharding(1, 1, 2),
    "gradients": Sharding(1, 2, 2),
    "parameters": Sharding(2, 2, 2),
    "shares below": Sharding(2, 2, 2),
}


def too_early(schedule, kind, *before):
    """The schedule with each action of a kind ahead of the last one that it should stand behind: of
    kinds `before`, on its stage."""
    actions = schedule.workers[0]
    for place, action in enumerate(actions):
        if action.kind is kind:
            own = [i for i, one in enumerate(actions[:place])
                   if one.stage == action.stage and one.kind in before]  # fmt: skip
            moved = [*actions[:place], *actions[place + 1 :]]
            moved.insert(own[-1], action)
            yield replace(schedule, workers=(tuple(moved),))


def test_parts_are_collected_when_all_are_updated(monkeypatch):
    streamed.small(monkeypatch, PIECE)
    stream = Stream(part=PIECE)
    plan = replace(BASE, mesh=Mesh(2), shards=WORKERS["optimizer"], rows=2 * ROWS, stream=stream)
    plan = resting(plan, optimizer="host")

    def work(world):
        with memory() as stores:
            return job_of(plan, stores, world).schedule

    compiled = play(plan.mesh, work)[0]
    actions = compiled.workers[0]
    summed = next(i for i, a in enumerate(actions) if a.kind is Kind.REDUCE)
    first = (actions[summed], *actions[:summed], *actions[summed + 1 :])
    with pytest.raises(OutsizeError, match="which no backward pass has made in this step"):
        prove(replace(compiled, workers=(first,)))
    found = list(too_early(compiled, Kind.COLLECT, Kind.UPDATE))
    for early in found:
        with pytest.raises(OutsizeError, match="before they are updated"):
            prove(early)
    assert len(found) == 4, "one a stage"


def test_what_is_collected_is_gathered_behind_it():
    """Of parameters that are cut over fewer workers than what updates them."""
    own = frozenset({0})
    sums = Sums(Residency(((0,),), gathered=own, collected=own), 0)
    update, gather, collect = (
        Action(kind, 0, state=State.PARAMETERS) for kind in (Kind.UPDATE, Kind.GATHER, Kind.COLLECT)
    )
    assert not any(sums.step(one) for one in (gather, update))
    assert "whose updated parts were not collected" in sums.step(gather)
    assert not any(sums.step(one) for one in (collect, gather))


@pytest.mark.parametrize(
    ("name", "order"),
    [(name, ("microbatch", "layer")[i % 2]) for i, name in enumerate(WORKERS)],
)
def test_damaged_schedules_of_two_workers(name, order):
    """Both play the same damaged list: what one would wait for in vain is refused for both."""
    plan = replace(BASE, mesh=Mesh(2), shards=WORKERS[name], rows=2 * ROWS, order=order)
    plan = resting(plan, **BELOW) if name.endswith("below") else plan

    def work(world):
        with memory() as stores:
            return judged(world, stores)

    def judged(world, stores):
        judge = Judge(job_of(plan, stores, world))
        compiled = judge.job.schedule
        for early in too_early(compiled, Kind.REDUCE, Kind.BACKWARD, Kind.LOSS):
            with pytest.raises(OutsizeError, match="worker 0"):
                prove(early)
        rng, verdicts = random.Random(name + order), {True: 0, False: 0}
        for _ in range(MUTATIONS * 2 // 3):
            schedule = mutated(compiled, rng)
            try:
                prove(schedule)
            except OutsizeError:
                verdicts[False] += 1
                continue
            verdicts[True] += 1
            assert judge.exact(schedule), schedule
        return verdicts

    for verdicts in play(plan.mesh, work):
        assert min(verdicts.values()) >= 3, "both must occur for the test to tell"


@pytest.mark.parametrize("name", NAMES)
def test_damaged_schedules_are_refused_or_exact(name, monkeypatch):
    streamed.small(monkeypatch, PIECE)
    with memory() as stores:
        judge = Judge(job_of(cases()[name], stores))
        compiled = judge.job.schedule
        rng, verdicts = random.Random(name), {True: 0, False: 0}
        for _ in range(MUTATIONS):
            schedule = mutated(compiled, rng)
            try:
                prove(schedule)
            except OutsizeError as error:
                verdicts[False] += 1
                assert str(error).startswith("schedule: ") and "\n" not in str(error)
                continue
            verdicts[True] += 1
            assert judge.exact(schedule), schedule
    assert min(verdicts.values()) >= 4, "both must occur for the test to tell"


def test_a_step_leaves_in_the_pool_what_the_next_begins_with(monkeypatch):
    """A part of the optimizer's that comes once more lies where parameters stay."""
    streamed.small(monkeypatch, PIECE)
    with memory() as stores:
        compiled = job_of(cases()["below, behind, microbatches"], stores).schedule
    actions = compiled.workers[0]
    again = next(a for a in actions if a.kind is Kind.FETCH and a.state is State.OPTIMIZER)
    with pytest.raises(OutsizeError, match="with which the next step begins"):
        prove(replace(compiled, workers=((*actions, again),)))


def test_parts_go_over_the_device_as_evenly_as_can_be(monkeypatch):
    """`over` of any `host` parts that follow one another, the last of them among these."""
    streamed.small(monkeypatch, PIECE)
    for host, over in ((2, 1), (3, 1), (3, 2), (4, 3), (1, 1)):
        stream = Stream(part=PIECE, host=host, over=over)
        with memory() as stores:
            found = job_of(resting(replace(BASE, stream=stream), **HOST), stores).placement.items
            lanes = max(found.lanes.values(), key=len)
        assert len(lanes) >= 4 and lanes[host - 1] is Lane.COMPUTE
        for first in range(len(lanes) - host + 1):
            assert lanes[first : first + host].count(Lane.COMPUTE) == over
    with pytest.raises(OutsizeError, match=r"stream.over is 3; expected at most stream.host, 2"):
        Stream(host=2, over=3)
