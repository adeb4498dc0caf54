"""Several adapters on one base, by weight; adapters that cannot be there are refused."""

from __future__ import annotations

import json

import peft
import pytest
import torch
from adapting import pretrained, some_ids, theirs
from float64 import Float64
from subjects import CONFIGS

import outsize
from outsize.checkpoint import adapters, hub
from outsize.checkpoint.combining import combine
from outsize.errors import OutsizeError

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture
def exactly():
    """transformers computes in float64 throughout."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with Float64():
        yield
    torch.set_default_dtype(before)


def second(folder, base, **said):
    """A low-rank adapter of another rank, beside the model in `base`."""
    model = pretrained(base)
    model.name_or_path = str(base)
    config = {"r": 2, "lora_alpha": 7, "target_modules": ["q_proj", "up_proj"], **said}
    made = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **config))
    torch.manual_seed(8)
    for name, p in made.named_parameters():
        if "lora_" in name:
            p.data = torch.randn(p.shape, dtype=p.dtype) * 0.3
    made.save_pretrained(folder)


def test_two_low_rank_adapters_add_up_as_pefts_do(tmp_path, exactly):
    theirs("dora", "llama", tmp_path)  # for its base
    base, ids = tmp_path / "base", some_ids()
    second(tmp_path / "one", base)
    second(tmp_path / "two", base, r=3, target_modules=["q_proj", "o_proj"])
    peft_model = peft.PeftModel.from_pretrained(pretrained(base), tmp_path / "one", "one")
    peft_model.load_adapter(tmp_path / "two", "two")
    peft_model.base_model.add_weighted_adapter(["one", "two"], [0.7, -0.4], "both", "cat")
    peft_model.set_adapter("both")
    given = [(tmp_path / "one", 0.7), (tmp_path / "two", -0.4)]
    ours = adapters.load(base, torch.float64, adapters=given)
    torch.testing.assert_close(ours(ids), peft_model.eval()(ids).logits, **CLOSE)
    assert ours.config.adapter is None and all(p.requires_grad for p in ours.parameters())


def test_biases_are_changed_by_weight_too(tmp_path, exactly):
    """Keys of Qwen2 have some, which (IA)^3 scales."""
    facts = {k: v for k, v in CONFIGS["llama"].items() if k != "model_type"}
    theirs("ia3", "qwen2", tmp_path, facts)
    plain = adapters.load(tmp_path / "base", torch.float64)
    whole = adapters.merge(adapters.load(tmp_path / "adapter", torch.float64))
    given = [(tmp_path / "adapter", -0.25)]
    found = adapters.load(tmp_path / "base", torch.float64, adapters=given)
    before, after = (dict(one.named_parameters()) for one in (plain, whole))
    assert not torch.equal(before["blocks.0.attention.k.bias"], after["blocks.0.attention.k.bias"])
    for name, value in found.named_parameters():
        wanted = before[name] - 0.25 * (after[name] - before[name])
        torch.testing.assert_close(value, wanted, **CLOSE)


def test_an_adapter_is_put_beside_and_taken_out_with_every_bit_as_before(tmp_path, exactly):
    theirs("oft", "llama", tmp_path)
    plain, ids = hub.load(tmp_path / "base", torch.float64), some_ids()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    expected = adapters.load(tmp_path / "adapter", torch.float64)(ids)
    torch.testing.assert_close(outsize.adapt(plain, tmp_path / "adapter")(ids), expected, **CLOSE)
    outsize.remove_adapter(plain)
    after = plain.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[n], before[n]) for n in before)
    assert all(p.requires_grad for p in plain.parameters())


REFUSED = {
    "another base": "the adapter is of .*base2, whose config.json is not this model's",
    "shapes": r"layers.0.self_attn.k_proj.lora_A.weight' has shape \(2, 36\); expected \(2, 24\)",
    "unknown method": "peft_type is 'NOSE'; expected one of IA3, LOHA, LOKR, LORA, OFT",
    "rank": "99 is above the width 24 of attention.q; expected at most 24",
    "pattern": "which names no weight of the blocks",
    "no change": "one: the adapter changes no output; expected a trained one",
    "unused": "1 of its 13 tensors were not used and 0 are missing, as 'base_model.model.nose'",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("theirs")
    theirs("dora", "llama", folder)
    return folder / "base"


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_combined_is_refused_and_the_model_stays(name, base, tmp_path):
    made = tmp_path / "one"
    if name in ("another base", "shapes"):
        facts = json.loads((base / "config.json").read_text()) | {"hidden_size": 36, "head_dim": 6}
        from outsize.models.build import build
        from outsize.models.families import parse

        outsize.save(build(parse(facts), seed=1), tmp_path / "base2")
        second(made, tmp_path / "base2", target_modules=["k_proj"])
    else:
        second(made, base, target_modules=["q_proj", "k_proj"])
    file, change = made / adapters.ADAPTER_CONFIG, {
        "shapes": {"base_model_name_or_path": "somewhere"}, "unknown method": {"peft_type": "NOSE"},
        "rank": {"r": 99}, "pattern": {"target_modules": ["nose"]},
    }.get(name, {})  # fmt: skip
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    if name in ("no change", "unused"):
        from safetensors.torch import load_file, save_file

        tensors = load_file(made / "adapter_model.safetensors")
        if name == "no change":
            tensors = {n: x * ("lora_A" in n) for n, x in tensors.items()}
        else:
            tensors["base_model.model.nose"] = torch.zeros(1)
        save_file(tensors, made / "adapter_model.safetensors")
    model = hub.load(base)
    before = {n: value.clone() for n, value in model.state_dict().items()}
    with pytest.raises(OutsizeError, match=REFUSED[name]):
        combine(model, [(made, 0.5)])
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[n], before[n]) for n in before)
