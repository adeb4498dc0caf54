"""Families of decoders: each a function from a config.json to a DecoderConfig."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from outsize.errors import OutsizeError, nearest
from outsize.models.config import DecoderConfig
from outsize.models.families import llama
from outsize.models.families.reading import only

FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], DecoderConfig]] = {  # by model_type
    "llama": llama.llama,
    "mistral": llama.mistral,
    "olmo2": llama.olmo2,
    "phi3": llama.phi3,
    "qwen2": llama.qwen2,
    "qwen3": llama.qwen3,
}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    """The dict of a config.json -> what the decoder needs; the dict itself is kept as `source`.

    Raises OutsizeError naming key and value for an unknown model_type, for a value of the wrong
    type, and for every feature that is not supported. Dropout and other training noise are off,
    whatever the config says.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise OutsizeError(f"config.json: model_type = {kind!r}; expected a family's name")
    if kind not in FAMILIES:
        raise OutsizeError(
            f"config.json: model_type = {kind!r} is not a family that Outsize has"
            f"{nearest(kind, sorted(FAMILIES))} (all: {', '.join(sorted(FAMILIES))})"
        )
    only(config, "quantization_config", None, "load the unquantised weights")
    only(config, "is_encoder_decoder", False, "only decoders are built in")
    only(config, "add_cross_attention", False, "only decoders are built in")
    only(config, "use_bidirectional_attention", False, "attention is causal")
    return FAMILIES[kind](config)
