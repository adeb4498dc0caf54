"""Ladder and Kraken models over workers, in float64: the numbers of one worker."""

from __future__ import annotations

import copy

import pytest
import torch
from plain import batches
from tensor_split import Part, filled, one_pass, played, reference, whole, wrapping
from threads import play

from outsize.collectives import Lone, Mesh, along
from outsize.decode.generate import generate
from outsize.errors import OutsizeError
from outsize.models.dropout import Noise
from outsize.models.families import parse
from outsize.optim import AdamW
from outsize.parallel.divide import divide
from outsize.parallel.tensor.decoder import split
from outsize.parallel.tensor.overlap import Overlap, overlap_of
from outsize.plan import Plan, Precision, Stage
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.search.request import PlanRequest
from outsize.train.setup import check_layouts

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 32,
}  # fmt: skip
LLAMA = {**SIZES, "model_type": "llama", "attention_bias": True, "mlp_bias": True}
GPT2 = {
    "model_type": "gpt2", "vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4,
    "n_positions": 30,
}  # fmt: skip
QWEN3 = {**SIZES, "model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True}
MIXTRAL = {**SIZES, "model_type": "mixtral", "num_local_experts": 4}
SUBJECTS = {
    "ladder": {**LLAMA, "ladder_from": 0},
    "ladder, upper half": {**LLAMA, "ladder_from": 2},
    "ladder, gpt2": {**GPT2, "ladder_from": 1},
    "ladder, mixtral": {**MIXTRAL, "ladder_from": 1},
    "ladder, qwen3": {**QWEN3, "ladder_from": 1},
    "kraken": {**LLAMA, "kraken_ways": 4},
    "kraken, two ways": {**LLAMA, "kraken_ways": 2},
    "kraken, gpt2": {**GPT2, "kraken_ways": 2},
    "kraken, qwen3": {**QWEN3, "kraken_ways": 4},
}
WAYS = {
    "recompute": {"stages": per_segment(5, ("block",))},
    "one stage": {"stages": (Stage(0, 5),), "microbatch_rows": 3, "loss_chunk": 0},
    "parts again": {"recompute": ("attention", "mlp")},
    "tiles": {"tile": 5},
    "sequence chunks": {"stages": per_segment(5, ("block",)), "sequence_chunk": 5},
    "stages of blocks, in chunks": {
        "stages": (Stage(0, 1), Stage(1, 4, ("block",)), Stage(4, 5)), "sequence_chunk": 5,
    },
}  # fmt: skip
ROWS, TOKENS = 3, 13
BATCH = batches(1, ROWS, TOKENS, 61)[0]


def plan_of(**changes) -> Plan:
    usual = {"stages": per_segment(5), "microbatch_rows": 2, "loss_chunk": 7}
    usual |= {"rows": ROWS, "sequence": TOKENS, "precision": Precision.named("float64")}
    return Plan(5, **{**usual, **changes})


def close(parts, model, batch) -> None:
    """Loss and gradients are those of plain logits and autograd."""
    loss, gradients = reference(model, batch)
    assert abs(parts[0].loss - loss) <= 1e-12 * abs(loss)
    largest = max(float(g.abs().max()) for g in gradients.values())
    for name, expected in gradients.items():
        mine = whole(parts, name)
        limit = 1e-10 * max(float(expected.abs().max()), 1e-3 * largest)
        assert mine is not None and float((mine - expected).abs().max()) <= limit, name


# Kraken's layers are refused over tokens that are cut.
SPREAD = [
    *((name, 2, False, 3) for name in SUBJECTS if "kraken" in name),
    *((name, 2, True, 3) for name in SUBJECTS if "ladder" in name),
    ("ladder", 1, False, 3), ("ladder", 2, False, 0), ("ladder, upper half", 2, True, 0),
    ("ladder, mixtral", 2, False, 3), ("kraken", 1, False, 0), ("kraken", 2, False, 0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "size", "sequence_parallel", "chunks"), SPREAD)
def test_loss_and_gradients(name, size, sequence_parallel, chunks):
    model = filled(SUBJECTS[name])
    close(played(model, plan_of(), BATCH, size, sequence_parallel, chunks=chunks), model, BATCH)


@pytest.mark.parametrize("name", ["ladder", "kraken"])
def test_four_workers(name):
    model = filled(SUBJECTS[name])
    close(played(model, plan_of(), BATCH, 4, False, chunks=2), model, BATCH)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(("ladder, upper half", way) for way in ("one stage", "parts again", "sequence chunks")),
        *(("kraken", way) for way in ("recompute", "tiles", "stages of blocks, in chunks")),
    ],
)
def test_with_what_else_a_plan_does(name, way):
    changes = dict(WAYS[way])
    wrap = wrapping(changes.pop("tile", 0), changes.pop("recompute", ()))
    model, plan = filled(SUBJECTS[name]), plan_of(**changes)
    alone = copy.deepcopy(model)
    wrap(alone)
    loss = one_pass(alone, plan, BATCH, 1 / BATCH.count())
    gradients = {n: p.grad for n, p in alone.named_parameters()}
    cuts = split(copy.deepcopy(model), along(Lone(), "tensor"))
    close([Part(loss, gradients, cuts, [], {})], model, BATCH)
    close(played(model, plan, BATCH, 2, False, wrap=wrap, chunks=3), model, BATCH)


