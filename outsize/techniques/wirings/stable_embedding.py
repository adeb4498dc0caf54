"""Stable embedding: a layer norm behind the token embedding, whose first values are Xavier's.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021 (arXiv 2110.02861), section
2.3: rows of an embedding have gradients of very unlike sizes, and with 8-bit states that made runs
diverge. As in the authors' package: Xavier's uniform values, a layer norm with weights and biases,
nothing is scaled, and 32-bit states, which 8-bit optimizers have here for every embedding.

    stable_embedding: true

A model says the same in its config.json, as "stable_embedding". A tied head has the same weights,
as they are before the norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from outsize.errors import OutsizeError
from outsize.models.config import DecoderConfig, NormFacts
from outsize.models.families import reading
from outsize.models.wiring import WIRES, Wire
from outsize.registry import technique

NAME = "stable_embedding"
NORM = NormFacts("layer", eps=1e-5)


@dataclass(frozen=True)
class StableEmbedding:
    """On or off."""

    def limited(self, config: DecoderConfig) -> DecoderConfig:
        return stable(config)


def stable(config: DecoderConfig) -> DecoderConfig:
    """The config of the same model with a stable embedding. OutsizeError for one that multiplies
    its embedding by a number, which the norm would undo."""
    if config.embed_scale != 1:
        raise OutsizeError(
            f"{NAME}: {config.family} multiplies its embedding by {config.embed_scale:g}, and a"
            " norm would undo that; leave it out"
        )
    return replace(config, embed_norm=NORM, source={**config.source, NAME: True})


def _read(config: DecoderConfig, said: Mapping[str, Any]) -> DecoderConfig:
    return stable(config) if reading.flag(said, NAME, default=False) else config


def _drawn(draw: Random, made: dict[str, Any]) -> dict[str, Any]:
    return {**made, NAME: True}


WIRES.add(NAME, Wire(_read, _drawn, share=0.0))
technique(NAME, StableEmbedding, "a layer norm behind the embedding, Xavier's first values")
