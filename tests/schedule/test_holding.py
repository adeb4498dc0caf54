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
from streamed import ALL, memory, resting

from outsize.collectives import Mesh
from outsize.collectives.threads import play
from outsize.data import Batch
from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.families import parse
from outsize.optim import SGD
from outsize.plan import Plan, Precision, Sharding, Stage, Stream
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.schedule import Action, Kind, Lane, Schedule, State, validate

ROWS, SEQUENCE, VOCAB = 2, 6, 17
MUTATIONS = 130
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


def mutated(schedule: Schedule, rng: random.Random) -> Schedule:
    """One or two actions dropped, doubled, swapped, moved or changed."""
    actions = list(schedule.workers[0])
    for _ in range(rng.choice([1, 1, 1, 2])):
        i = rng.randrange(len(actions))
        near = rng.choice([1, 2, 4, len(actions)])
        j = min(max(0, i + rng.randint(-near, near)), len(actions) - 1)
        actions = _changed(actions, i, j, rng, schedule)
    return replace(schedule, workers=(tuple(actions),))


def _changed(
    actions: list[Action], i: int, j: int, rng: random.Random, schedule: Schedule
) -> list[Action]:
    one, made = actions[i], list(actions)
    what = rng.choice(
        ["drop", "double", "swap", "swap", "move", "move", "move", "moves", "stage", "microbatch",
         "part", "state", "lane", "kind"]
    )  # fmt: skip
    if what == "drop":
        del made[i]
    elif what == "double":
        made.insert(j, one)
    elif what == "swap":
        made[i], made[j] = made[j], made[i]
    elif what == "move":
        made.insert(j, made.pop(i))
    elif what == "moves":  # one that fetches or evicts, the rest is the hard part already
        moves = [n for n, a in enumerate(made) if a.lane is not Lane.COMPUTE]
        here = rng.choice(moves)
        made.insert(min(max(0, here + j - i), len(made) - 1), made.pop(here))
    else:
        values = {
            "stage": range(-1, schedule.stages + 1),
            "microbatch": range(-1, schedule.microbatches + 1),
            "part": range(-1, 3),
            "state": list(State),
            "lane": list(Lane),
            "kind": list(Kind),
        }[what]
        made[i] = replace(one, **{what: rng.choice(values)})
    return made


class Judge:
    """A job that can be set back to its start, and what two steps give from there."""

    def __init__(self, plan: Plan, stores, world=None) -> None:
        model = build(parse(CONFIG), seed=1, dtype=torch.float64)
        optimizer = SGD(0.5, momentum=0.9)
        self.job = Job(NativeFlow(model, plan), plan, optimizer, stores=stores, world=world)
        data = torch.Generator().manual_seed(0)
        batches = [self._batch(data, plan.rows) for _ in range(2)]
        self.batches = [batch.rows(*plan.rows_at(self.job.place)) for batch in batches]
        residence = self.job.residence
        names = ("parameters", "master", *self.job.optimizer.states)
        whats = [(i, what) for i in range(len(self.job.chunks)) for what in names]
        self.start = {key: residence.read(*key).clone() for key in whats if residence.has(*key)}
        self.expected = self._played(self.job.schedule)

    @staticmethod
    def _batch(generator, rows):
        ids = torch.randint(0, VOCAB, (rows, SEQUENCE), generator=generator)
        return Batch(ids, torch.roll(ids, -1, 1), ((0, SEQUENCE),) * rows)

    def _played(self, schedule: Schedule) -> list[torch.Tensor]:
        job = self.job
        for (index, what), flat in self.start.items():
            job.residence.write(index, what, flat)
        job.residence.pool.fill_(0xFF)  # what was not fetched is not a number
        job.residence.forget()
        job.restore_counts({})
        job.follow(schedule)
        losses = [job.step(batch).double() for batch in self.batches]
        found = [*job.weights(), *job.optimizer_state()]
        return [*losses, *(t.clone() for _, t in found)]

    def exact(self, schedule: Schedule) -> bool:
        """Whether two steps by this schedule give what two by the compiled one gave."""
        got = self._played(schedule)
        return all(
            bool((a - b).abs().max() <= 1e-6 * b.abs().max().clamp(min=1e-3))
            for a, b in zip(got, self.expected, strict=True)
        )


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
}


@pytest.mark.parametrize("order", ["layer", "microbatch"])
@pytest.mark.parametrize("name", WORKERS)
def test_damaged_schedules_of_two_workers(name, order):
    """Both play the same damaged list: what one would wait for in vain is refused for both."""
    plan = replace(BASE, mesh=Mesh(2), shards=WORKERS[name], rows=2 * ROWS, order=order)

    def work(world):
        judge = Judge(plan, {}, world)
        compiled = judge.job.schedule
        assert judge.exact(compiled)
        rng, verdicts = random.Random(name + order), {True: 0, False: 0}
        for _ in range(MUTATIONS // 2):
            schedule = mutated(compiled, rng)
            try:
                validate(schedule)
            except OutsizeError:
                verdicts[False] += 1
                continue
            verdicts[True] += 1
            assert judge.exact(schedule), schedule.to_text()
        return verdicts

    for verdicts in play(plan.mesh, work):
        assert min(verdicts.values()) >= 5, "both must occur for the test to tell"


@pytest.mark.parametrize("name", NAMES)
def test_damaged_schedules_are_refused_or_exact(name, monkeypatch):
    streamed.small(monkeypatch, PIECE)
    with memory() as stores:
        judge = Judge(cases()[name], stores)
        compiled = judge.job.schedule
        assert judge.exact(compiled)
        rng, verdicts = random.Random(name), {True: 0, False: 0}
        for _ in range(MUTATIONS):
            schedule = mutated(compiled, rng)
            try:
                validate(schedule)
            except OutsizeError as error:
                verdicts[False] += 1
                assert str(error).startswith("schedule: ") and "\n" not in str(error)
                continue
            verdicts[True] += 1
            assert judge.exact(schedule), schedule.to_text()
    assert min(verdicts.values()) >= 10, "both must occur for the test to tell"
