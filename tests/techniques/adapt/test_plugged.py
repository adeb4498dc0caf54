"""Adapters in modules that nobody here wrote: as in peft, trained, merged, taken out."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
import transformers
from adapting import METHODS, pretrained, some_ids, sum_of_losses, theirs
from float64 import Float64
from safetensors.torch import load_file
from subjects import CONFIGS
from torch import nn

import outsize
from outsize.errors import OutsizeError
from outsize.train.prepared.module import derived_of

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture
def exactly():
    """transformers computes in float64 throughout."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with Float64():
        yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("method", METHODS)
def test_a_class_of_transformers_has_pefts_outputs_gradients_and_files(method, tmp_path, exactly):
    peft_model, ids = theirs(method, "llama", tmp_path), some_ids()
    model = pretrained(tmp_path / "base")
    before, plain = state_of(model), model(ids).logits.detach()
    assert outsize.adapt(model, tmp_path / "adapter") is model
    expected, found = peft_model(ids).logits, model(ids).logits
    torch.testing.assert_close(found, expected, **CLOSE)
    assert not torch.allclose(found, plain, rtol=1e-3), "or it does nothing"
    sum_of_losses(expected, ids).backward()
    sum_of_losses(found, ids).backward()
    gradients = [p.grad for p in peft_model.parameters() if p.grad is not None]
    own = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(own) == len(gradients)
    for one, wanted in zip(sorted_by_size(own), sorted_by_size(gradients), strict=True):
        torch.testing.assert_close(one, wanted, **CLOSE)

    outsize.save(model, tmp_path / "saved", adapter_only=True)
    again = peft.PeftModel.from_pretrained(pretrained(tmp_path / "base"), tmp_path / "saved")
    torch.testing.assert_close(again.eval()(ids).logits, expected, **CLOSE)
    merged = outsize.merge(copy.deepcopy(model))
    torch.testing.assert_close(merged(ids).logits, expected, **CLOSE)
    outsize.remove_adapter(model)
    for p in model.parameters():
        p.grad = None
    assert_same(state_of(model), before)
    assert_same(state_of(merged), before, weights=False)


def sorted_by_size(gradients):
    """Both list the layers in the same order; parameters of one layer are named otherwise."""
    return sorted(gradients, key=lambda g: (g.shape, float(g.abs().sum())))


def state_of(model):
    kinds = {name: type(module) for name, module in model.named_modules()}
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    values = {name: value.clone() for name, value in model.state_dict().items()}
    return kinds, flags, values


def assert_same(found, expected, weights=True):
    assert found[:2] == expected[:2] and found[2].keys() == expected[2].keys()
    if weights:
        assert all(torch.equal(value, expected[2][name]) for name, value in found[2].items())


