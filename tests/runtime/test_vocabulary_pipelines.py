"""Vocabularies that are cut over the workers of a pipeline: the numbers of one worker that has all
of it, whatever else the plan says. One step tells; more: tests/verify/test_matrix.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from piped import check, model, near, numbers, one, piped
from plain import batches
from streamed import resting, small, snapshot
from subjects import CONFIGS, SEQUENCE, VOCAB, config_of
from threads import play

from outsize.collectives import Mesh, World
from outsize.errors import OutsizeError
from outsize.kernels.entropy import LossOptions
from outsize.models.families import parse
from outsize.optim import AdamW
from outsize.parallel.divide import divide
from outsize.plan import Pipelined, Plan, Precision, Stage, zero
from outsize.plan.plan import per_segment
from outsize.runtime import AdoptedFlow, Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe

BOTH = pytest.mark.parametrize("variant", [1, 2])


def turns(cases):
    """Cases with the variants in turns: most of what is beside a variant meets one of them."""
    return [(each, 1 + index % 2) for index, each in enumerate(cases)]


SEGMENTS = 5
SMOOTH = LossOptions(0.1, 1e-2)
# Embeddings narrower than the model, projected in and out; and logits with a factor and a cap.
OPT = parse({
    "model_type": "opt", "vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "ffn_dim": 40, "max_position_embeddings": 32,
    "word_embed_proj_dim": 10, "tie_word_embeddings": True,
})  # fmt: skip
SCALED = replace(config_of("llama, untied"), logit_scale=0.3, logit_softcap=2.0)


def cut(schedule: str, variant: int, devices: int = 2, microbatches: int = 3, **changes) -> Plan:
    """A plan that cuts the vocabulary; its 53 tokens are odd for any number of workers here."""
    said = Pipelined(schedule, changes.pop("cuts", ()), vocabulary=variant)
    return piped(schedule, devices, microbatches, pipeline=said, segments=SEGMENTS, **changes)


FAMILIES = {"untied": "llama, untied", "opt": OPT, "scaled": SCALED}


@pytest.mark.parametrize(("family", "variant"), turns(FAMILIES.values()), ids=FAMILIES)
def test_families_whose_losses_are_smoothed(family, variant):
    check(cut("1f1b", variant), family, options=SMOOTH, steps=1)


@pytest.mark.parametrize("options", [LossOptions(0.1), LossOptions(0.0, 1e-2)], ids=["s", "z"])
@pytest.mark.parametrize("variant", [2])
def test_smoothing_and_the_square_of_the_sum_alone(variant, options):
    check(cut("zb-h1", variant), "gemma2", options=options, steps=1)


@pytest.mark.parametrize(("devices", "variant"), [(3, 2)])
def test_workers_that_have_uneven_rows(variant, devices):
    check(cut("1f1b", variant, devices, 4), steps=1)


def test_rows_of_a_tier_of_hybrid_shards():
    shards = replace(zero(1, 4), parameters=2, gradients=2)
    check(cut("1f1b", 2, 2, 2, mesh=Mesh(4, 1, 2), shards=shards), steps=1)


WAYS = {
    "ends with blocks": {"stages": (Stage(0, 2), Stage(2, 3), Stage(3, 5))},
    "ends with blocks, split": {"stages": (Stage(0, 3), Stage(3, 5)), "split_backward": True},
    "uneven": {"cuts": (4,)},
    "the embedding alone": {"cuts": (1,)},
    "logits in chunks": {"loss_chunk": 7},
    "logits in other chunks": {"loss_chunk": 7, "microbatches": 2},
    "rows in chunks": {
        "sequence_chunk": 8,
        "stages": per_segment(SEGMENTS, ("block",)),
        "microbatches": 2,
    },
}


@pytest.mark.parametrize(("changes", "variant"), turns(WAYS.values()), ids=WAYS)
def test_with_the_rest_of_a_plan(changes, variant):
    check(cut("1f1b", variant, **changes), steps=1)


@BOTH
def test_microbatches_without_targets(variant):
    """The first, one between and the last: nothing is learned from them, nothing is infinite."""
    plan = cut("1f1b", variant, microbatches=4)
    data = batches(1, plan.rows, SEQUENCE, VOCAB)
    for batch in data:
        for m in (0, 2, 3):
            batch.targets_BS[slice(*plan.rows_of(m))] = -100
    check(plan, "gemma2", options=SMOOTH, data=data)


TIERS = {
    "everything": {n: "disk" for n in ("parameters", "gradients", "optimizer", "activations")},
    "parameters": {"parameters": "host"},
    "gradients": {"gradients": "host"},
}


@pytest.mark.parametrize(("schedule", "variant", "family"), [("zb-v", 2, "gpt2")])
@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS)
def test_states_below_the_device(tiers, schedule, variant, family, monkeypatch):
    """A first stage that has nothing but the embedding gives what comes to it as it is."""
    small(monkeypatch)
    check(resting(cut(schedule, variant), **tiers), family, steps=1 + ("optimizer" in tiers))


def job_of(world: World, plan: Plan, family: str = "gpt2") -> Job:
    """A worker's job."""
    mine = model(family, segments=SEGMENTS)
    cuts = divide(mine, world, plan)
    return Job(
        NativeFlow(mine, plan), plan, Recipe(AdamW(weight_decay=0.1), 0.5), Here(world), cuts=cuts
    )


