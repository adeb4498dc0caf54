"""Lists and programs damaged at random, and the judge of those that the prover lets pass: two steps
by them must leave what two steps by the compiled ones leave. Two, since a step begins with what the
one before left behind.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from streamed import memory, resting
from threads import play

from outsize.collectives import Mesh, World, everyone
from outsize.data import Batch
from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.families import parse
from outsize.optim import SGD
from outsize.parallel.divide import divide
from outsize.plan import DEVICE, Pipelined, Plan, Precision, Stream, zero
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.schedule import Action, Kind, Lane, Program, Schedule, State, prove
from outsize.schedule.action import KINDS
from outsize.schedule.programs import evaluate, generate

SEQUENCE, VOCAB, PIECE = 6, 17, 128
CONFIG = {
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "vocab_size": VOCAB,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 16, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": True,
}  # fmt: skip
PROVED_BY_ALL = 3  # of the damaged programs of a plan
_PROMPTS = ((3, 1, 4, 1, 5), (9, 2))
BELOW = {"parameters": "disk", "gradients": "disk", "optimizer": "disk"}


NAMES = (
    "zero 1, layers", "zero 3", "zero 3, three workers, behind", "zero 2, optimizer below",
    "tensor, zero 3", "1f1b", "1f1b, zero 2", "1f1b, zero 3", "chimera, zero 1", "zb-v, tensor",
    "interleaved, all below", "dualpipe-v, activations below", "vocabulary 1",
    "vocabulary 2, zero 2",
)  # fmt: skip


def _plan(mesh: Mesh, stage: int = 0, microbatches: int = 2, **changes: Any) -> Plan:
    base = Plan(4, per_segment(4), microbatches * mesh.data, 1, SEQUENCE)
    precision = Precision.named("float64")
    return replace(base, mesh=mesh, shards=zero(stage, mesh.data), precision=precision, **changes)


def _piped(schedule: str, mesh: Mesh, stage: int = 0, variant: int = 0, **changes: Any) -> Plan:
    said = Pipelined(schedule, vocabulary=variant)
    return _plan(mesh, stage, microbatches=4, pipeline=said, **changes)


def cases() -> dict[str, Plan]:
    """Plans whose workers do much together. Made late: parts are small only within a test."""
    parts, line, both = Stream(part=PIECE), Mesh(pipeline=2), Mesh(2, 1, 2)
    return {
        "zero 1, layers": _plan(Mesh(2), 1, order="layer"),
        "zero 3": _plan(Mesh(2), 3),
        "zero 3, three workers, behind": _plan(Mesh(3), 3, order="layer", update="behind"),
        "zero 2, optimizer below": resting(_plan(Mesh(2), 2, stream=parts), optimizer="disk"),
        "tensor, zero 3": _plan(Mesh(2, 2), 3),
        "1f1b": _piped("1f1b", line),
        "1f1b, zero 2": _piped("1f1b", both, 2),
        "1f1b, zero 3": _piped("1f1b", both, 3),
        "chimera, zero 1": _piped("chimera", both, 1),
        "zb-v, tensor": _piped("zb-v", Mesh(1, 2, 2)),
        "interleaved, all below": resting(_piped("interleaved:2", line, stream=parts), **BELOW),
        "dualpipe-v, activations below": resting(_piped("dualpipe-v", line), activations="host"),
        "vocabulary 1": _piped("1f1b", line, 0, 1),
        "vocabulary 2, zero 2": _piped("zb-h1", both, 2, 2),
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
        ["drop", "double", "swap", "swap", "move", "move", "move", "moves", "moves", "moves",
         "stage", "microbatch", "part", "state", "lane", "kind"]
    )  # fmt: skip
    if what == "drop":
        del made[i]
    elif what == "double":
        made.insert(j, one)
    elif what == "swap":
        made[i], made[j] = made[j], made[i]
    elif what == "move":
        made.insert(j, made.pop(i))
    elif what == "moves":  # one that is on another lane: the rest is the hard part already
        moves = [n for n, a in enumerate(made) if a.lane is not Lane.COMPUTE] or [i]
        here = rng.choice(moves)
        made.insert(min(max(0, here + j - i), len(made) - 1), made.pop(here))
    else:
        values: dict[str, Any] = {
            "stage": range(-1, schedule.stages + 1),
            "microbatch": range(-1, schedule.microbatches + 1),
            "part": range(-1, 3),
            "state": list(State),
            "lane": list(Lane),
            "kind": [*map(Kind, KINDS.names())],
        }
        made[i] = replace(one, **{what: rng.choice(values[what])})
    return made


def with_list(program: Program, rank: int, schedule: Schedule) -> Program:
    """The program in which one worker has another list, and no worker is a copy."""
    which = list(program.which)
    which[rank] = len(program.lists)
    every = tuple(range(len(which)))
    return replace(program, lists=(*program.lists, schedule), which=tuple(which), alike=every)


def damaged(program: Program, rng: random.Random) -> Program:
    """A program in which one worker's list is mutated."""
    rank = rng.randrange(len(program.which))
    return with_list(program, rank, mutated(program.worker(rank), rng))


