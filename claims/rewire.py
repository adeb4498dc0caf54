"""A trained decoder wired otherwise: the same weights under another DecoderConfig."""

from __future__ import annotations

import torch

from outsize.models.build import build
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.techniques.wirings.kraken_ways import converted, krakened
from outsize.techniques.wirings.ladder_from import laddered


def to_ladder(model: Decoder, first: int | None = None) -> Decoder:
    """The model with its layers from `first` on (default: the upper half) as a ladder, sharing its
    parameters. Its numbers are others: it needs training before it is as good again."""
    return _rewired(model, laddered(model.config, first))


def to_kraken(model: Decoder, ways: int) -> Decoder:
    """The model with `ways` sub-layers a layer, sharing what of its parameters does not change. Its
    numbers are others: it needs training before it is as good again."""
    return converted(model, krakened(model.config, ways))


def fresh_kraken(model: Decoder, ways: int) -> Decoder:
    """One of the same config with `ways` sub-layers a layer and first values of its own."""
    return build(krakened(model.config, ways), seed=3)


def _rewired(model: Decoder, config: DecoderConfig) -> Decoder:
    with torch.device("meta"):
        made = Decoder(config)
    owners = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in made.named_modules():
        for leaf, _ in list(module.named_parameters(recurse=False)):
            module.register_parameter(leaf, owners[f"{prefix}.{leaf}"])
    made.origin = model.origin
    return made
