"""Tokens and their log-probabilities between two steps of training, by the job's own actions: those
of a plain decoder with the same weights, while the next step gives what it would have given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import piped
import pytest
import torch
from many import generate_many
from mutants import with_list
from plain import batches
from streamed import memory, plan_of, resting
from subjects import SEQUENCE, VOCAB
from threads import play

from outsize import prepare
from outsize.collectives import Mesh, World
from outsize.decode.generate import PREFILL_TOKENS, Request
from outsize.decode.samplers import Sampling
from outsize.errors import OutsizeError
from outsize.memory import Ledger, OverBudget
from outsize.models.decoder import Decoder
from outsize.optim import AdamW
from outsize.parallel.divide import divide
from outsize.parallel.execution import execution_of
from outsize.plan import Local, Pipelined, Plan, Stream, zero
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.generating import STEPS, Generated
from outsize.runtime.making import NativeModel, make_job
from outsize.runtime.recipe import Here, Recipe
from outsize.runtime.special.forwards import Zeroth
from outsize.schedule import Kind, Program, State, prove
from outsize.schedule.action import WHOLE, Action
from outsize.schedule.programs import generate
from outsize.simulate.tokens import needs, resident

SEGMENTS = 6
PROMPTS = ((5, 17, 2, 44, 9, 30, 8), (3,), tuple(range(12)))
SAMPLINGS = (Sampling(0.9, 20, 0.9, seed=1), Sampling(), Sampling(1.2, seed=3))
NEW = 4
PARAMETERS = {"parameters": "disk"}


def model(family: str) -> Decoder:
    """A decoder of as many layers as these plans have stages between the ends."""
    return piped.model(family, segments=SEGMENTS)


def plan_on(mesh: Mesh, tiers: dict[str, str] | None = None, **changes: Any) -> Plan:
    made = plan_of(
        "float64", segments=SEGMENTS, rows=4 * mesh.data, microbatch_rows=2, mesh=mesh,
        stages=per_segment(SEGMENTS), **changes,
    )  # fmt: skip
    return resting(made, **tiers) if tiers else made


PIPE, BOTH = Mesh(pipeline=2), Mesh(data=2, pipeline=2)
F1B1 = Pipelined("1f1b")
PLANS = {
    "one worker": plan_on(Mesh()),
    "from a disk": plan_on(
        Mesh(), {**PARAMETERS, "gradients": "disk"}, stream=Stream(pool=180_000)
    ),
    "all states on a disk": plan_on(
        Mesh(), {**PARAMETERS, "gradients": "disk", "optimizer": "disk"}
    ),
    "zero 3": plan_on(Mesh(2), shards=zero(3, 2)),
    "zero 3, shares on a disk": plan_on(
        Mesh(2), {**PARAMETERS, "gradients": "disk", "optimizer": "disk"}, shards=zero(3, 2)
    ),
    "pipeline, from a disk": plan_on(PIPE, PARAMETERS, pipeline=F1B1, stream=Stream(1)),
    "there and back": plan_on(PIPE, pipeline=Pipelined("zb-v")),
    "two pipelines, shares on a disk": plan_on(
        BOTH,
        {**PARAMETERS, "gradients": "disk", "optimizer": "disk"},
        shards=zero(3, 2),
        pipeline=F1B1,
        stream=Stream(1),
    ),
    "cut vocabulary": plan_on(
        PIPE, {"optimizer": "host"}, pipeline=Pipelined("1f1b", vocabulary=1)
    ),
    "tensor, there and back": plan_on(
        Mesh(tensor=2, pipeline=2), sequence_parallel=True, pipeline=Pipelined("zb-v")
    ),
    "context": plan_on(Mesh(context=2)),
    "blocks by rows": plan_on(Mesh(tensor=2), sequence_parallel=True, blocks_by_rows=2),
}
# Of the others "llama, untied".
FIRST = "llama, untied"
FAMILIES = {"two pipelines, shares on a disk": "mixtral", "one worker": "gemma2"}
# The others: test_prepared_jobs, shares of parameters in one more, and a V beside a tensor axis.
ELSEWHERE = ("all states on a disk", "zero 3", "zero 3, shares on a disk", "there and back")
BETWEEN = [n for n in PLANS if n not in ELSEWHERE]


def trained(plan: Plan, family: str, asks: bool) -> list[Any]:
    """By worker: losses of two steps, what was generated after each, and the weights at the end."""
    data = batches(2, plan.rows, SEQUENCE, VOCAB)

    def run(world: World) -> Any:
        mine = model(family)
        cuts = divide(mine, world, plan)
        flow = NativeFlow(mine, plan, execution=execution_of(plan.mesh, world))
        losses, answers = [], []
        with memory() as stores:
            job = Job(
                flow,
                plan,
                Recipe(AdamW(), 0.5),
                Here(world, ledger=Ledger(), stores=stores),
                cuts=cuts,
            )
            for batch in data:
                losses.append(float(job.step(batch.rows(*plan.rows_at(job.place)), 1e-2)))
                if asks:
                    answers.append(job.generate(PROMPTS, NEW, SAMPLINGS, logprobs=True))
            weights = {name: w.clone() for name, w in job.weights()}
            job.method.microbatches.ready(None, (), 1.0)  # the last batch is let go,
            if job.stage_links is not None:
                job.stage_links.sweep()  # and what has been sent
            live = dict(job.ledger.live)
            job.close()
        return losses, answers, weights, live

    return play(plan.mesh, run)


def logprobs(plain: Any, ids: Sequence[int], new: Sequence[int]) -> list[float]:
    """Of the new tokens, all at once."""
    with torch.no_grad():
        scores_TV = plain(torch.tensor([*ids, *new])).log_softmax(-1)
    return [float(scores_TV[len(ids) - 1 + i, token]) for i, token in enumerate(new)]


@pytest.mark.parametrize("name", BETWEEN)
def test_tokens_of_a_plain_decoder_and_undisturbed_steps(name: str) -> None:
    plan, family = PLANS[name], FAMILIES.get(name, "llama, untied")
    asked, silent = trained(plan, family, True), trained(plan, family, False)
    assert [worker[0] for worker in asked] == [worker[0] for worker in silent]  # bit for bit
    assert [worker[3] for worker in asked] == [worker[3] for worker in silent]  # bytes live
    assert all(worker[1] == asked[0][1] for worker in asked)
    for mine, theirs in zip(asked, silent, strict=True):
        assert all(torch.equal(w, theirs[2][name]) for name, w in mine[2].items())
    _, answers, weights, _ = asked[0]
    assert len({tuple(found.tokens) for behind in answers for found in behind}) > len(PROMPTS)
    equal(answers[1], family, weights)


def equal(answers: list[Generated], family: str, weights: dict[str, Any]) -> None:
    """What was generated, and what a plain decoder with these weights does."""
    plain = model(family)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(weights[name])
    wanted = generate_many(plain, PROMPTS, NEW, SAMPLINGS)
    assert [found.tokens for found in answers] == wanted
    for ids, found in zip(PROMPTS, answers, strict=True):
        assert found.logprobs == pytest.approx(logprobs(plain, ids, found.tokens), abs=1e-10)


def test_jobs_of_losses_alone() -> None:
    """The last step's change of the weights is in what is generated."""
    plan = plan_on(Mesh(), {"parameters": "disk"}, approximate=("zeroth-order",))
    others("llama", lambda stores: Job(
        NativeFlow(model("llama"), plan), plan, Recipe(Zeroth(lr=2e-3)), Here(stores=stores)
    ))  # fmt: skip