def refusal(program: Program) -> str:
    """Why the prover refuses a program; empty where it does not."""
    try:
        prove(program)
    except OutsizeError as error:
        assert str(error).startswith("schedule: ") and "\n" not in str(error)
        return str(error)
    return ""


def job_of(plan: Plan, stores: Mapping[str, Any], world: World) -> Job:
    """A worker's job, its part of the model cut out."""
    tied = not plan.pipeline.vocabulary and plan.stages[0].rest.gradients == DEVICE
    model = build(parse({**CONFIG, "tie_word_embeddings": tied}), seed=1, dtype=torch.float64)
    cuts = divide(model, world, plan)
    return Job(
        NativeFlow(model, plan),
        plan,
        Recipe(SGD(0.5, momentum=0.9)),
        Here(world, stores=stores),
        cuts=cuts,
    )


class Judge:
    """A worker's job that can be set back to its start, and what two steps give from there."""

    def __init__(self, job: Job) -> None:
        self.job, plan = job, job.plan
        data = torch.Generator().manual_seed(0)
        batches = [_batch(data, plan.rows) for _ in range(2)]
        self.batches = [batch.rows(*plan.rows_at(self.job.place)) for batch in batches]
        weight_pool = self.job.weight_pool
        names = {"parameters", "master", *(state.name for state in self.job.optimizer.states)}
        held = weight_pool.placement.chunks.held
        whats = [(i, w) for i in range(len(self.job.chunks)) for w, _ in held(i) if w in names]
        self.start = {key: weight_pool.read(*key).clone() for key in whats}
        self.program = self.job.program
        compiled, every = _lists(self.program, job.world.rank)
        self._known: list[object] = [compiled.workers, every]
        self.expected = self._played(compiled)

    def _played(self, schedule: Schedule) -> list[torch.Tensor]:
        job = self.job
        for (index, what), flat in self.start.items():
            job.weight_pool.write(index, what, flat)
        job.weight_pool.pool.fill_(0xFF)  # what was not fetched is not a number
        job.weight_pool.forget()
        job.restore_counts({})
        job.loaded = job.playable(schedule)
        losses = [job.step(batch).double() for batch in self.batches]
        found = [*job.weights(), *job.optimizer_state()]
        return [*losses, *(t.clone() for _, t in found)]

    def exact(self, schedule: Schedule, every: object = None) -> bool:
        """Whether two steps by this list give what two by the compiled one gave. every: the lists
        of all workers; what has been played already, the compiled ones above all, is not again."""
        every = every or schedule.workers
        if every in self._known:
            return True
        got = self._played(schedule)
        same = all(
            bool((a - b).abs().max() <= 1e-6 * b.abs().max().clamp(min=1e-3))
            for a, b in zip(got, self.expected, strict=True)
        )
        self._known += [every] * same
        return same


