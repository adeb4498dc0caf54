"""Gemma 2 (2024) and Gemma 3 text (2025): norms around each part, alternating windows, scaled
embeddings; caps on scores and logits in the second, two ropes in the third."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outsize.errors import OutsizeError
from outsize.models.config import DecoderConfig
from outsize.models.families import reading as read
from outsize.models.families.llama import LLAMA_DEFAULTS, NAMES, by_layer, llama, sliding

GEMMA2_DEFAULTS: Mapping[str, Any] = {
    **LLAMA_DEFAULTS,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
GEMMA3_DEFAULTS = {
    **GEMMA2_DEFAULTS,
    "max_position_embeddings": 131_072,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}

_NAMES = replace(
    NAMES,
    block={
        **NAMES.block,
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
)


def _gemma(config: Mapping[str, Any], facts: DecoderConfig, period: int) -> DecoderConfig:
    """What both share; the last layer of each `period` sees everything."""
    scale = read.number(config, "query_pre_attn_scalar") ** -0.5
    facts = replace(
        by_layer(facts, lambda i: {"scale": scale}),
        names=_NAMES,
        norm=replace(facts.norm, unit=0),
        placement="around_branch",
        activation=read.activation(config, "hidden_activation"),
        embed_scale=facts.hidden**0.5,
        logit_softcap=read.optional(config, "final_logit_softcapping"),
        mlp_bias=False,
    )
    return sliding(config, facts, read.window(config), lambda i: bool((i + 1) % period))


def gemma2(config: Mapping[str, Any]) -> DecoderConfig:
    """Gemma 2: every other layer slides, scores and logits are capped."""
    facts = _gemma(config, llama(config), period=2)
    return replace(facts, softcap=read.optional(config, "attn_logit_softcapping"))


def gemma3(config: Mapping[str, Any]) -> DecoderConfig:
    """Gemma 3 text: five of six layers slide, with a rope of their own that is never scaled."""
    read.only(config, "attn_logit_softcapping", None, "this family has no cap on scores")
    ropes = _ropes(config)
    plain = {**config, "rope_scaling": None, "rope_parameters": None}
    period = read.integer(config, "sliding_window_pattern")
    facts = replace(_gemma(config, llama(plain), period), qk_norm="head")
    kinds = ["full" if layer.window is None else "sliding" for layer in facts.layers]
    return replace(
        by_layer(facts, lambda i: {"rope": kinds[i]}),
        ropes={name: read.rope(config, ropes[name], facts.head_size) for name in ropes},
    )


def _ropes(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Parameters of the two ropes, from either layout."""
    nested = read.table(config, "rope_parameters")
    if set(nested) - {"full_attention", "sliding_attention"}:
        raise OutsizeError(
            f"config.json: rope_parameters has {', '.join(sorted(nested))}; expected "
            "full_attention and sliding_attention"
        )
    full = {**read.table(nested, "full_attention"), **read.table(config, "rope_scaling")}
    sliding = dict(read.table(nested, "sliding_attention"))
    if full.get("rope_theta") is None:
        full["rope_theta"] = config["rope_theta"]
    if sliding.get("rope_theta") is None:
        sliding["rope_theta"] = config["rope_local_base_freq"]
    return {"full": full, "sliding": sliding}
