"""The branches of a block, made from a DecoderConfig."""

from __future__ import annotations

from torch import nn

from outsize.models import attention as attention  # registers itself
from outsize.models.config import DecoderConfig
from outsize.models.experts import ExpertMLP
from outsize.models.mlp import MLP
from outsize.models.seams import MIXERS, Mixer


def mixer(config: DecoderConfig, layer: int) -> nn.Module:
    """The Mixer of a layer."""
    return MIXERS.get(config.layers[layer].kind)(config, layer)


def typed_mixer(module: nn.Module) -> Mixer:
    """What `mixer` gave, under its other type."""
    mixer: Mixer = module  # type: ignore[assignment]
    return mixer


def feed_forward(config: DecoderConfig, layer: int) -> nn.Module:
    """The feed-forward network of a layer, or its experts."""
    if config.layers[layer].experts:
        return ExpertMLP(config)
    inner = config.mlp_hidden
    return MLP(config.hidden, inner, config.activation, config.gated, config.mlp_bias)