@pytest.mark.parametrize("name", ["ladder", "kraken"])
def test_jobs_with_dropout(name):
    """Two steps of a run, clipped: the weights of one worker."""
    model = filled(SUBJECTS[name])

    def trained(world, chunks):
        plan = plan_of(mesh=world.mesh, overlap=chunks, stages=per_segment(5, ("mlp",)))
        mine = copy.deepcopy(model)
        cuts = divide(mine, world, plan)
        optimizer = AdamW(lr=1e-2)
        job = Job(NativeFlow(mine, plan), plan, Recipe(optimizer, 0.5), Here(world), cuts=cuts)
        for step, batch in enumerate(batches(2, ROWS, TOKENS, 61)):
            job.step(
                batch.__class__(batch.ids_BS, batch.targets_BS, batch.bounds, Noise(0.2, 1, step))
            )
        return job.report.norm, {
            n: (cuts[n], p.detach().clone()) for n, p in mine.named_parameters()
        }

    norm, expected = trained(Lone(), 0)
    for found, parts in play(Mesh(tensor=2), lambda world: trained(world, 3)):
        assert found == pytest.approx(norm, rel=1e-9)
        for part, (cut, mine) in parts.items():
            torch.testing.assert_close(mine, cut.of(expected[part][1]), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", ["ladder, upper half", "kraken"])
def test_generation(name):
    model, prompt = filled(SUBJECTS[name]), [3, 14, 15, 9, 26, 5, 35, 8]

    def generated(world):
        mine = copy.deepcopy(model)
        split(mine, along(world, "tensor"), beside=overlap_of(world, 2))
        return generate(mine, prompt, 9, prefill_tokens=5)

    expected = generate(model, prompt, 9)
    assert play(Mesh(tensor=2), generated) == [expected] * 2


class Recording:
    """An axis that says when its sums begin."""

    def __init__(self, axis, events) -> None:
        self.axis, self.size, self.rank, self.events = axis, axis.size, axis.rank, events

    def all_reduce(self, tensor, operation="sum"):
        self.events.append("sum")
        return self.axis.all_reduce(tensor, operation)


@pytest.mark.parametrize(("name", "sums"), [("ladder", 6), ("kraken, two ways", 3)])
def test_sums_of_a_pass(name, sums):
    """Two a layer on a ladder, one a layer in a Kraken, where the plain model waits for two: all
    but the last beside a branch."""
    model = filled(SUBJECTS[name])

    def work(world):
        events, mine = [], copy.deepcopy(model)
        way = Overlap(Recording(along(world, "tensor", "beside"), events), 3)
        axis = along(world, "tensor")
        split(mine, axis, beside=way)
        axis.calls.clear()
        with torch.no_grad():
            mine.hidden(torch.arange(12), mine.context(torch.arange(12), (0, 12)))
        return len(events), [call for call, _ in axis.calls]

    for found, calls in play(Mesh(tensor=2), work):
        assert found == sums
        assert calls == ["all_reduce"], "the embedding's"


@pytest.mark.parametrize(
    ("size", "sequence_parallel", "words"),
    [(4, False, "nearest that works is tensor=2"), (2, True, "sequence_parallel is set")],
)
def test_kraken_over_what_it_cannot_be_spread(size, sequence_parallel, words):
    model = filled(SUBJECTS["kraken, two ways"])
    with pytest.raises(OutsizeError, match=words):
        played(model, plan_of(), BATCH, size, sequence_parallel)


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_run_is_not_refused(name):
    """Checks that `outsize train` makes before anything is built."""
    request = PlanRequest(ROWS, TOKENS, Precision.named("float32"), AdamW(), mesh=Mesh(tensor=2))
    check_layouts(parse(SUBJECTS[name]), request)


def test_a_run_over_too_many_workers_is_refused():
    request = PlanRequest(ROWS, TOKENS, Precision.named("float32"), AdamW(), mesh=Mesh(tensor=4))
    with pytest.raises(OutsizeError, match="2 ways of a layer do not divide evenly over 4"):
        check_layouts(parse(SUBJECTS["kraken, two ways"]), request)
