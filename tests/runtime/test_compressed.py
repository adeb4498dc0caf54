"""Activations in 8 bits: the bound on what rounding does, who shares, and what a step holds."""

from __future__ import annotations

import copy
from dataclasses import replace

import plain
import pytest
import torch
from subjects import VOCAB, base_plan, config_of
from torch import nn

from outsize.errors import OutsizeError
from outsize.memory import Ledger
from outsize.models.build import build
from outsize.optim import AdamW
from outsize.plan import Rest
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.runtime.special.compressed import GROUP, MOST, compressing, rounded
from outsize.techniques.frozen_by_dynamics import KEY, FrozenByDynamics
from outsize.train.resolve import resolve

ROWS, SEQUENCE = 4, 32


def plan_of(**changes):
    kept = {"rows": ROWS, "microbatch_rows": ROWS, "sequence": SEQUENCE, "loss_chunk": 32}
    return base_plan("float32", **{"approximate": ("frozen-by-dynamics",), **kept, **changes})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_number_is_off_by_half_a_scale_at_most(dtype):
    x = (torch.randn(5 * GROUP + 7) * torch.logspace(-6, 6, 5 * GROUP + 7)).to(dtype)
    x[GROUP : 2 * GROUP] = 0
    got = rounded(x).flat()
    assert got.dtype == dtype and got.shape == x.shape
    for start in range(0, len(x), GROUP):
        here = slice(start, start + GROUP)
        top = x[here].double().abs().max()
        ulp = torch.finfo(dtype).eps * top
        assert (got[here].double() - x[here].double()).abs().max() <= top / MOST / 2 + ulp
    assert rounded(x).codes.dtype == torch.int8


class Layer(nn.Module):
    """Keeps its input twice, a transposed view of it, and a weight."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return x.sin() + (x @ self.weight) * x + x.t().cos().t()


def test_gradients_are_those_of_the_rounded_activations():
    torch.manual_seed(0)
    x, weight = torch.randn(48, 48).double(), torch.randn(48, 48).double()
    near = rounded(x.flatten()).flat().view(48, 48)
    plain_layer, layer = Layer(weight), Layer(weight)
    one, two = (near.clone().requires_grad_(), x.clone().requires_grad_())
    y = plain_layer(one)
    with compressing({layer.weight.untyped_storage()._cdata}):
        z = layer(two)
    with torch.no_grad():
        assert torch.equal(z, plain_layer(x)), "the forward pass has whole numbers"
    z.backward(torch.ones_like(z))
    y.backward(torch.ones_like(y))
    # The product is rounded on its own; everything else comes from x alone.
    product = rounded((x @ weight).flatten()).flat().view(48, 48)
    expected = one.grad - near @ weight + product
    assert torch.allclose(two.grad, expected, rtol=1e-10, atol=1e-10)
    assert torch.allclose(layer.weight.grad, near.t() @ near, rtol=1e-10)
    assert not torch.allclose(layer.weight.grad, x.t() @ x, rtol=1e-4)


def peak_of(keep, rate, layers=6):
    shape = {"num_hidden_layers": layers, "hidden_size": 64, "intermediate_size": 176}
    model = build(config_of("llama, untied", **shape), seed=1)
    plan = plan_of(segments=layers + 2, stages=per_segment(layers + 2))
    ledger = Ledger()
    recipe = Recipe(AdamW(), techniques={KEY: FrozenByDynamics(rate, keep)})
    job = Job(NativeFlow(model, plan), plan, recipe, Here(ledger=ledger))
    for batch in plain.batches(2, ROWS, SEQUENCE, VOCAB):
        job.step(batch, 1e-3)
    return job.report.trace.peak() - sum(job.report.trace.events[-1].live.values())


def test_a_step_holds_far_less_and_frozen_layers_keep_nothing():
    whole, half, small = peak_of("whole", 0.0), peak_of("int8", 0.0), peak_of("int8", 0.95)
    assert half < 0.55 * whole
    assert small < half
    assert small < 0.5 * whole


def test_it_learns_as_with_whole_activations():
    shape = {"hidden_size": 64, "intermediate_size": 176}
    model = build(config_of("llama, untied", **shape), seed=1)
    data, ends = plain.batches(1, ROWS, SEQUENCE, VOCAB), []
    for keep in ("whole", "int8"):
        plan = plan_of()
        recipe = Recipe(AdamW(), techniques={KEY: FrozenByDynamics(0.0, keep)})
        job = Job(NativeFlow(copy.deepcopy(model), plan), plan, recipe)
        ends.append([float(job.step(data[0], 3e-3)) for _ in range(25)])
    whole, near = ends
    assert whole[0] == near[0] and whole[-1] < whole[0] - 0.5
    assert near != whole and near[-1] == pytest.approx(whole[-1], rel=0.01)


def test_what_is_refused():
    with pytest.raises(OutsizeError, match="keep: 'int4'; expected one of whole, int8"):
        resolve(None, ("frozen-by-dynamics.keep=int4",))
    below = [replace(s, rest=Rest(activations="disk")) for s in plan_of().stages]
    plan = plan_of(stages=tuple(below))
    recipe = Recipe(AdamW(), techniques={KEY: FrozenByDynamics(0.5, "int8")})
    with pytest.raises(OutsizeError, match=r"activations rest below .* do not go together"):
        Job(NativeFlow(build(config_of("llama"), seed=1), plan), plan, recipe)