class Tagger(nn.Module):
    """A module of somebody's own: blocks of layers by other names, and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8, bias=False))
            for _ in range(3)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("method", "settings", "trained"),
    [
        ("lora", {"rank": 2, "targets": ["layers.*.0", "head"]}, 3 * 2 * (8 + 12) + 2 * (8 + 5)),
        ("ia3", {"outputs": ["layers.*.0"], "inputs": ["layers.*.2"]}, 3 * (12 + 12)),
        ("dora", {"rank": 2, "targets": ["layers"]}, 3 * (4 * (8 + 12) + 12 + 8)),
        ("oft", {"block": 4, "targets": ["layers.1.*"]}, 6 * 2 + 6 * 3),
        ("serial", {"size": 2, "behind": ["layers.*"]}, 3 * (2 * (8 + 1) + 8 * (2 + 1))),
    ],
)
def test_prepare_trains_what_was_plugged_in_alone(method, settings, trained):
    torch.manual_seed(2)
    model = Tagger().double()
    outsize.adapt(model, method, seed=4, **settings)
    for p in model.parameters():
        if p.requires_grad:
            p.data += 0.1 * torch.randn(p.shape, dtype=p.dtype)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == trained
    twin = copy.deepcopy(model)
    inputs = [torch.randint(0, 11, (4, 6)) for _ in range(3)]
    wanted = [torch.randint(0, 5, (4, 6)) for _ in range(3)]

    def loss(logits, targets):
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def adamw(model):
        return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)

    job = outsize.prepare(
        model, adamw(model), loss=lambda logits, batch: loss(logits, batch[1]),
        recompute=["block"],
    )  # fmt: skip
    optimizer = adamw(twin)
    for ids, targets in zip(inputs, wanted, strict=True):
        expected = loss(twin(ids), targets)
        torch.testing.assert_close(float(job.step((ids, targets))), float(expected), **CLOSE)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_conv1d_a_vit_and_unfinished_patterns(tmp_path):
    facts = {k: v for k, v in CONFIGS["gpt2"].items() if k != "model_type"}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**facts)).double().eval()
    ids, vit = some_ids(), transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        image_size=8, patch_size=4,
    )  # fmt: skip
    pixels = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    vit = transformers.ViTModel(vit).double().eval()
    for model, x, targets in ((gpt2, ids, ["*.c_attn"]), (vit, pixels, ["all-linear"])):
        before, plain = state_of(model), model(x)[0]
        outsize.adapt(model, "lora", rank=2, targets=targets)
        torch.testing.assert_close(model(x)[0], plain)
        for name, p in model.named_parameters():
            if ".beside.b." in name:
                p.data += 0.3
        found = model(x)[0]
        assert not torch.allclose(found, plain, rtol=1e-3)
        merged = outsize.merge(copy.deepcopy(model))
        torch.testing.assert_close(merged(x)[0], found)
        assert_same(state_of(outsize.remove_adapter(model)), before)


REFUSED = {
    "no layer": ({"targets": ["nose"]}, "'nose' names no linear layer of this model; expected"),
    "rank": ({"rank": 99}, "99 is above the width 8 of layers.0.0; expected at most 8"),
    "setting": ({"rnk": 2}, "rnk"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_plugged_in_is_refused_and_nothing_changes(name, tmp_path):
    settings, words = REFUSED[name]
    model = Tagger()
    before = state_of(model)
    with pytest.raises(OutsizeError, match=words):
        outsize.adapt(model, "lora", **settings)
    assert_same(state_of(model), before)
    with pytest.raises(OutsizeError, match="has no adapter"):
        outsize.remove_adapter(model)


def test_an_adapter_of_another_model_is_refused_and_nothing_changes(tmp_path):
    donor, other = Tagger(), Tagger()
    other.layers = other.layers[:2]
    outsize.save(outsize.adapt(donor, "lora", rank=2), tmp_path / "made", adapter_only=True)
    before = state_of(other)
    with pytest.raises(OutsizeError, match="4 of its 14 tensors were not used and 0 are missing"):
        outsize.adapt(other, tmp_path / "made")
    assert_same(state_of(other), before)
    with pytest.raises(OutsizeError, match="has an adapter already"):
        outsize.adapt(donor, "lora")


def test_lokr_has_pefts_factors_at_any_rank(tmp_path):
    """The larger one is dense from half of its longer side on."""
    for rank in range(1, 6):
        config = peft.LoKrConfig(r=rank, target_modules=["0"])
        theirs = peft.get_peft_model(nn.Sequential(nn.Linear(24, 36)), config)
        theirs.save_pretrained(tmp_path / f"theirs{rank}")
        ours = outsize.adapt(nn.Sequential(nn.Linear(24, 36)), "lokr", rank=rank)
        outsize.save(ours, tmp_path / f"ours{rank}", adapter_only=True)
        both = [load_file(tmp_path / f"{whose}{rank}" / "adapter_model.safetensors")
                for whose in ("theirs", "ours")]  # fmt: skip
        shapes = [{name: x.shape for name, x in one.items()} for one in both]
        assert shapes[0] == shapes[1]


def test_what_was_frozen_before_stays_frozen_when_it_is_taken_out():
    model = Tagger()
    model.embed.requires_grad_(False)
    model.layers[1][0].bias.requires_grad_(False)
    before = state_of(model)
    assert_same(state_of(outsize.remove_adapter(outsize.adapt(model, "lora", rank=2))), before)


def test_an_adapter_of_nothing_is_refused():
    for method, key in (("lora", "targets"), ("vera", "targets"), ("serial", "behind")):
        for model, words in ((Tagger(), "is named; expected"), (nn.Conv2d(1, 1, 1), "has no")):
            given = {} if words == "has no" else {key: []}
            before = state_of(model)
            with pytest.raises(OutsizeError, match=rf"adapt\.{method}\.{key}: .*{words}"):
                outsize.adapt(model, method, **given)
            assert_same(state_of(model), before)
    with pytest.raises(OutsizeError, match=r"ia3.outputs and adapt.ia3.inputs: no layer is named"):
        outsize.adapt(Tagger(), "ia3", outputs=[], inputs=[])
    with pytest.raises(OutsizeError, match=r"lora.alpha: 0.0; expected at least 1e-06"):
        outsize.adapt(Tagger(), "lora", rank=2, alpha=0)


def test_a_weight_that_others_have_too_takes_nothing_up():
    model = Tagger()
    model.head = nn.Linear(8, 11, bias=False)
    model.head.weight = model.embed.weight
    before = state_of(outsize.adapt(model, "lora", rank=2))
    with pytest.raises(OutsizeError, match="merge: head shares a weight with embed"):
        outsize.merge(model)
    assert_same(state_of(model), before)
    outsize.merge(outsize.adapt(outsize.remove_adapter(model), "lora", rank=2, targets=["layers"]))


def test_a_tensor_axis_is_refused_in_a_line():
    model = outsize.adapt(Tagger(), "lora", rank=2)
    with pytest.raises(OutsizeError, match="an adapter plugged in, whose layers are cut nowhere"):
        derived_of(model, [], torch.zeros(1, 3, dtype=torch.int64), 2)


def test_an_encoder_of_torchs_asks_its_adapter_in_evaluation_too():
    """It multiplies by weights itself there, past its layers, where nothing hangs on these."""
    model = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True).double().eval()
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    before, plain = state_of(model), model(x)
    hooks = [dict(one._forward_hooks) for one in model.modules()]
    outsize.adapt(model, "lora", rank=2)
    model.linear1.beside.b.weight.data += 0.3
    found = model(x)
    assert not torch.allclose(found, plain, rtol=1e-3)
    with torch.no_grad():
        torch.testing.assert_close(model(x), found, **CLOSE)
        torch.testing.assert_close(outsize.merge(copy.deepcopy(model))(x), found, **CLOSE)
    assert_same(state_of(outsize.remove_adapter(model)), before)
    assert hooks == [dict(one._forward_hooks) for one in model.modules()]
    assert torch.equal(model(x), plain)


def test_a_layer_that_would_not_ask_an_adapter_is_refused_and_one_of_made_weights_left_out(
    tmp_path,
):
    made = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    outsize.adapt(made, "lora", rank=2)
    assert not hasattr(made[0], "beside") and hasattr(made[1], "beside")
    model = Tagger()
    own = model.head.forward
    model.head.forward = lambda x: 2 * own(x)  # as accelerate's device_map sets one
    before = state_of(model)
    with pytest.raises(OutsizeError, match="adapt: head has a forward of its own, beside that of"):
        outsize.adapt(model, "lora", rank=2)
    assert_same(state_of(model), before)
    outsize.adapt(model, "lora", rank=2, targets=["layers"])


def test_a_linear_layer_alone_has_an_adapter(tmp_path):
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    twin = copy.deepcopy(model)
    outsize.adapt(model, "lora", rank=2)
    model.beside.b.weight.data += 0.3
    outsize.save(model, tmp_path / "made", adapter_only=True)
    assert torch.equal(outsize.adapt(twin, tmp_path / "made")(x), model(x))
