"""Ladder and Kraken models: their equations, written out plainly; what they are made from."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from tensor_split import filled

from outsize.checkpoint import hub
from outsize.decode.generate import generate
from outsize.errors import OutsizeError
from outsize.models.decoder import Decoder
from outsize.models.families import parse
from outsize.optim import AdamW
from outsize.plan import Plan
from outsize.plan.plan import per_segment
from outsize.runtime.making import NativeModel, make_job
from outsize.runtime.recipe import Recipe
from outsize.techniques.wirings.kraken_ways import converted, krakened
from outsize.techniques.wirings.ladder_from import laddered

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA = {**SIZES, "model_type": "llama", "attention_bias": True, "mlp_bias": True}
IDS = torch.arange(20) * 7 % 61


def to_ladder(model, first=None):
    return wired(model, laddered(model.config, first))


def to_kraken(model, ways):
    return converted(model, krakened(model.config, ways))


def wired(model, config):
    """The same weights under another config."""
    made = Decoder(config).to(next(model.parameters()).dtype)
    made.load_state_dict(model.state_dict())
    return made


def plain_parts(model):
    """The stream that enters, a context, and the branches with their norms of a plain model."""
    ctx = model.context(torch.arange(20), (0, 20))
    branches = []
    for block in model.blocks:
        branches.append(lambda x, b=block: b.attention(b.attention_norm(x), ctx))
        branches.append(lambda x, b=block: b.mlp(b.mlp_norm(x), ctx))
    return model.prologue(IDS, ctx), ctx, branches


@pytest.mark.parametrize("first", [0, 2, 3])
def test_a_ladder_branch_misses_the_one_before(first):
    model = filled(LLAMA)
    x, ctx, branches = plain_parts(model)
    outputs = []
    for i, branch in enumerate(branches):
        seen = outputs[: i if i < 2 * first else max(i - 1, 0)]
        outputs.append(branch(x + sum(seen) if seen else x))
    expected = model.epilogue.logits(model.epilogue(x + sum(outputs), ctx))
    found = to_ladder(model, first)(IDS)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert (found - model(IDS)).abs().max() > 1e-2


def test_the_upper_half_is_converted_unless_told_otherwise():
    model = filled(LLAMA)
    torch.testing.assert_close(to_ladder(model)(IDS), to_ladder(model, 2)(IDS))


def sub_model(model, way, ways):
    """A plain model of one way's weights."""
    cut = {**LLAMA, "num_attention_heads": 4 // ways, "num_key_value_heads": 2 // ways or 1}
    cut |= {"intermediate_size": 48 // ways, "head_dim": 8}
    mine, every = filled(cut), dict(model.named_parameters())
    for name, p in mine.named_parameters():
        whole = every[name].detach()
        dim = 1 if name.endswith(("o.weight", "down.weight")) else 0
        p.data = whole if p.shape == whole.shape else whole.chunk(ways, dim)[way].clone()
    return mine


def test_kraken_is_as_many_models_that_hear_of_each_other_once_a_layer():
    """As the authors' code has it: the first layer of each is a plain one."""
    ways = 2
    model = filled({**LLAMA, "kraken_ways": ways})
    ctx = model.context(torch.arange(20), (0, 20))
    subs = [sub_model(model, way, ways) for way in range(ways)]
    x = model.prologue(IDS, ctx)
    streams = [sub.blocks[0](x, ctx) for sub in subs]
    for layer in range(1, 4):
        after = []
        for way, b in enumerate(sub.blocks[layer] for sub in subs):
            u = streams[way] + b.attention(b.attention_norm(streams[way]), ctx)
            others = sum(x for i, x in enumerate(streams) if i != way)
            after.append(u + b.mlp(b.mlp_norm(u + others)))
        streams = after
    joint = model.epilogue.join.conjunction
    x = torch.cat(streams, dim=1) @ joint.weight.T + joint.bias
    expected = model.epilogue.logits(model.epilogue.norm(x))
    torch.testing.assert_close(model(IDS), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("silent", "same"), [("attention.o", True), ("mlp.down", True), ("", False)]
)
def test_a_model_whose_ways_are_alike_is_the_same_in_ways(silent, same):
    """But for networks, which see the attention of their own way alone."""
    model, ways = filled({**LLAMA, "rms_norm_eps": 1e-30}), 2
    for name, p in model.named_parameters():
        if silent and silent in name:
            p.data.zero_()
        if "blocks" in name and "norm" not in name and not name.endswith(("o.bias", "down.bias")):
            dim = 1 if name.endswith(("o.weight", "down.weight")) else 0
            first = p.detach().chunk(ways, dim)[0]
            p.data = torch.cat([first] * ways, dim)
    found, expected = to_kraken(model, ways)(IDS), model(IDS)
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9) == same


def test_one_way_is_the_plain_model():
    model = filled(LLAMA)
    assert torch.equal(wired(model, krakened(model.config, 1))(IDS), model(IDS))


@pytest.mark.parametrize("convert", [lambda m: to_ladder(m, 1), lambda m: to_kraken(m, 2)])
def test_generation_sees_what_one_pass_sees(convert):
    model = convert(filled(LLAMA))
    prompt = IDS.tolist()
    new = generate(model, prompt, 6, prefill_tokens=7)
    ids = list(prompt)
    for token in new:
        logits = model(torch.tensor(ids))[-1]
        assert int(logits.argmax()) == token
        ids.append(token)


@pytest.mark.parametrize("convert", [lambda m: to_ladder(m, 1), lambda m: to_kraken(m, 2)])
def test_the_wiring_is_in_the_config(convert):
    model = filled(LLAMA)
    made = convert(model)
    again = parse(json.loads(json.dumps(dict(made.config.source))))
    assert again == made.config
    torch.testing.assert_close(copy.deepcopy(made)(IDS), made(IDS), rtol=0, atol=0)


GPT_NEOX = {**SIZES, "model_type": "gpt_neox"}
OLMO2 = {**SIZES, "model_type": "olmo2"}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**LLAMA, "ladder_from": 4}, "ladder_from is 4; expected 0 to 3"),
        ({**LLAMA, "kraken_ways": 3}, "kraken_ways is 3; expected a divisor of the 4 heads"),
        ({**LLAMA, "kraken_ways": 4}, "divisor of the 2 key-value heads"),
        ({**LLAMA, "kraken_ways": 2, "ladder_from": 1}, "exclude each other"),
        ({**GPT_NEOX, "ladder_from": 1}, "gpt_neox has its branches side by side"),
        ({**OLMO2, "kraken_ways": 2}, "norms after_branch"),
        ({**LLAMA, "ladder_from": "half"}, "expected an integer from 0 on"),
    ],
)
def test_what_cannot_be_wired_is_refused(config, words):
    with pytest.raises(OutsizeError, match=words):
        parse(config)


def test_local_learning_of_a_ladder_is_refused():
    plan = Plan(6, per_segment(6), approximate=("local-learning",))
    with pytest.raises(OutsizeError, match="wired as ladder_from says"):
        make_job(NativeModel(filled({**LLAMA, "ladder_from": 1})), plan, Recipe(AdamW()))


def test_a_checkpoint_keeps_the_wiring(tmp_path):
    model = to_ladder(filled(LLAMA, torch.float32), 1)
    hub.save(model, tmp_path)
    again = hub.load(tmp_path)
    assert again.config == model.config
    torch.testing.assert_close(again(IDS), model(IDS), rtol=0, atol=0)
