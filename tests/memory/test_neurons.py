"""Neurons on disk: outputs are those of the dense model, and only what is new is read."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from outsize.decode.generate import generate
from outsize.errors import OutsizeError
from outsize.memory import neurons, predict, rows
from outsize.memory.neurons import flash_mlp
from outsize.memory.window import Window
from outsize.models.build import build
from outsize.models.families import parse

LLAMA = {
    "model_type": "llama", "hidden_act": "relu", "vocab_size": 61, "hidden_size": 24,
    "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
OPT = {
    "model_type": "opt", "vocab_size": 61, "hidden_size": 24, "ffn_dim": 96,
    "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64,
    "word_embed_proj_dim": 24,
}  # fmt: skip
CONFIGS = {"gated": LLAMA, "gated with biases": {**LLAMA, "mlp_bias": True}, "plain": OPT}
IDS = torch.tensor([5, 17, 3, 42, 8, 60, 1, 9])


def model_of(name, dtype=torch.float64, sparse=True):
    model = build(
        parse({**CONFIGS[name], "initializer_range": 0.3, "init_std": 0.3}), seed=1, dtype=dtype
    )
    for block in model.blocks:
        driver = block.mlp.up if block.mlp.gate is None else block.mlp.gate
        for bias in (driver.bias, block.mlp.down.bias, block.mlp.up.bias):
            if bias is not None:
                nn.init.normal_(bias)
        if driver.bias is not None and sparse:
            nn.init.constant_(driver.bias, -1.5)
    return model


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("share", [1.0, 0.5, 0.05])
def test_outputs_are_the_dense_ones_and_the_weights_come_back(name, share, tmp_path):
    model = model_of(name)
    before, expected = state(model), model(IDS).detach()
    with flash_mlp(model, tmp_path, share=share) as flash:
        assert all(block.mlp.bundles.down.weight.numel() == 0 for block in model.blocks)
        assert torch.allclose(model(IDS), expected, rtol=0, atol=1e-10)
        assert flash.count.tokens == len(IDS) and flash.count.wanted > 0.2 * 3 * 96
    assert torch.allclose(model(IDS), expected, rtol=0, atol=0)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_generation_draws_the_same_tokens(name, dtype, tmp_path):
    model = model_of(name, dtype)
    expected = generate(model, IDS.tolist(), 20)
    with flash_mlp(model, tmp_path, window=3, share=0.6) as flash:
        assert generate(model, IDS.tolist(), 20) == expected
        assert 0 < flash.count.hits < flash.count.wanted


def test_bytes_read_are_those_of_neurons_that_the_window_lacks(tmp_path):
    """Against a simulation of the window with sets, one token at a time."""
    random.seed(3)
    count, span, neurons_ = 40, 4, 200
    file = rows.RowFile(tmp_path, neurons_, 100)
    content = file.buffer(neurons_)
    content.copy_(torch.randint(0, 256, content.shape, dtype=torch.uint8))
    file.write(0, content)
    window = Window(file, 0, neurons_, 150, span)
    used, read = [], 0
    for _ in range(count):
        active = set(random.sample(range(neurons_), 30))
        read += len(active - set().union(*used[-span:]))
        used.append(active)
        mask = torch.zeros(1, neurons_, dtype=torch.bool)
        mask[0, sorted(active)] = True
        ((ids, held),) = window.hold(mask)
        # Let go before the read: what the last `span` tokens used, this one among them, is held.
        assert active <= set(ids.tolist()) == set().union(*used[-span:])
        assert torch.equal(held, content[ids])
    assert window.count.bytes_read == read * file.stride == file.bytes_read
    assert window.count.wanted == 30 * count and window.count.hits == 30 * count - read
    file.close()


def test_a_full_buffer_lets_the_oldest_go(tmp_path):
    file = rows.RowFile(tmp_path, 10, 8)
    file.write(0, file.buffer(10))
    window = Window(file, 0, 10, 4, 5)
    for active in ([0], [1], [2], [3]):
        list(window.hold(torch.isin(torch.arange(10), torch.tensor(active))[None]))
    ((ids, _),) = window.hold(torch.isin(torch.arange(10), torch.tensor([0, 7]))[None])
    assert set(ids.tolist()) == {0, 2, 3, 7}  # 1 is older than 0, which is used again
    file.close()


def test_a_prompt_counts_its_last_tokens_only(tmp_path):
    """After many tokens at once, what stays is what the last ones used."""
    file = rows.RowFile(tmp_path, 12, 8)
    file.write(0, file.buffer(12))
    window = Window(file, 0, 12, 12, 2)
    prompt = torch.eye(10, 12, dtype=torch.bool)  # token t uses neuron t
    list(window.hold(prompt))
    ((ids, _),) = window.hold(torch.isin(torch.arange(12), torch.tensor([11]))[None])
    assert set(ids.tolist()) == {9, 11}
    file.close()


def test_neighbours_are_read_at_once():
    ids = np.array([2, 3, 4, 9, 11, 12])
    assert list(rows.runs(ids)) == [(2, 0, 3), (9, 3, 1), (11, 4, 2)]
    assert list(rows.runs(ids[:0])) == []


def test_a_changed_row_is_refused(tmp_path):
    file = rows.RowFile(tmp_path, 20, 5000)
    content = file.buffer(20)
    content.random_(0, 256)
    file.write(0, content)
    into = file.buffer(20)
    wanted = torch.tensor([1, 7, 8, 19])
    file.read(wanted, into[:4])
    assert torch.equal(into[:4], content[wanted])
    altered = content[8].clone()
    altered[77] ^= 4
    buffer = file.buffer(1)
    buffer[0] = altered
    os.pwritev(file._handle, [buffer.numpy().reshape(-1)], 8 * file.stride)
    file.read(torch.tensor([7, 9]), into[:2])
    with pytest.raises(OutsizeError, match="row 8 "):
        file.read(wanted, into[:4])
    os.ftruncate(file._handle, 4 * file.stride)
    with pytest.raises(OutsizeError, match="ends too early"):
        file.read(torch.tensor([15]), into[:1])
    file.close()


def test_predictors_find_the_neurons_of_a_low_rank_layer(tmp_path):
    """Where ReLU's input has the predictor's rank, a fit on some tokens serves others."""
    model = model_of("plain", torch.float32)
    torch.manual_seed(0)
    for block in model.blocks:
        up = block.mlp.up
        up.weight.data = torch.randn(96, 6) @ torch.randn(6, 24) * 0.3
    documents = [torch.randint(0, 61, (60,)) for _ in range(30)]
    inputs = predict.inputs_of(model, documents)
    options = predict.Fit(rank=8, recall=1.0)
    fitted = [predict.fit(b.mlp, x, options) for b, x in zip(model.blocks, inputs, strict=True)]
    state_ = torch.get_rng_state()
    again = predict.fit(model.blocks[0].mlp, inputs[0], options)
    assert torch.equal(again.narrow_RD, fitted[0].narrow_RD)
    assert torch.equal(torch.get_rng_state(), state_)
    new = predict.inputs_of(model, [torch.randint(0, 61, (64,))])
    for block, predictor, x in zip(model.blocks, fitted, new, strict=True):
        active, guessed = block.mlp.up(x) > 0, predictor(x)
        recall = float((active & guessed).sum() / active.sum())
        assert recall > 0.97 and float(guessed.float().mean()) < 2.5 * float(active.float().mean())
    expected = model(IDS).detach()
    on = {neurons.PREDICTED}
    with flash_mlp(model, tmp_path, share=1.0, predictors=fitted, approximate=on) as flash:
        got = model(IDS[:1])
        assert 0.1 * 3 * 96 < flash.count.wanted < 0.8 * 3 * 96
    assert torch.nn.functional.cosine_similarity(got, expected[:1]).min() > 0.99
    every = [replace(p, bias_F=torch.full((96,), 1e9)) for p in fitted]
    with flash_mlp(model, tmp_path, share=0.4, predictors=every, approximate=on):
        assert torch.allclose(model(IDS), expected, atol=1e-4)


def test_what_cannot_work_is_refused(tmp_path):
    silu = build(parse({**LLAMA, "hidden_act": "silu"}), seed=0)
    with pytest.raises(OutsizeError, match="ReLU"):
        flash_mlp(silu, tmp_path)
    model = model_of("plain", torch.float32)
    predictors = [predict.Predictor(torch.ones(1, 24), torch.ones(96, 1), torch.zeros(96))] * 3
    with pytest.raises(OutsizeError, match="predicted-neurons"):
        flash_mlp(model, tmp_path, predictors=predictors)
    with pytest.raises(OutsizeError, match="predicted-neurons"):
        flash_mlp(model, tmp_path, approximate={neurons.PREDICTED})
    with pytest.raises(OutsizeError, match="3 layers"):
        flash_mlp(model, tmp_path, predictors=predictors[:2], approximate={neurons.PREDICTED})
    with pytest.raises(OutsizeError, match="share"):
        flash_mlp(model, tmp_path, share=0)
    with pytest.raises(OutsizeError, match="folder"):
        flash_mlp(model, tmp_path / "none")
    with pytest.raises(OutsizeError, match="rank"):
        predict.fit(model.blocks[0].mlp, torch.ones(3, 24))
    assert torch.isfinite(model(IDS)).all()  # and the model is as it was


def test_a_disk_that_fails_halfway_leaves_the_model_as_it_was(tmp_path, monkeypatch):
    model = model_of("gated")
    before, write = state(model), rows.RowFile.write

    def failing(self, first, data):
        if first >= 96:  # the second block
            raise OutsizeError("disk full")
        write(self, first, data)

    monkeypatch.setattr(rows.RowFile, "write", failing)
    with pytest.raises(OutsizeError, match="disk full"):
        flash_mlp(model, tmp_path)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