@BOTH
def test_a_single_microbatch(variant):
    plan = replace(cut("1f1b", variant, microbatches=1), rows=2)
    check(plan, steps=1)


@BOTH
def test_states_go_on_under_other_plans(variant):
    """A step on three workers, one on two with the other variant, one alone: all of one worker."""
    plans = [cut("1f1b", variant, 3), cut("zb-h1", 3 - variant)]
    plans.append(one(plans[0]))
    data = batches(3, plans[0].rows, SEQUENCE, VOCAB)
    whole = NativeFlow(model("gpt2", segments=SEGMENTS), plans[2])
    alone = Job(whole, plans[2], Recipe(AdamW(weight_decay=0.1), 0.5))
    wanted, saved = [], None
    for batch in data:
        alone.step(batch, 1e-2)
        wanted.append((snapshot(alone), alone.update_counts()))
    for plan, batch, (states, counts) in zip(plans, data, wanted, strict=True):

        def run(world: World, plan=plan, batch=batch, saved=saved):
            job = job_of(world, plan)
            if saved is not None:
                (weights, states), counts = saved
                job.load(lambda name, out: out.copy_(weights[name]),
                         lambda name, out: out.copy_(states[name]))  # fmt: skip
                job.restore_counts(counts)
            job.step(batch, 1e-2)
            found, read = snapshot(job), job.reader()
            for name in found[1]:
                own, _, kind = name.rpartition(".")
                assert torch.equal(read(own, kind), found[1][name])
            assert all(torch.equal(read(name, None), w) for name, w in found[0].items())
            shapes = {name: job.shape(name) for name in found[0]}
            assert shapes == {name: tuple(w.shape) for name, w in found[0].items()}
            result = found, job.update_counts()
            job.close()
            return result

        for found, made in play(plan.mesh, run):
            assert made == counts
            near(found[0], states[0])
            near(found[1], states[1])
            saved = found, made


@BOTH
def test_half_precision_is_the_same_run_to_run(variant):
    """And near one worker's, which sums the logits of the whole vocabulary at once."""
    plan = replace(cut("zb-v", variant), precision=Precision.named("bfloat16"))
    data = batches(2, plan.rows, SEQUENCE, VOCAB)

    def run(world: World):
        job = job_of(world, plan, "llama, untied")
        result = numbers(job, plan, data)
        job.close()
        return result

    first, second = play(plan.mesh, run)[0], play(plan.mesh, run)[1]
    assert first[0] == second[0]
    assert all(torch.equal(w, second[1][name]) for name, w in first[1].items())
    assert all(torch.equal(s, second[2][name]) for name, s in first[2].items())
    alone = one(plan)
    whole = NativeFlow(model("llama, untied", segments=SEGMENTS), alone)
    job = Job(whole, alone, Recipe(AdamW(weight_decay=0.1), 0.5))
    wanted = numbers(job, alone, data)
    assert first[0][0] == pytest.approx(wanted[0][0], rel=2e-3)


