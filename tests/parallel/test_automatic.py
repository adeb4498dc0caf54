"""Automatic tensor parallelism of transformers' models, against the plain model in float64."""

import copy

import pytest
import torch
from foreign import IDS, MODELS, model_of, transformers
from threads import play
from torch import nn

from outsize.collectives import Mesh
from outsize.collectives.world import along
from outsize.parallel.automatic.apply import spread
from outsize.parallel.automatic.derive import derive


def loss_of(model):
    logits = model(input_ids=IDS).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())


def reduced(model, cuts, axis):
    """Every gradient as the optimizer gets it, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        found[name] = axis.all_reduce(grad) if cuts[name].partial else grad
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_model_over_two_workers_is_the_plain_model(name):
    plain = model_of(name)
    rows, changes = MODELS[name][2:]
    derived = derive(plain, 2, (IDS,))
    assert len(derived) == 2
    for found in derived.values():
        have = [group.row.module for group in found.groups]
        assert len(have) == len(rows) and all(map(str.endswith, have, rows)), (have, found.left)
        own = {c.name for c in found.changes if not c.name.startswith(("in_", "out_"))}
        assert own == changes
    expected = loss_of(plain)
    expected.backward()

    def work(world):
        axis = along(world, "tensor")
        model = copy.deepcopy(plain)
        model.zero_grad()
        cuts = spread(model, derived, axis)
        axis.calls.clear()
        loss = loss_of(model)
        loss.backward()
        calls = len(axis.calls)
        return loss.detach(), reduced(model, cuts, axis), cuts, calls

    results = play(Mesh(tensor=2), work)
    whole = dict(plain.named_parameters())
    for loss, grads, cuts, calls in results:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-10)
        assert set(grads) == set(whole) == set(cuts)
        for key, grad in grads.items():
            wanted = cuts[key].of(whole[key].grad)
            torch.testing.assert_close(grad, wanted, rtol=1e-10, atol=1e-10, msg=f"{name} {key}")
        fans = sum(len(g.fans) for d in derived.values() for g in d.groups)
        sums = sum(len(d.groups) for d in derived.values())
        # The first block's inputs have a gradient too: the embedding learns.
        assert calls == fans + sums
    parts = sum(p.numel() for p in results[0][1].values())
    assert parts < 0.8 * sum(p.numel() for p in whole.values()) or len(rows) == 1


def test_biases_of_heads_made_outside_the_blocks_are_cut_with_the_heads():
    """T5's first block makes them for all heads, and the others are given them."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    plain = transformers.T5ForConditionalGeneration(config).double()
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.2)
    batch = {
        "input_ids": IDS,
        "attention_mask": (IDS != 3).long(),
        "labels": IDS[:, :5].contiguous(),
    }
    derived = derive(plain, 2, (), batch)
    assert [len(found.groups) for found in derived.values()] == [2, 2, 3, 3]
    assert not any(found.left for found in derived.values())
    expected = plain(**batch).loss
    expected.backward()

    def work(world):
        axis = along(world, "tensor")
        model = copy.deepcopy(plain)
        model.zero_grad()
        cuts = spread(model, derived, axis)
        loss = model(**batch).loss
        loss.backward()
        return loss.detach(), reduced(model, cuts, axis), cuts

    whole = dict(plain.named_parameters())
    for loss, grads, cuts in play(Mesh(tensor=2), work):
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-10)
        for key, grad in grads.items():
            wanted = cuts[key].of(whole[key].grad)
            torch.testing.assert_close(grad, wanted, rtol=1e-10, atol=1e-10, msg=key)
