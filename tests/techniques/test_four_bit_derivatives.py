"""Derivatives in 4 bits: a plain loop whose functions are replaced by linear ones with the rounded
derivatives, the bytes that a step holds, and what is foretold of them."""

from __future__ import annotations

from dataclasses import replace

import anywhere
import plain
import pytest
import streamed
import torch
from plain import loss_of
from rates import known_hardware
from subjects import VOCAB, base_plan, config_of
from threads import play

from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.memory import Ledger
from outsize.models.build import build
from outsize.models.mlp import MLP
from outsize.models.norm import Norm
from outsize.models.trained import only
from outsize.optim import AdamW
from outsize.parallel.divide import divide
from outsize.plan import Pipelined, Precision, Rest, Stage, zero
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.making import NativeModel, make_job
from outsize.runtime.recipe import Here, Recipe
from outsize.search import PlanRequest, predict
from outsize.techniques.four_bit_derivatives import KEY, FourBitDerivatives

STEPS, RATE, WHOLE = 2, 1e-2, {KEY: FourBitDerivatives("whole")}


# -- the same, written out -------------------------------------------------------------------------


def nearest(x, levels):
    return levels[(x.unsqueeze(-1) - levels).abs().argmin(-1)]


def on_grid(x):
    return nearest(x.detach(), torch.arange(-2, 14, dtype=x.dtype) / 12)


def by_groups(x):
    """Of rows of 64 features or fewer, or of 64 by 64."""
    parts = []
    for group in x.detach().split(64, -1):
        top = (group.abs().amax(-1, keepdim=True) / 7).bfloat16().to(x.dtype)
        parts.append(nearest(group / top, torch.arange(-7, 8, dtype=x.dtype)) * top)
    return torch.cat(parts, -1)


def with_slope(value, *terms):
    """The value, with the gradients of the terms."""
    return value.detach() + sum(term - term.detach() for term in terms)


def derivative(f, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(f(x).sum(), x)[0]


def activation_of(f):
    return lambda x: with_slope(f(x), on_grid(derivative(f, x)) * x)


def gate_of(f):
    def gate(g, up, _):
        by_gate, by_up = by_groups(up * derivative(f, g)), by_groups(f(g))
        return with_slope(f(g) * up, by_gate * g, by_up * up)

    return gate


def norm(one, x):
    centred = one.facts.kind == "layer"
    h = x - x.mean(-1, keepdim=True) if centred else x
    inverse = (h.square().mean(-1, keepdim=True) + one.facts.eps).rsqrt()
    unit, weight = h * inverse, one.weight + (0.0 if centred else 1.0 - one.facts.unit)
    near, inverse = by_groups(unit), inverse.detach()
    slope = (x - near * (near * x).mean(-1, keepdim=True)) * inverse
    if centred:
        slope = slope - x.mean(-1, keepdim=True) * inverse
    terms = [weight.detach() * slope, weight * near]
    value = unit * weight
    if one.bias is not None:
        value, terms = value + one.bias, [*terms, one.bias]
    return with_slope(value, *terms)


def written_out(model):
    for block in model.blocks:
        for module in block.modules():
            if isinstance(module, MLP):
                plain_ = module.activation
                module.gating = gate_of(plain_.forward)
                module.activation = replace(plain_, forward=activation_of(plain_.forward))
            elif isinstance(module, Norm):
                module.run = norm


def by_hand(family, data):
    model = build(config_of(family), seed=1, dtype=torch.float64)
    written_out(model)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        RATE, betas=(0.9, 0.95), eps=1e-4,
    )  # fmt: skip
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {n: p.detach() for n, p in model.named_parameters()}


WAYS = {
    "zero 3": {"mesh": Mesh(2), "shards": zero(3, 2)},
    "pipeline, recompute": {
        "mesh": Mesh(pipeline=2), "pipeline": Pipelined("1f1b"),
        "stages": (Stage(0, 2), Stage(2, 3, ("block",)), Stage(3, 5)),
    },
    "chunks": {"sequence_chunk": 6, "stages": per_segment(5, ("block",))},
}  # fmt: skip
PAIRS = [("gpt2", "pipeline, recompute"), ("gemma2", "zero 3"),
         ("llama, untied", "chunks")]  # fmt: skip


