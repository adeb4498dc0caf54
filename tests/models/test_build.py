"""Building a decoder: shapes first, values by segment, the same values as a whole or in parts,
distributed as transformers' own initial values are."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from outsize.checkpoint.hub import load
from outsize.errors import OutsizeError
from outsize.models import build as building
from outsize.models.build import build, initial_fill, initial_values, materialise, segments
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.models.families import parse
from outsize.models.random import normal

SIZES = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GATED = {**SIZES, "intermediate_size": 96, "num_key_value_heads": 2, "pad_token_id": None}
EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**GATED, "initializer_range": 0.05},
    "qwen2": {**GATED, "tie_word_embeddings": True},
    "gemma2": {**GATED, "head_dim": 16},
    "gpt2": {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {**SIZES, "intermediate_size": 96},
    "starcoder2": GATED,
    "mixtral": {**GATED, "num_local_experts": 4},
    "qwen3_moe": {**GATED, **EXPERTS, "num_experts": 4, "head_dim": 16},
    "deepseek_v3": {
        **GATED,
        **EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    },
}


def config(family: str = "llama") -> DecoderConfig:
    return parse({"model_type": family} | FAMILIES[family])


def values(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_without_a_seed_nothing_is_allocated() -> None:
    model = build(config(), dtype=torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_depend_on_seed_name_and_index_only(dtype: torch.dtype) -> None:
    built = build(config(), seed=7, dtype=dtype)
    name = "blocks.1.mlp.up.weight"
    expected = torch.from_numpy(normal(7, name, 0, 96 * 64) * 0.05).view(96, 64).to(dtype)
    assert torch.equal(values(built)[name], expected)
    assert not torch.equal(values(build(config(), 8, dtype))[name], expected)
    deeper = parse({"model_type": "llama"} | FAMILIES["llama"] | {"num_hidden_layers": 3})
    longer = values(build(deeper, seed=7, dtype=dtype))
    assert all(torch.equal(value, longer[name]) for name, value in values(built).items())


def test_segments_name_every_parameter_once_in_order() -> None:
    for family in ("llama", "qwen2"):
        model = build(config(family))
        table = segments(model)
        assert [name for name, _ in table] == ["prologue", "block 0", "block 1", "epilogue"]
        names = [name for _, part in table for name in part]
        assert names == [name for name, _ in model.named_parameters()]
        assert all(name.startswith("blocks.1.") for name in dict(table)["block 1"])
        tied = family == "qwen2"
        assert ("epilogue.head.weight" in dict(table)["epilogue"]) == (not tied)


def test_one_segment_at_a_time_and_alone() -> None:
    whole, model = values(build(config(), seed=3)), build(config())
    fill = initial_fill(model, 3, "cpu")
    materialise(model, "block 1", fill)
    for name, parameter in model.named_parameters():
        assert parameter.is_meta != name.startswith("blocks.1.")
        assert parameter.is_meta or torch.equal(parameter, whole[name])


def test_tied_weights_stay_one_parameter() -> None:
    model = build(config("qwen2"), seed=0)
    assert model.epilogue.head.weight is model.prologue.tokens.weight
    assert not model.epilogue.head.weight.is_meta
    model(torch.arange(5)).sum().backward()
    assert model.prologue.tokens.weight.grad is not None


def test_materialised_parameters_keep_what_they_were() -> None:
    """Trainability, and the tensor that fill gave: its memory, dtype and device."""
    model = build(config("deepseek_v3"), dtype=torch.bfloat16)
    given: dict[str, torch.Tensor] = {}

    def fill(name: str, parameter: torch.Tensor) -> torch.Tensor:
        given[name] = torch.zeros(parameter.shape, dtype=parameter.dtype)
        return given[name]

    for segment, _ in segments(model):
        materialise(model, segment, fill)
    for name, parameter in model.named_parameters():
        correction = name.endswith("router.correction")
        assert isinstance(parameter, nn.Parameter)
        assert parameter.requires_grad != correction
        assert parameter.dtype == (torch.float32 if correction else torch.bfloat16)
        assert parameter.data_ptr() == given[name].data_ptr()


def test_an_unknown_module_with_parameters_is_refused() -> None:
    model = build(config())
    model.blocks[0].mlp.extra = nn.Linear(3, 3, device="meta")
    with pytest.raises(OutsizeError, match=r"blocks\.0\.mlp\.extra\.weight .* which declares none"):
        dict(initial_values(model))


def test_repeated_values_are_a_models_own_time_after_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "REPEATED", 100)
    model = build(config(), seed=3)
    draw = building.repeated_draw(model, 3)
    for name, x in model.named_parameters():
        out = torch.full_like(x, math.nan)
        draw(name, out)
        first, size = x.detach().flatten()[:100], x.numel()
        assert torch.equal(out.flatten(), first.repeat(-(-size // 100))[:size]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_values_are_distributed_as_in_transformers(family: str, tmp_path: Path) -> None:
    """Constants alike; where random, the same deviation within five standard errors, mean 0."""
    facts = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    transformers.AutoModelForCausalLM.from_config(facts).save_pretrained(tmp_path)
    theirs, ours = values(load(tmp_path)), values(load(tmp_path, weights="random", seed=1))
    assert theirs.keys() == ours.keys()
    for name, x in theirs.items():
        y, n = ours[name], x.numel()
        assert x.shape == y.shape and x.dtype == y.dtype
        if (x == x.flatten()[0]).all():
            assert torch.equal(x, y), name
        else:
            assert abs(y.std() / x.std() - 1) < 5 / math.sqrt(n), name
            assert abs(y.mean()) < 5 * y.std() / math.sqrt(n), name
            assert not torch.equal(x, y), name
