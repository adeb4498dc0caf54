"""A sparse mask: a plain autograd twin's outputs and gradients, merged, plans, codes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from adapting import some_ids
from plain import batches
from subjects import SEQUENCE, VOCAB, base_plan, config_of
from torch.nn import functional as F
from verifying import fill

import outsize
from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.models.build import build, coded_draw
from outsize.models.coding import coded, format_of
from outsize.optim import AdamW
from outsize.parallel.check.decoder import Spread, check_decoder
from outsize.parallel.tensor.declared import boundaries
from outsize.parallel.tensor.units import cuts_of
from outsize.plan import Pipelined
from outsize.techniques.adapt.sparse_masks import Sparse, chosen
from outsize.verify import Case, Native, verify

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def smallest(weight, of):
    """Where the weight is the smallest of its group, one by one."""
    mask = torch.zeros_like(weight, dtype=torch.bool)
    for row in range(weight.shape[0]):
        for first in range(0, weight.shape[1], of):
            group = weight[row, first : first + of].abs().tolist()
            mask[row, first + group.index(min(group))] = True
    return mask


def test_a_layer_has_the_outputs_and_gradients_of_plain_autograd():
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(12, 5)).double()
    weight = model[0].weight.data
    weight[0, :4] = 0.25  # equal ones: the first
    x = torch.randn(3, 4, 12, dtype=torch.float64, requires_grad=True)
    plain = model(x)
    outsize.adapt(model, "sparse", of=4)
    assert torch.equal(model(x), plain)
    beside, mask = model[0].beside, smallest(weight, 4)
    assert mask[0, 0] and int(mask.sum()) == beside.change.numel() == 15
    beside.change.data = torch.randn(5, 3, dtype=torch.float64)
    whole = torch.zeros(5, 12, dtype=torch.float64)
    whole[mask] = beside.change.data.flatten()
    twin, change = (t.detach().clone().requires_grad_() for t in (x, whole))
    expected = F.linear(twin, weight + change, model[0].bias)
    found = model(x)
    torch.testing.assert_close(found, expected, **CLOSE)
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, twin.grad, **CLOSE)
    torch.testing.assert_close(beside.change.grad.flatten(), change.grad[mask], **CLOSE)
    before = weight.clone()
    outsize.merge(model)
    torch.testing.assert_close(model(x), expected, **CLOSE)
    assert int((model[0].weight != before).sum()) == 15


def test_files_go_to_a_model_of_transformers_and_back(tmp_path):
    outsize.save(build(config_of("llama"), seed=4, dtype=torch.float64), tmp_path / "base")
    ours, ids = outsize.load(tmp_path / "base"), some_ids()
    outsize.adapt(ours, "sparse", of=4)
    for p in ours.parameters():
        if p.requires_grad:
            p.data = torch.randn(p.shape, dtype=p.dtype)
    outsize.save(ours, tmp_path / "made", adapter_only=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="float64")
    before = theirs(ids).logits
    outsize.adapt(theirs, tmp_path / "made")
    torch.testing.assert_close(theirs(ids).logits, ours(ids), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(theirs(ids).logits, before, rtol=1e-2)
    expected = ours(ids)
    torch.testing.assert_close(outsize.merge(ours)(ids), expected, **CLOSE)


PLANS = {
    "tensor": {"mesh": Mesh(tensor=2), "sequence_parallel": True, "overlap": 2},
    "pipeline": {"mesh": Mesh(pipeline=2), "pipeline": Pipelined("1f1b")},
}


@pytest.mark.parametrize(("plan", "codes"), [("tensor", None), ("pipeline", None), ("tensor", 1)])
def test_a_plan_trains_as_plain_pytorch(plan, codes):
    made = base_plan(**PLANS[plan])
    data = batches(1, made.rows, SEQUENCE, VOCAB)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16} if codes else {}
    config = config_of("gemma2", **sizes)
    config = coded(config, format_of("int4:16")) if codes else config
    config = replace(config, adapter=Sparse(4))
    native = Native(config, lambda: coded_draw(build(config), fill) if codes else fill)
    case = Case(native, made, AdamW(1e-2, eps=1e-4), lambda step: data[step], 1, 0.5)
    found = verify(case, own=False)
    assert found.holds, found
    names = {row.name for row in found.exact.rows}
    assert names and all(name.endswith(".beside.change") for name in names)


@pytest.mark.parametrize("parallel", [False, True])
def test_the_checker_knows_how_parts_of_a_mask_lie(parallel):
    config = replace(config_of("llama"), adapter=Sparse(4))
    cuts = cuts_of(build(config), 2, 0, parallel)
    assert not check_decoder(config, 2, Spread(cuts, boundaries(parallel)))
    cut = "blocks.0.mlp.down.beside.change"
    lost = replace(cuts[cut], dim=None, spans=(), shared=2, partial=True)
    assert check_decoder(config, 2, Spread({**cuts, cut: lost}, boundaries(parallel)))


def test_groups_that_do_not_fit_are_refused():
    with pytest.raises(OutsizeError, match=r"7 does not divide the 24 features that attention\.q"):
        outsize.adapt(build(config_of("llama")), "sparse", of=7)
    model = build(replace(config_of("llama"), adapter=Sparse(8)))
    with pytest.raises(OutsizeError, match=r"mesh: tensor is 2, which cuts .*beside\.change"):
        cuts_of(model, 2, 0, False)


def test_a_mask_is_that_of_weights_in_bfloat16():
    """Of numbers that are equal there the first is taken, in whatever precision they are held."""
    weight = torch.tensor([[3.0, -1.0, 0.9999, 2.0, 0.25, -0.125, 0.1251, 4.0]])
    assert chosen(weight, 4).tolist() == [[1, 1]]
    assert torch.equal(chosen(weight, 4), chosen(weight.bfloat16(), 4))
