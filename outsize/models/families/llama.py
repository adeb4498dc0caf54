"""Llama and its near kin: rotary positions, RMS norms before each part, a gated MLP.

Llama (Touvron et al., 2023), Mistral (2023), Qwen2 and Qwen3 (2024, 2025), Phi-3 (2024),
OLMo 2 (2024). Each differs from Llama by the few facts its function states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from outsize.errors import OutsizeError
from outsize.models.config import DecoderConfig, Fused, LayerFacts, Names, NormFacts
from outsize.models.families import reading as read

ROPE = "main"

# What transformers takes for a key that a config.json leaves out. Sizes have no default here.
LLAMA_DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 10_000.0,
}
MISTRAL_DEFAULTS = {
    **LLAMA_DEFAULTS,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
QWEN2_DEFAULTS = {
    **LLAMA_DEFAULTS,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
QWEN3_DEFAULTS = {**QWEN2_DEFAULTS, "head_dim": 128}
PHI3_DEFAULTS = {
    **LLAMA_DEFAULTS,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
OLMO2_DEFAULTS = {**LLAMA_DEFAULTS, "rms_norm_eps": 1e-5}

NAMES = Names(
    prefix="model.layers.{i}.",
    outer={
        "prologue.tokens": "model.embed_tokens",
        "epilogue.norm": "model.norm",
        "epilogue.head": "lm_head",
    },
    block={
        "attention_norm": "input_layernorm",
        "attention.q": "self_attn.q_proj",
        "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj",
        "attention.o": "self_attn.o_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
    base="model.",
    ignored=(r"rotary_emb\.inv_freq$",),
)


def llama(config: Mapping[str, Any]) -> DecoderConfig:
    """Llama, and the facts that its kin start from."""
    heads = read.integer(config, "num_attention_heads")
    kv_heads = read.integer(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise OutsizeError(
            f"config.json: num_attention_heads = {heads} is not a multiple of "
            f"num_key_value_heads = {kv_heads}"
        )
    size = config.get("head_dim")
    size = read.divided(config, "hidden_size", "num_attention_heads") if size is None else size
    size = read.integer({"head_dim": size}, "head_dim")
    parameters = read.rope_parameters(config)
    partial = config["model_type"] == "phi3"
    layers = read.layers(config, "num_hidden_layers")
    return DecoderConfig(
        family=config["model_type"],
        vocab=read.integer(config, "vocab_size"),
        hidden=read.integer(config, "hidden_size"),
        layers=(LayerFacts(scale=size**-0.5, rope=ROPE),) * layers,
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        value_size=size,
        mlp_hidden=read.integer(config, "intermediate_size"),
        activation=read.activation(config, "hidden_act"),
        norm=NormFacts("rms", read.number(config, "rms_norm_eps")),
        positions=read.integer(config, "max_position_embeddings"),
        names=NAMES,
        source=config,
        ropes={ROPE: read.rope(config, parameters, size, partial)},
        qkv_bias=read.flag(config, "attention_bias", False),
        o_bias=read.flag(config, "attention_bias", False),
        mlp_bias=read.flag(config, "mlp_bias", False),
        tied=read.flag(config, "tie_word_embeddings", False),
        init_std=read.number(config, "initializer_range"),
    )


def by_layer(facts: DecoderConfig, of: Callable[[int], Mapping[str, Any]]) -> DecoderConfig:
    """With other facts of each layer: those that `of` gives for its number."""
    layers = (replace(layer, **of(i)) for i, layer in enumerate(facts.layers))
    return replace(facts, layers=tuple(layers))


def windowed(facts: DecoderConfig, window: int | None) -> DecoderConfig:
    """The same window in every layer."""
    return by_layer(facts, lambda i: {"window": window})


def sliding(
    config: Mapping[str, Any],
    facts: DecoderConfig,
    window: int | None,
    slides: Callable[[int], bool],
) -> DecoderConfig:
    """The window in the layers that layer_types calls "sliding_attention" and not "full_attention";
    where it is not said, in those of which `slides` says so."""
    count, found = len(facts.layers), config.get("layer_types")
    if found is None:
        return by_layer(facts, lambda i: {"window": window if slides(i) else None})
    if not isinstance(found, list | tuple):
        raise read.refuse("layer_types", found, "a list of layer types, or null")
    wrong = [kind for kind in found if kind not in ("full_attention", "sliding_attention")]
    if wrong:
        raise read.refuse("layer_types", wrong[0], "full_attention or sliding_attention")
    if len(found) != count:
        raise OutsizeError(
            f"config.json: layer_types has {len(found)} entries; expected num_hidden_layers = "
            f"{count}"
        )
    return by_layer(
        facts, lambda i: {"window": window if found[i] == "sliding_attention" else None}
    )


def mistral(config: Mapping[str, Any]) -> DecoderConfig:
    """Mistral: a window in every layer."""
    facts = replace(llama(config), qkv_bias=False, o_bias=False, mlp_bias=False)
    return windowed(facts, read.window(config))


def _qwen(config: Mapping[str, Any], facts: DecoderConfig) -> DecoderConfig:
    """A window from layer max_window_layers on, where windows are used at all."""
    window = read.window(config) if read.flag(config, "use_sliding_window", False) else None
    first = read.count(config, "max_window_layers")
    return sliding(config, facts, window, lambda i: i >= first)


def qwen2(config: Mapping[str, Any]) -> DecoderConfig:
    """Qwen2 and 2.5: biases on queries, keys and values only."""
    return _qwen(config, replace(llama(config), qkv_bias=True, o_bias=False, mlp_bias=False))


def qwen3(config: Mapping[str, Any]) -> DecoderConfig:
    """Qwen3: queries and keys normalised head by head."""
    return _qwen(config, replace(llama(config), qk_norm="head", mlp_bias=False))


def phi3(config: Mapping[str, Any]) -> DecoderConfig:
    """Phi-3 and 4: part of a head rotated; fused projections in the files."""
    parameters = read.rope_parameters(config)
    if read.rope_kind(parameters) in ("su", "yarn"):  # earlier names of longrope in this family
        config = {**config, "rope_scaling": {**parameters, "rope_type": "longrope"}}
    facts = replace(llama(config), qkv_bias=False, o_bias=False, mlp_bias=False)
    names = replace(
        NAMES,
        fused=(
            Fused(("attention.q", "attention.k", "attention.v"), "self_attn.qkv_proj"),
            Fused(("mlp.gate", "mlp.up"), "mlp.gate_up_proj"),
        ),
    )
    return windowed(replace(facts, names=names), read.window(config))


def olmo2(config: Mapping[str, Any]) -> DecoderConfig:
    """OLMo 2: norms behind each part, and over all heads' queries and keys at once."""
    names = replace(
        NAMES,
        block={
            **NAMES.block,
            "attention_out_norm": "post_attention_layernorm",
            "mlp_out_norm": "post_feedforward_layernorm",
        },
    )
    return replace(
        llama(config), placement="after_branch", qk_norm="whole", mlp_bias=False, names=names
    )