@pytest.mark.parametrize("name", ["one worker", "pipeline"])
def test_what_a_request_holds_is_predicted_and_inside_the_budget(name: str) -> None:
    plan = {**PLANS, "pipeline": plan_on(PIPE, pipeline=F1B1)}[name]
    request = Request(tuple(i % VOCAB for i in range(60)), 1, Sampling())
    data = batches(2, plan.rows, SEQUENCE, VOCAB)

    def run(world: World) -> list[float]:
        losses = []
        for asks in (True, False):
            ledger, mine = Ledger(), model(FIRST)
            cuts = divide(mine, world, plan)
            here = Here(world, ledger=ledger)
            job = Job(NativeFlow(mine, plan), plan, Recipe(AdamW()), here, cuts=cuts)
            job.step(data[0])
            if asks:
                job.method.microbatches.ready(None, (), 1.0)  # as a request begins
                held = replace(resident(mine), mesh=plan.mesh, rank=world.rank)
                if job.stage_links is not None:
                    job.stage_links.sweep()
                    holds = job.stage_links.line.role(job.stage_links.turn).holds
                    held = replace(held, here=tuple(s in holds for s in range(SEGMENTS)))
                found = needs(held, request, PREFILL_TOKENS)
                before = ledger.total
                if world.mesh.size == 1:
                    with pytest.raises(OverBudget):
                        ledger.budget = before + found.cache // 2
                        job.generate([request.ids], 1)
                ledger.budget = before + found.cache + found.work
                (answer,) = job.generate([request.ids], 1)
                assert len(answer.tokens) == 1
                peak = max(ran.peak for ran in job.tokens.ran)
                assert before < peak <= ledger.budget <= 1.05 * peak
                ledger.budget = None
            losses.append(float(job.step(data[1])))
            job.close()
        return losses

    for with_request, without in play(plan.mesh, run):
        assert with_request == without


