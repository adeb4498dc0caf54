"""Gated linear attention: a state of fixed size for each head, decayed feature by feature as each
token says (Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training",
2023). Time grows with the length of a document, not its square; generation needs the same memory
for every token.

    S_t = diag(a_t) S_{t-1} + k_t v_t^T        o_t = q_t S_t / sqrt(K)

The recurrent form is that, a token at a time; the chunked form, for many tokens, is
outsize/kernels/recurrence.py. A document begins with a state of zeros.

Models are those of the authors' repository (fla, model_type "gla").

T tokens laid flat, H heads, K key size, V value size, D hidden, N sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.errors import OutsizeError
from outsize.kernels.recurrence import decayed
from outsize.models.config import DecoderConfig, LayerFacts, Names, NormFacts
from outsize.models.declared import INSIDE
from outsize.models.families import FAMILIES, Family
from outsize.models.families import reading as read
from outsize.models.linear import Linear
from outsize.models.mlp import ACTIVATIONS, gated
from outsize.models.norm import Norm
from outsize.models.presets import BYTE_VOCABULARY, SHAPES
from outsize.models.seams import MIXERS, Context, StateSpec, Tensors

KIND = "gated linear attention"
RANK = 16  # of the projection to the decay, as in the paper
TEMPERATURE = 16.0  # the logarithm of a decay is divided by it, as in the paper


@dataclass(frozen=True)
class Gating:
    """least: bound on the logarithm of a decay. activation: of the output's gate, None without."""

    least: float | None
    activation: str | None


