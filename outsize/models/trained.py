"""Which parameters of a decoder are trained, said by patterns of their names. As an adapter is,
that is part of its config: whoever makes the decoder makes it with the same parameters frozen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch.nn import Parameter

from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.models.patterns import matches, refuse_idle

_BLOCKS = "blocks"


def trained(config: DecoderConfig) -> list[tuple[str, Parameter]]:
    """A decoder's parameters that are trained, without values, by name."""
    with torch.device("meta"):
        named = Decoder(config).named_parameters()
    return [(name, parameter) for name, parameter in named if parameter.requires_grad]


def trained_names(config: DecoderConfig) -> tuple[str, ...]:
    """The names of a decoder's parameters that are trained."""
    return tuple(name for name, _ in trained(config))


def only(config: DecoderConfig, patterns: Iterable[str], key: str) -> DecoderConfig:
    """The config of a decoder of which no other parameters are trained than these, of those that
    were. OutsizeError for a pattern that names none of them. key: that says the patterns."""
    patterns = tuple(patterns)
    every = trained_names(config)
    refuse_idle(patterns, every, key)
    frozen = {name for name in every if not any(matches(name, one) for one in patterns)}
    began = min(map(_place, set(every) - frozen))
    layers = tuple(
        replace(layer, frozen=layer.frozen | _inside(frozen, i), idle=i < began)
        for i, layer in enumerate(config.layers)
    )
    outside = frozenset(name for name in frozen if not name.startswith(f"{_BLOCKS}."))
    return replace(config, layers=layers, frozen=config.frozen | outside)


def _place(name: str) -> float:
    """Of a parameter, the layer that it is in."""
    first, rest = name.split(".", 1)
    return int(rest.split(".")[0]) if first == _BLOCKS else -1 if first == "prologue" else 1e9


def _inside(names: Iterable[str], layer: int) -> frozenset[str]:
    def found() -> Iterator[str]:
        for name in names:
            if name.startswith(prefix := f"{_BLOCKS}.{layer}."):
                yield name.removeprefix(prefix)

    return frozenset(found())
