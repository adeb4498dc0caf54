"""The GPT line: layer norms with biases and an MLP without a gate.

GPT-2 (Radford et al., 2019), GPT-NeoX (Black et al., 2022), OPT (Zhang et al., 2022),
StarCoder2 (2024; Llama's attention in a GPT's clothes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outsize.models.config import DecoderConfig, Fused, LayerFacts, Names, NormFacts
from outsize.models.families import reading as read
from outsize.models.families.llama import LLAMA_DEFAULTS, NAMES, ROPE, by_layer, llama, windowed

GPT2_DEFAULTS: Mapping[str, Any] = {
    "n_positions": 1024,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}
GPT_NEOX_DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "attention_bias": True,
    "rotary_emb_base": 10_000.0,
    "rotary_pct": 0.25,
}
OPT_DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "activation_function": "relu",
    "init_std": 0.02,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "tie_word_embeddings": True,
}
STARCODER2_DEFAULTS: Mapping[str, Any] = {
    **LLAMA_DEFAULTS,
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "initializer_range": 0.018042,
    "norm_epsilon": 1e-5,
    "use_bias": True,
    "tie_word_embeddings": True,
}


_KEYS: Mapping[str, str] = {
    "heads": "num_attention_heads",
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "inner": "intermediate_size",
    "activation": "hidden_act",
    "positions": "max_position_embeddings",
    "std": "initializer_range",
}


def _qkv(module: str, how: str) -> tuple[Fused, ...]:
    ours = ("attention.q", "attention.k", "attention.v")
    return (Fused(ours, module, "heads" if how == "heads" else "rows"),)


def _base(config: Mapping[str, Any], keys: Mapping[str, str], norm_eps: float) -> DecoderConfig:
    """What GPT-2, GPT-NeoX and OPT share; `keys` are their names for the same facts."""
    heads = read.integer(config, keys["heads"])
    size = read.divided(config, keys["hidden"], keys["heads"])
    return DecoderConfig(
        family=config["model_type"],
        vocab=read.integer(config, "vocab_size"),
        hidden=read.integer(config, keys["hidden"]),
        layers=(LayerFacts(scale=size**-0.5),) * read.layers(config, keys["layers"]),
        heads=heads,
        kv_heads=heads,
        head_size=size,
        value_size=size,
        mlp_hidden=read.integer(config, keys["inner"], 4 * heads * size),
        activation=read.activation(config, keys["activation"]),
        norm=NormFacts("layer", norm_eps),
        positions=read.integer(config, keys["positions"]),
        names=NAMES,
        source=config,
        gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        tied=read.flag(config, "tie_word_embeddings", False),
        init_std=read.number(config, keys["std"]),
    )


def gpt2(config: Mapping[str, Any]) -> DecoderConfig:
    """GPT-2: learned positions; projections fused and stored (in, out)."""
    keys = {
        "heads": "n_head",
        "hidden": "n_embd",
        "layers": "n_layer",
        "inner": "n_inner",
        "activation": "activation_function",
        "positions": "n_positions",
        "std": "initializer_range",
    }
    facts = _base(config, keys, read.number(config, "layer_norm_epsilon"))
    scale = facts.layers[0].scale if read.flag(config, "scale_attn_weights", True) else 1.0
    by_depth = read.flag(config, "scale_attn_by_inverse_layer_idx", False)
    facts = by_layer(facts, lambda i: {"scale": scale / (i + 1) if by_depth else scale})
    names = Names(
        prefix="transformer.h.{i}.",
        outer={
            "prologue.tokens": "transformer.wte",
            "prologue.positions": "transformer.wpe",
            "epilogue.norm": "transformer.ln_f",
            "epilogue.head": "lm_head",
        },
        block={
            "attention_norm": "ln_1",
            "attention.o": "attn.c_proj",
            "mlp_norm": "ln_2",
            "mlp.up": "mlp.c_fc",
            "mlp.down": "mlp.c_proj",
        },
        fused=_qkv("attn.c_attn", "rows"),
        transposed=frozenset(("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
        base="transformer.",
        ignored=(r"\.attn\.(masked_)?bias$",),
    )
    return replace(facts, names=names, learned_positions=facts.positions)


def gpt_neox(config: Mapping[str, Any]) -> DecoderConfig:
    """GPT-NeoX and Pythia: attention and MLP side by side, a quarter of each head rotated."""
    facts = _base(config, _KEYS, read.number(config, "layer_norm_eps"))
    parameters = read.rope_parameters(config, "rotary_emb_base", "rotary_pct")
    rope = read.rope(config, parameters, facts.head_size, partial=True)
    names = Names(
        prefix="gpt_neox.layers.{i}.",
        outer={
            "prologue.tokens": "gpt_neox.embed_in",
            "epilogue.norm": "gpt_neox.final_layer_norm",
            "epilogue.head": "embed_out",
        },
        block={
            "attention_norm": "input_layernorm",
            "attention.o": "attention.dense",
            "mlp_norm": "post_attention_layernorm",
            "mlp.up": "mlp.dense_h_to_4h",
            "mlp.down": "mlp.dense_4h_to_h",
        },
        fused=_qkv("attention.query_key_value", "heads"),
        base="gpt_neox.",
        aliases={"embed_out.weight": "lm_head.weight"},
        ignored=(r"\.attention\.(masked_)?bias$", r"rotary_emb\.inv_freq$"),
    )
    bias = read.flag(config, "attention_bias", True)
    return replace(
        by_layer(facts, lambda i: {"rope": ROPE}),
        names=names,
        ropes={ROPE: rope},
        parallel=read.flag(config, "use_parallel_residual", True),
        qkv_bias=bias,
        o_bias=bias,
    )


def opt(config: Mapping[str, Any]) -> DecoderConfig:
    """OPT: learned positions from row 2 on; its 350M sibling normalises after each sum and has
    narrower embeddings."""
    own = {"inner": "ffn_dim", "activation": "activation_function", "std": "init_std"}
    facts = _base(config, {**_KEYS, **own}, 1e-5)
    before = read.flag(config, "do_layer_norm_before", True)
    bias = read.flag(config, "enable_bias", True)
    attention_norm = "attention_norm" if before else "attention_out_norm"
    names = Names(
        prefix="model.decoder.layers.{i}.",
        outer={
            "prologue.tokens": "model.decoder.embed_tokens",
            "prologue.positions": "model.decoder.embed_positions",
            "prologue.project": "model.decoder.project_in",
            "epilogue.norm": "model.decoder.final_layer_norm",
            "epilogue.project": "model.decoder.project_out",
            "epilogue.head": "lm_head",
        },
        block={
            attention_norm: "self_attn_layer_norm",
            "attention.q": "self_attn.q_proj",
            "attention.k": "self_attn.k_proj",
            "attention.v": "self_attn.v_proj",
            "attention.o": "self_attn.out_proj",
            "mlp_norm" if before else "mlp_out_norm": "final_layer_norm",
            "mlp.up": "fc1",
            "mlp.down": "fc2",
        },
        base="model.",
    )
    affine = read.flag(config, "layer_norm_elementwise_affine", True)
    return replace(
        facts,
        names=names,
        norm=replace(facts.norm, affine=affine),
        placement="before" if before else "after_sum",
        final_norm=before and not read.flag(config, "_remove_final_layer_norm", False),
        learned_positions=facts.positions + 2,
        position_offset=2,
        embed_size=read.integer(config, "word_embed_proj_dim", facts.hidden),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


def starcoder2(config: Mapping[str, Any]) -> DecoderConfig:
    """StarCoder2: Llama's attention with a window, a GPT's norms and MLP."""
    bias = read.flag(config, "use_bias", True)
    names = replace(NAMES, block={**NAMES.block, "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"})
    facts = replace(
        llama(config),
        names=names,
        norm=NormFacts("layer", read.number(config, "norm_epsilon")),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )
    return windowed(facts, read.window(config))
