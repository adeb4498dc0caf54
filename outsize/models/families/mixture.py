"""Mixtures of experts on Llama's frame: Mixtral (Jiang et al., 2024) and Qwen3-MoE (2025)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outsize.models.config import DecoderConfig, ExpertFacts
from outsize.models.families import reading as read
from outsize.models.families.llama import LLAMA_DEFAULTS, NAMES, by_layer, llama, windowed

MIXTRAL_DEFAULTS: Mapping[str, Any] = {
    **LLAMA_DEFAULTS,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "rope_theta": 1_000_000.0,
}
QWEN3_MOE_DEFAULTS: Mapping[str, Any] = {
    **LLAMA_DEFAULTS,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "norm_topk_prob": False,
}


def expert_names(module: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Names of a block's router and experts, of which files hold one tensor each."""
    return {
        "mlp.router.score": f"{module}.gate",
        "mlp.experts.gate": f"{module}.experts.{{e}}.{gate}.weight",
        "mlp.experts.up": f"{module}.experts.{{e}}.{up}.weight",
        "mlp.experts.down": f"{module}.experts.{{e}}.{down}.weight",
    }


def mixtral(config: Mapping[str, Any]) -> DecoderConfig:
    """Mixtral: experts in every layer."""
    facts = llama(config)
    moe = ExpertFacts(
        count=read.integer(config, "num_local_experts"),
        chosen=read.integer(config, "num_experts_per_tok"),
        hidden=facts.mlp_hidden,
    )
    names = expert_names("block_sparse_moe", gate="w1", up="w3", down="w2")
    facts = replace(
        by_layer(facts, lambda i: {"experts": True}),
        names=replace(NAMES, block={**NAMES.block, **names}),
        experts=moe,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
    )
    return windowed(facts, read.window(config))


def qwen3_moe(config: Mapping[str, Any]) -> DecoderConfig:
    """Qwen3-MoE: experts in every decoder_sparse_step-th layer that is not listed as dense."""
    facts = llama(config)
    moe = ExpertFacts(
        count=read.integer(config, read.either(config, "num_local_experts", "num_experts")),
        chosen=read.integer(config, "num_experts_per_tok"),
        hidden=read.integer(config, "moe_intermediate_size"),
        normalise=read.flag(config, "norm_topk_prob", False),
    )
    dense, step = config.get("mlp_only_layers") or [], read.integer(config, "decoder_sparse_step")
    if not isinstance(dense, list | tuple) or not all(isinstance(i, int) for i in dense):
        raise read.refuse("mlp_only_layers", dense, "a list of layer numbers")
    names = expert_names("mlp", gate="gate_proj", up="up_proj", down="down_proj")
    facts = replace(
        by_layer(facts, lambda i: {"experts": i not in dense and (i + 1) % step == 0}),
        names=replace(NAMES, block={**NAMES.block, **names}),
        experts=moe,
        qk_norm="head",
        mlp_bias=False,
    )
    slides = read.flag(config, "use_sliding_window", False)
    return windowed(facts, read.window(config) if slides else None)