class GatedLinearAttention(nn.Module):
    """x_TD -> y_TD."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        facts, own = config.layers[layer], config.layers[layer].mixing
        assert isinstance(own, Gating), "a layer of this kind says how it is gated"
        hidden, keys = config.hidden, config.heads * config.head_size
        values = config.heads * config.value_size
        self.layer, self.key_size, self.value_size = layer, config.head_size, config.value_size
        self.q = Linear(hidden, keys, False, "column", "heads")
        self.k = Linear(hidden, keys, False, "column", "heads")
        self.v = Linear(hidden, values, False, "column", "heads")
        self.decay_down = Linear(hidden, RANK, whole=INSIDE)
        self.decay = Linear(RANK, keys, True, "column", "heads")
        self.norm = Norm(config.value_size, config.norm, INSIDE)
        self.gate = self.activation = None
        if own.activation is not None:
            self.gate = Linear(hidden, values, False, "column", "heads")
            self.activation = ACTIVATIONS[own.activation]
        self.o = Linear(values, hidden, False, "row", "heads")
        self.recurrence = GatedRecurrence(facts.scale, own.least)

    def forward(self, x_TD: Tensor, ctx: Context) -> Tensor:
        o_THV = self.norm(self._mixed(x_TD, ctx))
        if self.gate is not None and self.activation is not None:
            gate_THV = self.gate(x_TD).unflatten(-1, (-1, self.value_size))
            o_THV = gated(gate_THV, o_THV, self.activation)
        y_TD: Tensor = self.o(o_THV.flatten(-2))
        return y_TD

    def _mixed(self, x_TD: Tensor, ctx: Context) -> Tensor:
        decay_TX = self.decay(self.decay_down(x_TD))
        flat = (self.q(x_TD), self.k(x_TD), decay_TX)
        q, k, z = (x.unflatten(-1, (-1, self.key_size)) for x in flat)
        v_THV = self.v(x_TD).unflatten(-1, (-1, self.value_size))
        states = self.states(x_TD.dtype)
        return ctx.carry.run(self.layer, states, self.recurrence, (q, k, v_THV, z), ctx.bounds)

    def states(self, dtype: torch.dtype) -> tuple[StateSpec, ...]:
        """One matrix for each head, in float32 at least."""
        heads = self.q.sizes[0] // self.key_size
        wide = torch.promote_types(dtype, torch.float32)
        return (StateSpec("state", (heads, self.key_size, self.value_size), wide, "sequence"),)

    def leave(self, x_TD: Tensor, ctx: Context) -> None:
        self._mixed(x_TD, ctx)


@dataclass(frozen=True)
class GatedRecurrence:
    """The recurrence, in both of its forms. Inputs: q, k (T, H, K), v (T, H, V), and z (T, H, K),
    of which a decay is sigmoid(z) ** (1 / TEMPERATURE)."""

    scale: float
    least: float | None

    def whole(
        self, inputs: Tensors, bounds: tuple[int, ...], state: Tensors | None
    ) -> tuple[Tensor, Tensors]:
        q_THK, k_THK, v_THV, z_THK = inputs
        if state is None:
            wide = torch.promote_types(q_THK.dtype, torch.float32)
            shape = (*q_THK.shape[1:], v_THV.shape[2])
            state = (q_THK.new_zeros(shape, dtype=wide),)
        a_THK, (s_HKV,) = self._logarithm(z_THK), state
        o_THV, s_HKV = decayed(q_THK, k_THK, v_THV, a_THK, s_HKV, bounds, self.scale)
        return o_THV, (s_HKV,)

    def step(self, inputs: Tensors, state: Tensors) -> tuple[Tensor, Tensors]:
        q_NHK, k_NHK, v_NHV, z_NHK = inputs
        (s_NHKV,) = state
        wide = s_NHKV.dtype
        decay_NHK = self._logarithm(z_NHK).exp()
        added = k_NHK.to(wide).unsqueeze(-1) * v_NHV.to(wide).unsqueeze(-2)
        s_NHKV = decay_NHK.unsqueeze(-1) * s_NHKV + added
        o_NHV = ((q_NHK.to(wide) * self.scale).unsqueeze(-2) @ s_NHKV).squeeze(-2)
        return o_NHV.to(v_NHV.dtype), (s_NHKV,)

    def _logarithm(self, z_THK: Tensor) -> Tensor:
        wide = torch.promote_types(z_THK.dtype, torch.float32)
        a_THK = F.logsigmoid(z_THK.to(wide)) / TEMPERATURE
        return a_THK if self.least is None else a_THK.clamp_min(self.least)


MIXERS.add(KIND, GatedLinearAttention)


# -- the models of the authors' repository --------------------------------------------------------

DEFAULTS: Mapping[str, Any] = {
    "expand_k": 0.5,
    "expand_v": 1,
    "hidden_ratio": 4,
    "num_heads": 4,
    "hidden_act": "swish",
    "max_position_embeddings": 2048,
    "elementwise_affine": True,
    "norm_eps": 1e-6,
    "use_output_gate": True,
    "fuse_norm": True,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
_ONLY: Mapping[str, tuple[Any, str]] = {
    "attn": (None, "layers of attention among the others are not built in"),
    "elementwise_affine": (True, "the norm of a head has a weight"),
    "feature_map": (None, "queries and keys are taken as they are"),
    "use_gk": (True, "a decay is of the keys' features"),
    "use_gv": (False, "a decay is of the keys' features"),
    "use_l2warp": (False, "the loss is plain"),
    "use_short_conv": (False, "convolutions are not built in"),
}
NAMES = Names(
    prefix="model.layers.{i}.",
    outer={
        "prologue.tokens": "model.embeddings",
        "epilogue.norm": "model.norm",
        "epilogue.head": "lm_head",
    },
    block={
        "attention_norm": "attn_norm",
        "attention.q": "attn.q_proj",
        "attention.k": "attn.k_proj",
        "attention.v": "attn.v_proj",
        "attention.decay_down": "attn.gk_proj.0",
        "attention.decay": "attn.gk_proj.1",
        "attention.norm": "attn.g_norm",
        "attention.gate": "attn.g_proj",
        "attention.o": "attn.o_proj",
        "mlp_norm": "mlp_norm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
    base="model.",
)


def gla(config: Mapping[str, Any]) -> DecoderConfig:
    """A config.json of the authors' repository. OutsizeError for what is not built in."""
    for key, (allowed, why) in _ONLY.items():
        read.only(config, key, allowed, why)
    heads, hidden = read.integer(config, "num_heads"), read.integer(config, "hidden_size")
    read.only(config, "num_kv_heads", heads, "every head has its own keys and values")
    size, value_size = (_head(config, key, hidden, heads) for key in ("expand_k", "expand_v"))
    activation = read.activation(config, "hidden_act")
    gate = activation if read.flag(config, "use_output_gate", True) else None
    own = Gating(_least(config), gate)
    fused = gate == "swish" and read.flag(config, "fuse_norm", True)
    block = {**NAMES.block, **({"attention.norm": "attn.g_norm_swish_gate"} if fused else {})}
    layer = LayerFacts(size**-0.5, kind=KIND, mixing=own)
    return DecoderConfig(
        family=config["model_type"],
        vocab=read.integer(config, "vocab_size"),
        hidden=hidden,
        layers=(layer,) * read.integer(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=heads,
        head_size=size,
        value_size=value_size,
        mlp_hidden=read.integer(config, "intermediate_size", _inner(config, hidden)),
        activation=activation,
        norm=NormFacts("rms", read.number(config, "norm_eps")),
        positions=read.integer(config, "max_position_embeddings"),
        names=replace(NAMES, block=block),
        source=config,
        tied=read.flag(config, "tie_word_embeddings", False),
        init_std=read.number(config, "initializer_range"),
    )


def _head(config: Mapping[str, Any], key: str, hidden: int, heads: int) -> int:
    """Features of a head, of those that all have together."""
    total = int(hidden * read.number(config, key))
    if total < heads or total % heads:
        raise OutsizeError(
            f"config.json: {key} = {config[key]} makes {total} features of hidden_size = {hidden};"
            f" expected a multiple of num_heads = {heads}"
        )
    return total // heads


def _least(config: Mapping[str, Any]) -> float | None:
    least = None if config.get("clamp_min") is None else read.number(config, "clamp_min")
    if least is not None and least > 0:
        raise read.refuse("clamp_min", least, "a logarithm of at most 0, or null")
    return least


def _inner(config: Mapping[str, Any], hidden: int) -> int:
    """The authors' default: two thirds of hidden_ratio times the hidden size, in steps of 256."""
    return -(-int(hidden * read.integer(config, "hidden_ratio") * 2 / 3) // 256) * 256


def _drawn(draw: Random) -> dict[str, Any]:
    """A small config.json, for `outsize verify --random`."""
    heads = draw.choice((1, 2, 3, 4, 6))
    return {
        "model_type": "gla",
        "vocab_size": draw.randrange(17, 67),
        "hidden_size": heads * draw.choice((4, 6, 8)),
        "intermediate_size": draw.randrange(9, 50),
        "num_hidden_layers": draw.randrange(1, 5),
        "num_heads": heads,
        "expand_k": draw.choice((0.5, 1)),
        "expand_v": draw.choice((1, 2)),
        "use_output_gate": draw.random() < 0.7,
        "hidden_act": draw.choice(("swish", "gelu")),
        "clamp_min": draw.choice((None, -0.05)),
        "tie_word_embeddings": draw.random() < 0.4,
    }


FAMILIES.add("gla", Family(gla, DEFAULTS, _drawn))
SHAPES.add(
    "tiny-gla",
    {
        "architectures": ["GLAForCausalLM"],
        "model_type": "gla",
        "vocab_size": BYTE_VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "expand_k": 0.5,
        "expand_v": 1,
        "hidden_act": "swish",
        "max_position_embeddings": 2048,
        "norm_eps": 1e-5,
        "initializer_range": 0.125,
        "tie_word_embeddings": False,
    },
)