def test_jobs_of_groups() -> None:
    plan = plan_on(Mesh(), approximate=("local-learning",), local=Local(2, "momentum", 0.9))
    name, recipe = "llama, untied", Recipe(AdamW())
    others(name, lambda stores: make_job(NativeModel(model(name)), plan, recipe))


def others(family: str, job_of: Callable[[dict[str, Any]], Job]) -> None:
    data, losses = batches(2, 4, SEQUENCE, VOCAB), []
    for asks in (True, False):
        with memory() as stores:
            job = job_of(stores)
            job.step(data[0])
            answers = job.tokens.generate(PROMPTS, NEW, SAMPLINGS, logprobs=True) if asks else []
            if asks:
                equal(answers, family, {name: w.clone() for name, w in job.weights()})
            losses.append(float(job.step(data[1])))
            job.close()
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "name", [name for name in PLANS if "from" in name or "zero" in name or "shares" in name]
)
def test_what_a_pool_does_not_hold_is_brought_in_every_step(name: str) -> None:
    """Else those plans would show nothing: the token's list has the moves of an evaluation's."""
    program = programs(PLANS[name], Kind.DECODE)
    for schedule in program.lists:
        moves = {a.kind for a in schedule.workers[0] if a.state is State.PARAMETERS}
        first = schedule.role is not None and 0 in schedule.role.holds  # its stages fit
        wanted = {Kind.GATHER} if "from" not in name else {Kind.FETCH}
        wanted |= {Kind.FETCH} if "shares" in name else set()  # each its own, ahead of the others'
        assert moves == wanted or (first and not moves)


def test_ends_samplings_and_refusals() -> None:
    """One sampler for all, log-probabilities only where asked for, an end where a token is one."""
    plan = PLANS["from a disk"]
    with memory() as stores:
        job = Job(NativeFlow(model("llama"), plan), plan, Recipe(AdamW()), Here(stores=stores))
        found = job.generate(PROMPTS, NEW)
        assert [len(each.tokens) for each in found] == [NEW] * 3
        assert not any(each.logprobs for each in found)
        stop = found[0].tokens[2]
        short = job.generate(PROMPTS[:1], NEW, stop=[stop])[0].tokens
        assert short == found[0].tokens[: found[0].tokens.index(stop) + 1]
        with pytest.raises(OutsizeError, match="2 samplings for 3 prompts; expected one for all"):
            job.generate(PROMPTS, NEW, SAMPLINGS[:2])
        with pytest.raises(OutsizeError, match="has token 53; expected 0 to 52"):
            job.generate([[VOCAB]], NEW)
        job.close()


PIPED = {
    "1f1b": plan_on(PIPE, pipeline=F1B1),
    "there and back": PLANS["there and back"],
    "three stages, copies": plan_on(Mesh(data=2, pipeline=3), pipeline=F1B1),
    "tensor": plan_on(Mesh(tensor=2, pipeline=2), sequence_parallel=True, pipeline=F1B1),
}