def test_each_worker_holds_its_rows_alone():
    """And, of what it does not compute with, no memory."""
    plan = cut("1f1b", 1, 4, 4)

    def run(world: World):
        job = job_of(world, plan, "llama, untied")
        found = (
            [t.numel for t in job.placement.chunks.tables],
            dict(job.flow.model.named_parameters()),
        )
        job.close()
        return found

    whole = sum(p.numel() for p in model("llama, untied", segments=SEGMENTS).parameters())
    results = play(plan.mesh, run)
    assert sum(sum(tables) for tables, _ in results) == whole
    for name in ("prologue.tokens.weight", "epilogue.head.weight"):
        assert [named[name].shape[0] for _, named in results] == [13, 13, 13, 14]


def test_a_target_that_is_no_token_ends_the_step():
    plan = cut("1f1b", 2)
    (batch,) = batches(1, plan.rows, SEQUENCE, VOCAB)
    batch.targets_BS[3, 4] = VOCAB
    with pytest.raises(OutsizeError, match="target 53 is no token of a vocabulary of 53"):
        play(plan.mesh, lambda world: job_of(world, plan).step(batch, 1e-2))


@pytest.mark.parametrize(
    ("family", "changes", "variant"),
    [("llama", {"sequence_parallel": True}, 2), ("llama, untied", {}, 1)],
)
def test_tables_that_a_tensor_axis_has_cut(changes, variant, family):
    """Each of its workers' rows are shared out again."""
    plan = cut("1f1b", variant, 2, 2, mesh=Mesh(1, 2, 2), **changes)
    check(plan, family, options=SMOOTH, steps=1)


FROZEN = {
    "the embedding": lambda name, _: "prologue.tokens" in name,
    "the head": lambda name, _: "head" in name,
    "both": lambda name, _: "head" in name or "prologue" in name,
    "the first stages": lambda name, _: "prologue" in name or ".0." in name,
    "all but the last block": lambda name, _: ".2." not in name,
}


@pytest.mark.parametrize(("frozen", "variant"), turns(FROZEN.values()), ids=FROZEN)
def test_frozen_tables(frozen, variant):
    check(cut("1f1b", variant), "llama, untied", frozen=frozen, steps=1)


def test_frozen_tables_that_are_cut_twice():
    """Tied; logits in chunks."""
    plan = cut("zb-h1", 1, 2, 2, mesh=Mesh(1, 2, 2), sequence_parallel=True, loss_chunk=9)
    check(plan, "llama", frozen=FROZEN["both"], steps=1)


@BOTH
def test_what_else_is_frozen(variant):
    frozen = lambda name, _: ".2." in name or "norm" in name or ".0." in name  # noqa: E731
    check(cut("zb-h1", variant), "llama, untied", frozen=frozen, steps=1)


def test_whole_tables_are_refused_in_a_line():
    plan = cut("1f1b", 1)

    def run(world: World):
        mine = model("llama, untied", segments=SEGMENTS)
        Job(NativeFlow(mine, plan), plan, Recipe(AdamW()), Here(world))

    said = "whole, while pipeline.vocabulary is 1; cut it with outsize.parallel.divide"
    with pytest.raises(OutsizeError, match=said) as caught:
        play(plan.mesh, run)
    assert "\n" not in str(caught.value)


def test_rows_that_nobody_has_handed_over_are_refused():
    plan = cut("1f1b", 1)

    def run(world: World):
        mine = model("llama, untied", segments=SEGMENTS)
        divide(mine, world, plan)
        Job(NativeFlow(mine, plan), plan, Recipe(AdamW()), Here(world))

    with pytest.raises(OutsizeError, match="hand over what that gives"):
        play(plan.mesh, run)


def test_adopted_modules_are_refused():
    mine = model("llama, untied")
    with pytest.raises(OutsizeError, match="an adopted module, whose embedding and head stay"):
        AdoptedFlow(mine, [("blocks.0", mine.blocks[0])], cut("1f1b", 1), lambda out, _: out)


def test_fewer_tokens_than_workers_are_refused():
    few = parse({**CONFIGS["llama"], "vocab_size": 3})
    plan = cut("1f1b", 1, 4, 4)
    with pytest.raises(OutsizeError, match="cuts 3 tokens over 4 workers"):
        check(plan, few, data=batches(1, plan.rows, SEQUENCE, 3))