def _batch(generator: torch.Generator, rows: int) -> Batch:
    ids = torch.randint(0, VOCAB, (rows, SEQUENCE), generator=generator)
    return Batch(ids, torch.roll(ids, -1, 1), ((0, SEQUENCE),) * rows)


def judged(plan: Plan, count: int, seed: str) -> Counter[str]:
    """So many damaged programs of a plan, each refused or played by all of its workers: how many
    were refused where all are played together (by its message), alone, and how many ran exactly.
    AssertionError with the program for one that is let pass and is not exact. The first are proved
    by every worker, which must say the same, the others by one each."""
    reasons: list[dict[int, str]] = [{} for _ in range(count)]  # of each program, by rank

    def work(world: World) -> None:
        with memory() as stores:
            judge = Judge(job_of(plan, stores, world))
            rng = random.Random(seed)
            programs = [damaged(judge.program, rng) for _ in range(count)]
            for index, program in enumerate(programs):
                if index < PROVED_BY_ALL or index % world.mesh.size == world.rank:
                    reasons[index][world.rank] = refusal(program)
            everyone(world).all_reduce(torch.zeros(1))  # all have proved theirs
            for program, said in zip(programs, reasons, strict=True):
                refused = {bool(reason) for reason in said.values()}
                assert len(refused) == 1, "workers prove different things"
                if refused == {False}:
                    assert judge.exact(*_lists(program, world.rank)), program.lists
            judge.job.close()

    play(plan.mesh, work)
    return Counter(_sort(next(iter(said.values()))) for said in reasons)


def _lists(program: Program, rank: int) -> tuple[Schedule, object]:
    """Of a worker, and of all."""
    every = [program.worker(each) for each in range(len(program.which))]
    return every[rank], [each.workers for each in every]


def evaluation(plan: Plan, microbatches: int) -> Program:
    """The program of an evaluation."""

    def work(world: World) -> Program:
        with memory() as stores:
            judge = Judge(job_of(plan, stores, world))
            judge.job.close()
            return evaluate(judge.job.placement, microbatches)

    return play(plan.mesh, work)[0]


def judged_evaluations(plan: Plan, count: int, seed: str) -> Counter[str]:
    """What the prover says of so many damaged evaluations. They are not played."""
    program, rng = evaluation(plan, 4), random.Random(seed)
    return Counter(_sort(refusal(damaged(program, rng))) for _ in range(count))


def judged_tokens(plan: Plan, count: int, seed: str) -> Counter[str]:
    """As `judged`, of steps of generation: those let pass give the tokens of the compiled ones."""

    def work(world: World) -> Counter[str]:
        rng, found = random.Random(seed), Counter[str]()
        with memory() as stores:
            job = job_of(plan, stores, world)
            expected = job.generate(_PROMPTS, 3, logprobs=True)
            known = {
                kind: [_lists(generate(job.placement, kind), 0)[1]]
                for kind in (Kind.PREFILL, Kind.DECODE)
            }
            for _ in range(count):
                kind = rng.choice([Kind.PREFILL, Kind.DECODE])
                program = damaged(generate(job.placement, kind), rng)
                reason, every = refusal(program), _lists(program, 0)[1]
                found[_sort(reason)] += 1
                if not reason and every not in known[kind]:
                    known[kind].append(every)
                    lists = {kind: job.playable(program.worker(world.rank))}
                    job.tokens.lists.update(lists)
                    job.weight_pool.pool.fill_(0xFF)
                    job.weight_pool.forget()
                    got = job.generate(_PROMPTS, 3, logprobs=True)
                    assert got == expected, program.lists
                    del job.tokens.lists[kind]
            job.close()
        return found

    return play(plan.mesh, work)[0]


def _sort(reason: str) -> str:
    if not reason:
        return "exact"
    together = ("deadlock", "one order", "before it", "comes to it")
    return "together" if any(word in reason for word in together) else "alone"
