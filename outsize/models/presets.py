"""Named model shapes, each the dict of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outsize.registry import Registry

BYTE_VOCABULARY = 264  # 256 bytes, and special ids rounded up to a multiple of 8


def _llama(
    vocabulary: int, hidden: int, layers: int, heads: int, inner: int, positions: int
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }


def _bytes(hidden: int, layers: int, heads: int, inner: int, positions: int) -> dict[str, Any]:
    """A Llama over bytes. Initial values of deviation 1/sqrt(hidden): with 0.02 a model this narrow
    learns far slower (128 wide, 4 layers, 440 steps: 2.92 bits per byte against 2.56)."""
    shape = _llama(BYTE_VOCABULARY, hidden, layers, heads, inner, positions)
    return {**shape, "initializer_range": round(hidden**-0.5, 4)}


def _normed(llama: dict[str, Any]) -> dict[str, Any]:
    """The same shape as a Qwen3, whose normalised queries and keys stand the learning rate of a
    short run better (2 layers: 2.05 bits per byte after 1,570 steps, without 2.23 after 2,060)."""
    kept = {key: value for key, value in llama.items() if key != "mlp_bias"}
    return {**kept, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def _mixed(llama: dict[str, Any], experts: int) -> dict[str, Any]:
    """The same shape as a Mixtral: so many experts in the place of each feed-forward network."""
    kept = {key: value for key, value in llama.items() if not key.endswith("_bias")}
    named = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    return {**kept, **named, "num_local_experts": experts, "num_experts_per_tok": 2}


# Parameters: tiny 0.13M, tiny-experts 0.34M, mini 1.0M (what `outsize train` learns in two
# minutes), small 5.0M, 25m 25.2M, llama-1.1b 1.10G (TinyLlama, 2024), llama-7b 6.74G (Llama 2,
# 2023).
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": {**_bytes(64, 2, 4, 176, 256), "num_key_value_heads": 2},
    "tiny-experts": _mixed(_bytes(64, 2, 4, 88, 256), 8),
    "mini": _normed(_bytes(192, 2, 4, 512, 256)),
    "small": _bytes(256, 6, 4, 704, 1024),
    "25m": _llama(14336, 384, 8, 6, 1024, 512),
    "llama-1.1b": {**_llama(32000, 2048, 22, 32, 5632, 2048), "num_key_value_heads": 4},
    "llama-7b": _llama(32000, 4096, 32, 32, 11008, 4096),
}

SHAPES: Registry[Mapping[str, Any]] = Registry("preset")  # these and those of techniques
for _name, _shape in PRESETS.items():
    SHAPES.add(_name, _shape)
