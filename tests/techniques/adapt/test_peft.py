"""Every method that peft has too: its outputs, gradients and files, merged and not."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import peft
import pytest
import torch
from adapting import METHODS, pretrained, some_ids, sum_of_losses, theirs
from float64 import Float64
from subjects import CONFIGS, config_of

import outsize
from outsize.checkpoint import adapters, hub
from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.names import adapter_layout
from outsize.techniques.adapt.dora import Dora
from outsize.train.config import RunConfig
from outsize.train.state import first_values

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
def test_outputs_gradients_and_files_are_pefts(method, tmp_path, exactly):
    peft_model, ids = theirs(method, "llama", tmp_path), some_ids()
    ours = adapters.load(tmp_path / "adapter", torch.float64)
    expected, found = peft_model(ids).logits, ours(ids)
    torch.testing.assert_close(found, expected, **CLOSE)
    with peft_model.disable_adapter():
        assert not torch.allclose(found, peft_model(ids).logits, rtol=1e-3), "or it does nothing"
    sum_of_losses(expected, ids).backward()
    sum_of_losses(found, ids).backward()
    gradients = {
        n.replace(".default", ""): p.grad
        for n, p in peft_model.named_parameters()
        if p.grad is not None
    }
    own = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    trained = {name for name, p in ours.named_parameters() if p.requires_grad}
    entries = (entry for entry in adapter_layout(ours.config) if entry.ours[0] in trained)
    names = {entry.ours[0]: entry.theirs[0] for entry in entries}
    assert set(own) == set(names) and len(own) == len(gradients)
    for name, gradient in own.items():
        full = names[name]
        wanted = gradients[full if full in gradients else f"{full}.weight"]
        torch.testing.assert_close(gradient, wanted, **CLOSE)

    adapters.save(ours, tmp_path / "saved")
    again = peft.PeftModel.from_pretrained(pretrained(tmp_path / "base"), tmp_path / "saved")
    torch.testing.assert_close(again.eval()(ids).logits, expected, **CLOSE)
    once = [(tmp_path / "adapter", 1.0)]
    added = adapters.load(tmp_path / "base", torch.float64, adapters=once)
    torch.testing.assert_close(added(ids), expected, **CLOSE)
    merged = adapters.merge(ours)
    assert merged is ours and all(p.requires_grad for p in merged.parameters())
    torch.testing.assert_close(merged(ids), expected, **CLOSE)
    assert set(merged.state_dict()) == set(hub.load(tmp_path / "base").state_dict())


def test_biases_are_scaled_as_peft_does(tmp_path, exactly):
    """Keys of Qwen2 have biases, which (IA)^3 scales too."""
    facts = {k: v for k, v in CONFIGS["llama"].items() if k != "model_type"}
    peft_model, ids = theirs("ia3", "qwen2", tmp_path, facts), some_ids()
    ours, expected = adapters.load(tmp_path / "adapter", torch.float64), peft_model(ids).logits
    torch.testing.assert_close(ours(ids), expected, **CLOSE)
    torch.testing.assert_close(adapters.merge(ours)(ids), expected, **CLOSE)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Of each method an adapter's file of settings, and what it says; made when asked for."""

    @cache
    def of(method):
        folder = tmp_path_factory.mktemp(method)
        theirs(method, "llama", folder)
        file = folder / "adapter" / adapters.ADAPTER_CONFIG
        return file, json.loads(file.read_text())

    return of


@pytest.mark.parametrize(
    ("method", "change", "words"),
    [
        ("oft", {"coft": True}, "coft is True"),
        ("oft", {"use_cayley_neumann": False}, "use_cayley_neumann is False"),
        ("oft", {"num_cayley_neumann_terms": 3}, "num_cayley_neumann_terms is 3"),
        ("oft", {"peft_version": "0.17.1"}, "peft_version is '0.17.1'"),
        ("oft", {"oft_block_size": 5}, "5 does not divide the 24 features"),
        ("lokr", {"decompose_both": True}, "decompose_both is True"),
        ("loha", {"r": 0}, "r is 0; expected a whole number above 0"),
        ("loha", {"r": 4}, "hada_w1_a' has shape"),
        ("dora", {"r": 1000}, "1000 is above the width 24 of attention.q"),
        (
            "dora",
            {"use_dora": False},
            "21 of its 63 tensors were not used",
        ),
        ("ia3", {"feedforward_modules": ["nose"]}, "feedforward_modules is .'nose'., which names"),
    ],
)
def test_an_adapter_that_is_not_read_is_refused(method, change, words, told):
    file, said = told(method)
    file.write_text(json.dumps({**said, **change}))
    with pytest.raises(OutsizeError, match=words):
        adapters.load(file.parent)


@pytest.mark.parametrize("method", METHODS)
def test_no_field_is_left_unread(method):
    """All that this peft says is known, by its own value, and nothing else."""
    config = config_of("llama")
    said = METHODS[method].theirs(**METHODS[method].said).to_dict()
    said = json.loads(json.dumps(said, default=list))
    adapters.adapted(said, config)
    wrong = {
        "new": ({"a": 1}, f"a field of {said['peft_type']} that is not known here"),
        "target_modules": ("(", "is no regular expression"),
        "r": (3.0, "expected a whole number above 0"),
        "alpha": (float("inf"), "expected a number above 0"),
        "lora_alpha": (float("inf"), "expected a number above 0"),
        "use_dora": ("false", "expected true or false"),
        "use_rslora": (1, "expected true or false"),
    }  # fmt: skip
    if method == "oft":
        del wrong["r"]  # follows from another field
    for key in wrong.keys() & said.keys() | {"new"}:
        value, words = wrong[key]
        with pytest.raises(OutsizeError, match=words):
            adapters.adapted({**said, key: value}, config)
    for nothing in (None, False, 0, "", [], {}):
        adapters.adapted({**said, "new": nothing}, config)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_magnitudes_begin_as_the_lengths_of_the_files_rows(family, tmp_path):
    """Drawn, of a loaded model, and of a run's, whose weights lie in files that fuse and transpose
    them."""
    plain = build(config_of(family), seed=3, dtype=torch.float64)
    outsize.save(plain, tmp_path / "base")
    adapted = replace(plain.config, adapter=Dora(2, targets=("mlp.up",)))
    keys = RunConfig(model=replace(RunConfig().model, name=str(tmp_path / "base")))
    fill = first_values(build(adapted), keys, None)
    drawn = build(adapted, seed=3, dtype=torch.float64)
    ours = outsize.adapt(outsize.load(tmp_path / "base"), "dora", rank=2, targets=["mlp.up"])
    name = "blocks.1.mlp.up.beside.magnitude"
    expected = plain.get_parameter("blocks.1.mlp.up.weight").norm(dim=1)
    filled = torch.empty_like(expected)
    fill(name, filled)
    for found in (filled, drawn.get_parameter(name), ours.get_parameter(name)):
        torch.testing.assert_close(found.detach(), expected.detach(), **CLOSE)
    ids = some_ids()
    torch.testing.assert_close(ours(ids), plain(ids), **CLOSE)
