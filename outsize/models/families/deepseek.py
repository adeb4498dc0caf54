"""DeepSeek-V3 (2024): latent attention, many small experts chosen by group, one shared by all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outsize.models.config import DecoderConfig, ExpertFacts, LatentFacts
from outsize.models.families import reading as read
from outsize.models.families.llama import LLAMA_DEFAULTS, NAMES, ROPE, by_layer, llama
from outsize.models.families.mixture import expert_names

DEFAULTS: Mapping[str, Any] = {
    **LLAMA_DEFAULTS,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "rope_interleave": True,
    "num_nextn_predict_layers": 1,
}


def _experts(config: Mapping[str, Any]) -> ExpertFacts:
    inner = read.integer(config, "moe_intermediate_size")
    return ExpertFacts(
        count=read.integer(config, read.either(config, "num_local_experts", "n_routed_experts")),
        chosen=read.integer(config, "num_experts_per_tok"),
        hidden=inner,
        scoring="sigmoid",
        normalise=read.flag(config, "norm_topk_prob", True),
        scaling=read.number(config, "routed_scaling_factor"),
        groups=read.integer(config, "n_group"),
        chosen_groups=read.integer(config, "topk_group"),
        correction=True,
        shared_hidden=inner * read.integer(config, "n_shared_experts"),
    )


def _names(low_rank_queries: bool) -> dict[str, str]:
    attention = {
        "q": "q_b_proj" if low_rank_queries else "q_proj",
        "q_down": "q_a_proj",
        "q_norm": "q_a_layernorm",
        "kv_down": "kv_a_proj_with_mqa",
        "kv_norm": "kv_a_layernorm",
        "kv": "kv_b_proj",
    }
    return {
        **{f"attention.{ours}": f"self_attn.{theirs}" for ours, theirs in attention.items()},
        **expert_names("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        "mlp.router.correction": "mlp.gate.e_score_correction_bias",
        **{f"mlp.shared.{x}": f"mlp.shared_experts.{x}_proj" for x in ("gate", "up", "down")},
    }


def deepseek_v3(config: Mapping[str, Any]) -> DecoderConfig:
    """DeepSeek-V3; its extra prediction layers, which only speculative decoding uses, are left."""
    read.only(config, "scoring_func", "sigmoid", "DeepSeek-V3's router")
    read.only(config, "topk_method", "noaux_tc", "DeepSeek-V3's router")
    read.only(config, "moe_layer_freq", 1, "experts in every layer after the first dense ones")
    heads = read.integer(config, "num_attention_heads")
    read.only(config, "num_key_value_heads", heads, "every head has its own keys and values")
    plain, rotary = (read.integer(config, f"qk_{kind}_head_dim") for kind in ("nope", "rope"))
    parameters = read.rope_parameters(config)
    facts = llama(
        {**config, "head_dim": plain + rotary, "rope_scaling": None, "rope_parameters": None}
    )
    rope = replace(
        read.rope(config, parameters, rotary),
        interleaved=read.flag(config, "rope_interleave", True),
    )
    scale = facts.head_size**-0.5
    if rope.kind != "default":  # YaRN's temperature, here on the scores
        weight = read.number(parameters, "mscale_all_dim", 0)
        scale *= read.yarn_mscale(rope.factor, weight) ** 2 if weight else 1.0
    dense = read.count(config, "first_k_dense_replace")
    latent = {"scale": scale, "kind": "latent attention"}
    rank = None if config["q_lora_rank"] is None else read.integer(config, "q_lora_rank")
    extra = "|".join(str(len(facts.layers) + i) for i in range(_extra_layers(config)))
    block = {**NAMES.block, **_names(rank is not None)}
    ignored = (*NAMES.ignored, rf"^model\.layers\.({extra})\.") if extra else NAMES.ignored
    return replace(
        by_layer(facts, lambda i: {**latent, "experts": i >= dense}),
        names=replace(NAMES, block=block, ignored=ignored),
        ropes={ROPE: rope},
        value_size=read.integer(config, "v_head_dim"),
        latent=LatentFacts(rank, read.integer(config, "kv_lora_rank"), plain, rotary),
        experts=_experts(config),
        mlp_bias=False,
    )


def _extra_layers(config: Mapping[str, Any]) -> int:
    return read.count(config, read.either(config, "num_mtp_layers", "num_nextn_predict_layers"))