@pytest.mark.parametrize("name", PIPED)
def test_groups_of_prompts_on_a_pipeline(name: str) -> None:
    """As many as keep its stages at work, long prompts and short ones; more tokens than one list
    has steps, and ends on the way."""
    plan, new = PIPED[name], (1 + (name == "1f1b")) * STEPS + 2
    prompts = [tuple((i * j + 3 * i + 1) % VOCAB for j in range(1 + 3 * i)) for i in range(5)]
    samplings = [Sampling(0.9, 20, 0.9, seed=i) for i in range(5)]
    plain = generate_many(model(FIRST), prompts, new, samplings)
    stop = plain[1][new - STEPS]

    def run(world: World) -> Any:
        mine = model(FIRST)
        cuts = divide(mine, world, plan)
        flow = NativeFlow(mine, plan, execution=execution_of(plan.mesh, world))
        job = Job(flow, plan, Recipe(AdamW()), Here(world), cuts=cuts)
        found = [job.generate(prompts, new, samplings, ends) for ends in ((), (stop,))]
        lists = {key[1:] for key in job.tokens.lists}
        job.close()
        return [[each.tokens for each in some] for some in found], lists

    for (whole, ended), lists in play(plan.mesh, run):
        assert whole == plain
        assert ended == [t[: t.index(stop) + 1] if stop in t else t for t in plain]
        groups = min(5, 4 if name == "there and back" else plan.mesh.pipeline)
        assert {(groups, 1), (groups, STEPS)} <= lists


def test_a_program_of_groups_that_goes_on_too_early_is_refused() -> None:
    program = programs(PIPED["1f1b"], Kind.DECODE, 2, 3)
    prove(program)
    first, last = program.worker(0), program.worker(1)
    sample = Action(Kind.SAMPLE, microbatch=0)
    for worker, mine, reason in (
        (0, [a for a in first.workers[0] if a != sample], "comes before SAMPLE of microbatch 0"),
        (
            0,
            [*(a for a in first.workers[0] if a != sample), sample],
            "comes before SAMPLE",
        ),
        (1, [sample, *(a for a in last.workers[0] if a != sample)], "the last stage's logits"),
    ):
        other = replace(program.worker(worker), workers=(tuple(mine),))
        with pytest.raises(OutsizeError, match=reason):
            prove(with_list(program, worker, other))


def test_a_program_whose_worker_leaves_something_out_is_refused() -> None:
    """All workers' lists are proved together, before anything runs."""
    program = programs(PLANS["pipeline, from a disk"], Kind.PREFILL)
    prove(program)
    for left_out, reason in (
        ((Kind.SAMPLE, WHOLE), "waits for worker 1's SAMPLE 0, which does not come: deadlock"),
        ((Kind.PREFILL, SEGMENTS - 1), "comes before the last stage's logits"),
        ((Kind.RECV, 2), "its input, the output of stage 2, was not produced"),
    ):
        other = program.worker(1)
        (actions,) = other.workers
        kept = tuple(a for a in actions if (a.kind, a.stage) != left_out)
        assert len(kept) < len(actions)
        with pytest.raises(OutsizeError, match=reason):
            prove(with_list(program, 1, replace(other, workers=(kept,))))


def programs(plan: Plan, kind: Kind, groups: int = 1, steps: int = 1) -> Program:
    """Of the job of the first worker."""

    def run(world: World) -> Program:
        mine = model("llama, untied")
        with memory() as stores:
            flow, cuts = NativeFlow(mine, plan), divide(mine, world, plan)
            job = Job(flow, plan, Recipe(AdamW()), Here(world, stores=stores), cuts=cuts)
            job.close()
        return generate(job.placement, kind, groups, steps)

    found: list[Program] = play(plan.mesh, run)
    return found[0]


def test_prepared_jobs(tmp_path: Path) -> None:
    """Somebody's own loop, weights on a disk; a module that keeps nothing for the next token."""
    decoder, data = model("llama, untied"), batches(2, 4, SEQUENCE, VOCAB)
    plan = PLANS["all states on a disk"]
    job = prepare(decoder, "adamw", "8MiB", disk=f"{tmp_path}:64MiB", plan=plan)
    with pytest.raises(OutsizeError, match="call step first"):
        job.generate(PROMPTS, NEW)
    job.step(data[0])
    assert job.plan.rests_below("optimizer")
    answers = job.generate(PROMPTS, NEW, SAMPLINGS, logprobs=True)
    weights = {name: w.clone() for name, w in job.weights()}
    job.close()
    equal(answers, "llama, untied", weights)
    adopted = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    other = prepare(adopted, "sgd", loss=lambda output, _: output.square().mean())
    other.step(torch.randn(2, 4))
    with pytest.raises(OutsizeError, match="Sequential is an adopted module"):
        other.generate([[1]], 1)
    other.close()
