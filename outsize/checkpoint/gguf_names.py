"""What llama.cpp calls a family's tensors, and what it computes of that family.

A file says few facts: the activation, the scale of scores and which layers have a window belong
to the architecture. A model that has others is refused, since the file could not say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isclose

from torch import Tensor

from outsize.models.config import DecoderConfig, Rope
from outsize.models.decoder import Decoder
from outsize.models.mlp import ACTIVATIONS

SLOW = 10000.0  # the base of Gemma 3's turns in layers with a window
OUTER = {
    "prologue.tokens": "token_embd", "prologue.positions": "position_embd",
    "epilogue.norm": "output_norm", "epilogue.head": "output",
}  # fmt: skip
BLOCK = {
    "attention_norm": "attn_norm", "attention.q": "attn_q", "attention.k": "attn_k",
    "attention.v": "attn_v", "attention.o": "attn_output", "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm", "attention_out_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm", "mlp_out_norm": "post_ffw_norm", "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up", "mlp.down": "ffn_down", "mlp.router.score": "ffn_gate_inp",
    "mlp.experts.gate": "ffn_gate_exps", "mlp.experts.up": "ffn_up_exps",
    "mlp.experts.down": "ffn_down_exps",
}  # fmt: skip
_QKV = ("attention.q", "attention.k", "attention.v")


@dataclass(frozen=True)
class Kin:
    """An architecture. paired: rotated features of queries and keys lie in pairs; biases: which
    there may be; biased: they must be there; fused: by tensor the modules whose rows lie in it;
    period: of so many layers the last has no window, 0: none has; square: with so many layers
    scores are scaled by the hidden size over heads; capped: scores and logits are."""

    name: str
    paired: bool = False
    activation: str = "silu"
    biases: frozenset[str] = frozenset()
    biased: bool = False
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    experts: bool = False
    period: int = 0
    square: int = 0
    capped: bool = False
    tied: bool = False


_EVERY = frozenset(("qkv", "o", "mlp"))
_TANH = "gelu_pytorch_tanh"
_LLAMA = Kin("llama", paired=True, biases=_EVERY)
FAMILIES: Mapping[str, Kin] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": Kin("llama", paired=True, experts=True),
    "qwen2": Kin("qwen2", biases=frozenset(("qkv",))),
    "qwen3": Kin("qwen3"),
    "qwen3_moe": Kin("qwen3moe", experts=True),
    "gemma2": Kin("gemma2", activation=_TANH, period=2, square=46, capped=True, tied=True),
    "gemma3_text": Kin("gemma3", activation=_TANH, period=6, square=62),
    "phi3": Kin("phi3", fused={"attn_qkv": _QKV, "ffn_up": ("mlp.gate", "mlp.up")}),
    "gpt2": Kin("gpt2", activation=_TANH, biases=_EVERY, biased=True, fused={"attn_qkv": _QKV}),
    "starcoder2": Kin("starcoder2", activation=_TANH, biases=_EVERY, biased=True),
    "olmo2": Kin("olmo2"),
}


def named(name: str, kin: Kin) -> str:
    """What the file calls a parameter, or the tensor in which its rows lie."""
    module, _, leaf = name.rpartition(".")
    if module.endswith(".experts"):
        module, leaf = name, "weight"
    if not module.startswith("blocks."):
        return f"{OUTER[module]}.{leaf}"
    _, block, inside = module.split(".", 2)
    theirs = next((one for one, ours in kin.fused.items() if inside in ours), BLOCK[inside])
    return f"blk.{block}.{theirs}.{leaf}"


def grouped(model: Decoder) -> dict[str, list[tuple[str, Tensor]]]:
    """By tensor of the file the parameters whose rows lie in it, one behind another."""
    kin, found = FAMILIES[model.config.family], dict[str, list[tuple[str, Tensor]]]()
    for name, parameter in model.named_parameters():
        found.setdefault(named(name, kin), []).append((name, parameter))
    return found


def shape_of(held: list[tuple[str, Tensor]]) -> tuple[int, ...]:
    """The shape of such a tensor, rows first."""
    return (sum(len(one) for _, one in held), *held[0][1].shape[1:])


def main_rope(config: DecoderConfig) -> Rope | None:
    """The one that facts speak of: of layers without a window, where there are two."""
    return next(iter(config.ropes.values()), None)


def window(config: DecoderConfig) -> int | None:
    """The shortest of all layers."""
    return min((one.window for one in config.layers if one.window is not None), default=None)


def context(config: DecoderConfig) -> int:
    """Positions of the file: as many as a window has, where the architecture has none. Up to there
    a window changes nothing."""
    own = None if FAMILIES[config.family].period else window(config)
    return config.positions if own is None else min(own, config.positions)


def scale(kin: Kin, layers: int, hidden: int, heads: int, head: int) -> int:
    """One over its root scales scores."""
    return hidden // heads if layers == kin.square else head


def lacking(config: DecoderConfig) -> Iterator[str]:
    """What of a model the file could not say."""
    kin = FAMILIES[config.family]
    known = {"default", "linear"} | ({"llama3"} if kin.name == "llama" else set())
    yield from (rope.kind for rope in config.ropes.values() if rope.kind not in known)
    own = scale(kin, len(config.layers), config.hidden, config.heads, config.head_size) ** -0.5
    slow = config.ropes.get("sliding")
    biases = {"qkv": config.qkv_bias, "o": config.o_bias, "mlp": config.mlp_bias}
    there = {name for name, on in biases.items() if on}
    caps = config.softcap, config.logit_softcap
    other = {
        config.rewired: config.rewired,
        "a norm behind its embedding": config.embed_norm,
        f"the activation {config.activation}":
            ACTIVATIONS[config.activation] is not ACTIVATIONS[kin.activation],
        "scores scaled otherwise": not all(isclose(one.scale, own) for one in config.layers),
        "windows in other layers": kin.period and not _slides(config, kin.period),
        "turns of another base in layers with a window":
            slow is not None and (slow.theta, slow.kind) != (SLOW, "default"),
        "experts chosen otherwise": kin.experts and not _chosen(config),
        "experts": config.experts and not kin.experts,
        "caps on scores or logits": any(caps) and not kin.capped,
        "no caps on scores and logits": kin.capped and not all(caps),
        "other biases": not there <= kin.biases or (kin.biased and there != kin.biases),
        "a head of its own": kin.tied and not config.tied,
    }  # fmt: skip
    yield from (what for what, on in other.items() if on)


def _slides(config: DecoderConfig, period: int) -> bool:
    windows = [one.window for one in config.layers]
    wanted = [bool((i + 1) % period) for i in range(len(windows))]
    return [one is not None for one in windows] == wanted and len({*windows} - {None}) == 1


def _chosen(config: DecoderConfig) -> bool:
    """Whether experts of all layers are weighed by the softmax of those chosen."""
    moe = config.experts
    return (
        moe is not None and moe.normalise and moe.scoring == "softmax" and moe.scaling == 1.0
        and not (moe.correction or moe.shared_hidden or moe.groups > 1)
        and all(one.experts for one in config.layers)
    )  # fmt: skip
