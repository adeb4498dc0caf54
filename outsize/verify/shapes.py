"""Random small decoders of every family, with sizes that divide nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from outsize.models.families import FAMILIES
from outsize.models.wiring import WIRES

POSITIONS = 256
NARROW = 12  # features of a token
Shape = dict[str, Any]


def shape(draw: Random) -> Shape:
    """A config.json of some family."""
    family = draw.choice(sorted(_FAMILIES))
    return _wired(draw, {**_FAMILIES[family](draw), "model_type": family})


def deepened(made: Shape, layers: int) -> Shape:
    """The same with so many layers, if it has not as many; not too narrow then: what few features
    hold, many layers of norms blow the rounding of up."""
    name, width = "num_hidden_layers", "hidden_size"
    if "n_layer" in made:
        name, width = "n_layer", "n_embd"
    if layers <= made[name]:
        return made
    wider = 3 if made[width] < NARROW else 1
    return {**made, name: layers, width: wider * made[width]}


def _wired(draw: Random, made: Shape) -> Shape:
    """Now and then layers that do not wait for each other's sums, or a technique's own family."""
    chance = draw.random()
    others = [family.draw for _, family in FAMILIES.items() if family.draw is not None]
    if chance > 0.94 and others:
        again = Random(chance)
        return again.choice(others)(again)
    for _, wire in reversed(list(WIRES.items())):
        if chance < wire.share:
            return wire.draw(draw, made)
        chance -= wire.share
    return made


def _common(draw: Random) -> Shape:
    heads = draw.choice((1, 2, 3, 4, 4, 6, 8))
    keys = draw.choice([n for n in range(1, heads + 1) if heads % n == 0])
    return {
        "vocab_size": draw.randrange(17, 67),
        "hidden_size": heads * draw.choice((4, 6, 8)),
        "intermediate_size": draw.randrange(9, 50),
        "num_hidden_layers": draw.randrange(1, 5),
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": draw.random() < 0.4,
    }


def _window(draw: Random) -> Shape:
    return {"sliding_window": draw.choice((2, 3, 5, 9))}


def _own_heads(draw: Random) -> Shape:
    """Heads whose size has nothing to do with an odd hidden size."""
    return {"head_dim": draw.choice((4, 6, 10)), "hidden_size": draw.randrange(11, 40)}


def _windows(draw: Random) -> Shape:
    return {"use_sliding_window": True, "max_window_layers": 1, **_window(draw)}


def _llama(draw: Random) -> Shape:
    odd = _own_heads(draw) if draw.random() < 0.6 else {}
    biases = {"attention_bias": draw.random() < 0.3, "mlp_bias": draw.random() < 0.3}
    return {**_common(draw), **odd, **biases}


def _gemma(draw: Random) -> Shape:
    return {**_common(draw), **_own_heads(draw), **_window(draw), "query_pre_attn_scalar": 7}


def _gpt2(draw: Random) -> Shape:
    heads = draw.choice((1, 2, 3, 4, 6))
    return {
        "vocab_size": draw.randrange(17, 67), "n_embd": heads * draw.choice((5, 7, 8)),
        "n_layer": draw.randrange(1, 5), "n_head": heads, "n_positions": POSITIONS,
    }  # fmt: skip


def _opt(draw: Random) -> Shape:
    common = _common(draw)
    common["ffn_dim"] = common["intermediate_size"]
    if draw.random() < 0.5:
        common |= {"do_layer_norm_before": False, "word_embed_proj_dim": draw.randrange(5, 15)}
    return {**common, "enable_bias": draw.random() < 0.6}


def _experts(draw: Random) -> Shape:
    """Sometimes so many that some have no token."""
    return {"moe_intermediate_size": draw.randrange(8, 20), "num_experts_per_tok": 2}


def _mixtral(draw: Random) -> Shape:
    many = draw.choice((3, 4, 23))
    return {**_common(draw), "num_local_experts": many, "sliding_window": draw.choice((None, 5))}


def _qwen3_moe(draw: Random) -> Shape:
    layers = {"mlp_only_layers": draw.choice(([], [0]))}
    return {
        **_common(draw), **_own_heads(draw), **_experts(draw), **layers,
        "num_experts": draw.choice((5, 12, 40)),
    }  # fmt: skip


def _deepseek(draw: Random) -> Shape:
    common = _common(draw)
    groups = draw.choice(((1, 1), (4, 2)))
    return {
        **common, **_experts(draw), "num_key_value_heads": common["num_attention_heads"],
        "hidden_size": draw.randrange(11, 40), "n_routed_experts": draw.choice((8, 24)),
        "n_shared_experts": draw.choice((1, 2)), "n_group": groups[0], "topk_group": groups[1],
        "first_k_dense_replace": draw.choice((0, 1)), "kv_lora_rank": draw.randrange(5, 13),
        "q_lora_rank": draw.choice((None, 7, 12)), "qk_rope_head_dim": draw.choice((2, 4, 6)),
        "qk_nope_head_dim": draw.choice((3, 6)), "v_head_dim": draw.choice((4, 5, 8)),
    }  # fmt: skip


_FAMILIES: Mapping[str, Callable[[Random], Shape]] = {
    "llama": _llama,
    "mistral": lambda draw: {**_llama(draw), **_window(draw)},
    "qwen2": lambda draw: {**_common(draw), **_windows(draw)},
    "qwen3": lambda draw: {**_common(draw), **_own_heads(draw), **_windows(draw)},
    "phi3": _common,
    "olmo2": _common,
    "starcoder2": lambda draw: {**_common(draw), **_window(draw)},
    "gemma2": _gemma,
    "gemma3_text": lambda draw: {**_gemma(draw), "sliding_window_pattern": 2},
    "gpt2": _gpt2,
    "gpt_neox": lambda draw: {**_common(draw), "rotary_pct": draw.choice((0.5, 1.0))},
    "opt": _opt,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek,
}