@pytest.mark.parametrize(("family", "way"), PAIRS, ids=map(": ".join, PAIRS))
def test_a_job_is_a_plain_loop_with_rounded_derivatives(family, way):
    plan = streamed.plan_of("float64", rows=4, microbatch_rows=2, approximate=(KEY,), **WAYS[way])
    data = anywhere.data_of(STEPS)
    losses, expected = by_hand(family, data)

    def run(world):
        model = build(config_of(family), seed=1, dtype=torch.float64)
        cuts = divide(model, world, plan)
        recipe = Recipe(AdamW(weight_decay=0.1, eps=1e-4), techniques=WHOLE)
        job = Job(NativeFlow(model, plan), plan, recipe, Here(world), cuts=cuts)
        found = [float(job.step(b.rows(*plan.rows_at(job.place)), RATE)) for b in data]
        weights = streamed.snapshot(job)[0]
        job.close()
        assert all(module.run is not norm for module in model.modules() if isinstance(module, Norm))
        return found, weights

    for found, weights in play(plan.mesh, run):
        assert found == pytest.approx(losses, rel=1e-10)
        for name in expected:
            torch.testing.assert_close(weights[name], expected[name], rtol=1e-9, atol=1e-10)


def peak_of(approximate, trained=(), rest="int8", layers=6):
    """Bytes of activations at the peak of a step: counted, and foretold."""
    sizes = {"n_embd": 64, "n_layer": layers, "n_head": 2}
    config = config_of("gpt2", **sizes)
    if trained:
        config = only(config, trained, "train.only")
    plan = base_plan(
        "float32", rows=4, microbatch_rows=4, sequence=32, loss_chunk=32, segments=layers + 2,
        stages=per_segment(layers + 2), approximate=approximate,
    )  # fmt: skip
    said = {KEY: FourBitDerivatives(rest)} if approximate else {}
    recipe, ledger = Recipe(AdamW(), techniques=said), Ledger()
    job = make_job(NativeModel(build(config, 1)), plan, recipe, Here(ledger=ledger))
    for batch in plain.batches(2, 4, 32, VOCAB):
        job.step(batch, 1e-3)
    trace = job.report.trace
    request = PlanRequest(
        4, 32, Precision.named("float32"), recipe.optimizer, None, documents=(0, 32),
        approximate=approximate, techniques=said,
    )  # fmt: skip
    if layers == 2:
        foretold = predict(config, request, plan, known_hardware()).peak
        assert foretold == pytest.approx(trace.peak(), rel=0.02)
    return trace.peak() - sum(trace.events[-1].live.values())


def a_block_keeps(*said):
    less, more = (peak_of(*said, layers=layers) for layers in (2, 4))
    return (more - less) / 2


def test_a_block_keeps_less_than_a_fifth_where_biases_learn():
    full, biases = a_block_keeps((), ()), ("blocks.*.bias",)
    assert a_block_keeps((KEY,), biases) < full / 5
    assert a_block_keeps((), biases) > full / 2, "it is not the biases alone"


def test_the_forward_pass_is_whole_and_it_learns():
    data, ends = plain.batches(1, 4, 32, VOCAB), []
    for approximate in ((), (KEY,)):
        model = build(config_of("llama, untied", hidden_size=64, intermediate_size=176), seed=1)
        plan = base_plan("float32", rows=4, microbatch_rows=4, sequence=32, approximate=approximate)
        job = Job(NativeFlow(model, plan), plan, Recipe(AdamW()))
        ends.append([float(job.step(data[0], 3e-3)) for _ in range(15)])
    whole, near = ends
    assert near[0] == pytest.approx(whole[0], rel=1e-6) and near != whole
    assert near[-1] < near[0] - 0.3 and near[-1] == pytest.approx(whole[-1], rel=0.02)


def test_what_is_refused():
    plan = base_plan(approximate=(KEY,))
    below = tuple(replace(s, rest=Rest(activations="disk")) for s in plan.stages)
    model = build(config_of("llama"), seed=1)
    with pytest.raises(OutsizeError, match=r"rest is 'int8', and activations rest below"):
        resting = replace(plan, stages=below)
        Job(NativeFlow(model, resting), resting, Recipe(AdamW()))
