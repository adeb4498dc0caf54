"""Masked LoRA: a plain autograd twin's outputs and gradients, the zeros when merged, plans."""

from __future__ import annotations

from dataclasses import replace

import peft
import pytest
import torch
from adapting import some_ids
from plain import batches
from subjects import SEQUENCE, VOCAB, base_plan, config_of
from torch.nn import functional as F
from verifying import fill

import outsize
from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.coding import coded, format_of
from outsize.optim import AdamW
from outsize.plan import Pipelined
from outsize.serve.export import export
from outsize.techniques.adapt.masked_lora import FORMAT, MaskedLora
from outsize.verify import Case, Native, verify

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
PLANS = {
    "tensor": {"mesh": Mesh(tensor=2), "sequence_parallel": True, "overlap": 2},
    "pipeline": {"mesh": Mesh(pipeline=2), "pipeline": Pipelined("1f1b")},
}


def pruned_fill(name, out):
    """Half of each matrix of the blocks is zero; A and B are as they were drawn."""
    fill(name, out)
    if out.dim() == 2 and ".beside." not in name and name.startswith("blocks."):
        out[(out.abs() < 0.6745 * 0.2)] = 0


def sparse_model(family="llama"):
    model = build(config_of(family), seed=4, dtype=torch.float64)
    with torch.no_grad():
        for name, p in model.named_parameters():
            pruned_fill(name, p)
    return model


def test_a_layer_has_the_outputs_and_gradients_of_plain_autograd():
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5)).double()
    weight = model[0].weight.data
    weight[torch.rand(5, 7) < 0.5] = 0
    x = torch.randn(3, 4, 7, dtype=torch.float64, requires_grad=True)
    plain = model(x)
    outsize.adapt(model, "masked_lora", rank=2, alpha=3.0)
    torch.testing.assert_close(model(x), plain, **CLOSE)
    beside = model[0].beside
    beside.b.data = torch.randn(5, 2, dtype=torch.float64)
    a, b, twin = (t.detach().clone().requires_grad_() for t in (beside.a, beside.b, x))
    expected = F.linear(twin, weight + 1.5 * (b @ a) * (weight != 0), model[0].bias)
    found = model(x)
    torch.testing.assert_close(found, expected, **CLOSE)
    found.square().sum().backward()
    expected.square().sum().backward()
    for one, other in ((x, twin), (beside.a, a), (beside.b, b)):
        torch.testing.assert_close(one.grad, other.grad, **CLOSE)
    lora = outsize.adapt(torch.nn.Sequential(torch.nn.Linear(7, 5)).double(), "lora", rank=2)
    assert beside.a.abs().max() <= lora[0].beside.a.weight.abs().max() * 1.5, "begins as LoRA's"


@pytest.mark.parametrize(("family", "targets"), [("llama", ["all-linear"]), ("gpt2", ["mlp"])])
def test_merged_and_saved_it_is_the_same_model_with_the_same_zeros(family, targets, tmp_path):
    model, ids = sparse_model(family), some_ids()
    outsize.save(model, tmp_path / "base")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ours = outsize.load(tmp_path / "base")
    outsize.adapt(ours, "masked_lora", seed=3, rank=2, targets=targets)
    plain = model(ids)
    torch.testing.assert_close(ours(ids), plain, **CLOSE)
    with torch.no_grad():
        for name, p in ours.named_parameters():
            if name.endswith(".beside.b"):
                fill(name, p)
    expected = ours(ids)
    assert not torch.allclose(expected, plain, rtol=1e-3)
    outsize.save(ours, tmp_path / "adapter")
    torch.testing.assert_close(outsize.load(tmp_path / "adapter")(ids), expected, **CLOSE)
    merged = outsize.merge(ours)
    torch.testing.assert_close(merged(ids), expected, **CLOSE)
    for name, p in merged.named_parameters():
        assert torch.equal(p == 0, before[name] == 0), name
        chosen = p.dim() == 2 and (targets[0] in name or (family == "llama" and "blocks" in name))
        assert torch.equal(p, before[name]) is not chosen, name


def test_peft_does_not_have_the_method_and_gets_no_files_of_it(tmp_path):
    assert FORMAT not in peft.PeftType.__members__
    outsize.save(sparse_model(), tmp_path / "base")
    ours = outsize.adapt(outsize.load(tmp_path / "base"), "masked_lora", rank=2)
    outsize.save(ours, tmp_path / "adapter")
    with pytest.raises(OutsizeError, match="--to peft: peft has no method OUTSIZE_MASKED_LORA"):
        export(tmp_path / "adapter", "peft", tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_trains_as_plain_pytorch(plan):
    made = base_plan(**PLANS[plan])
    data = batches(1, made.rows, SEQUENCE, VOCAB)
    config = replace(config_of("gemma2"), adapter=MaskedLora(3, 5.0))
    native = Native(config, lambda: pruned_fill)
    found = verify(
        Case(native, made, AdamW(1e-2, eps=1e-4), lambda step: data[step], 1, 0.5), own=False
    )
    assert found.holds, found
    names = {row.name for row in found.exact.rows}
    assert names and all(n.endswith((".beside.a", ".beside.b")) for n in names)


def test_codes_are_refused_in_a_line():
    config = coded(config_of("llama", hidden_size=32, intermediate_size=64), format_of("int4:16"))
    with pytest.raises(OutsizeError, match=r"adapt.masked_lora: attention.q is held as int4"):
        build(replace(config, adapter=MaskedLora(2)))
