"""The branches of a block, made from a DecoderConfig."""

from __future__ import annotations

from torch import nn

from outsize.models.attention import Attention, LatentAttention
from outsize.models.config import DecoderConfig
from outsize.models.experts import ExpertMLP
from outsize.models.mlp import MLP


def mixer(config: DecoderConfig, layer: int) -> Attention | LatentAttention:
    """The attention of a layer."""
    return (Attention if config.latent is None else LatentAttention)(config, layer)


def feed_forward(config: DecoderConfig, layer: int) -> nn.Module:
    """The feed-forward network of a layer, or its experts."""
    if config.layers[layer].experts:
        return ExpertMLP(config)
    inner = config.mlp_hidden
    return MLP(config.hidden, inner, config.activation, config.gated, config.mlp_bias)
