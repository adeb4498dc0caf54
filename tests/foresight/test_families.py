"""What a config.json leaves out, beside the classes of transformers that are made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outsize.errors import OutsizeError
from outsize.foresight.named import shape_of

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512,
}  # fmt: skip
INNER = {**SIZES, "intermediate_size": 128, "num_key_value_heads": 2}
WHOLE = {**SIZES, "intermediate_size": 128, "num_key_value_heads": 4}


def written(tmp_path: Path, kind: str, **values: Any) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, **values}))
    return str(path)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("llama", INNER),
        ("gemma", {**INNER, "head_dim": 16}),
        ("gemma2", {**INNER, "head_dim": 16}),
        ("gemma3_text", {**INNER, "head_dim": 16}),
        ("gpt_neox", {**SIZES, "intermediate_size": 256}),
        ("phi", WHOLE),
        ("falcon", SIZES),
        ("falcon", {**SIZES, "multi_query": False}),
        ("falcon", {**SIZES, "new_decoder_architecture": True, "num_kv_heads": 2}),
        ("gpt_bigcode", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512}),
        ("olmoe", {**WHOLE, "num_experts": 8, "num_experts_per_tok": 2}),
        ("mixtral", {**INNER, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_a_family_has_the_matrices_of_its_class(
    tmp_path: Path, kind: str, values: dict[str, Any]
) -> None:
    """Matrices: norms, biases and learnt positions are not compared. Embedding and head count as
    one where they are one."""
    shape = shape_of(written(tmp_path, kind, **values))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values))
    named = model.named_parameters()
    matrices = sum(p.numel() for name, p in named if p.dim() > 1 and "wpe" not in name)
    ours = shape.parameters - shape.layers * shape.of_norms - shape.hidden
    assert ours == matrices


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        ("llama", {**INNER, "num_attention_heads": 6}, "64 is no multiple of 6 heads"),
        ("llama", {**INNER, "num_key_value_heads": 3}, "4 heads over 3 of keys and values"),
        ("llama", {**INNER, "intermediate_size": None}, "'intermediate_size' is missing"),
        ("mamba", SIZES, "model_type 'mamba' is unknown"),
        ("t5", {}, "model_type 't5' is unknown"),
    ],
)
def test_sizes_that_no_class_takes_are_refused(
    tmp_path: Path, kind: str, values: dict[str, Any], said: str
) -> None:
    with pytest.raises(OutsizeError, match=said):
        shape_of(written(tmp_path, kind, **values))


def test_every_second_layer_of_gpt_oss_sees_a_window(tmp_path: Path) -> None:
    values = {
        **INNER, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 128,
    }  # fmt: skip
    shape = shape_of(written(tmp_path, "gpt_oss", **values))
    whole = 2 * 2 * 4 * 16 * (1024 + 128)  # two layers of four heads, keys and values
    assert shape.scores(1024) == 2 * whole / 2
