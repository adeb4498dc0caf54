"""Families of decoders: each a function from a config.json to a DecoderConfig."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from outsize.errors import OutsizeError, nearest
from outsize.models import coding
from outsize.models.config import DecoderConfig
from outsize.models.families import deepseek, gemma, gpt, llama, mixture
from outsize.models.families.reading import only
from outsize.models.wiring import WIRES
from outsize.registry import Registry, filed


@dataclass(frozen=True)
class Family:
    """How a config.json is read: missing keys get `defaults`, then `read` makes the facts. draw: a
    small random one, for `outsize verify --random`, of a family that comes with a technique."""

    read: Callable[[Mapping[str, Any]], DecoderConfig]
    defaults: Mapping[str, Any]
    draw: Callable[[Random], dict[str, Any]] | None = None


FAMILIES: Registry[Family] = Registry("model_type")
_BUILT_IN: Mapping[str, Family] = {
    "deepseek_v3": Family(deepseek.deepseek_v3, deepseek.DEFAULTS),
    "gemma2": Family(gemma.gemma2, gemma.GEMMA2_DEFAULTS),
    "gemma3_text": Family(gemma.gemma3, gemma.GEMMA3_DEFAULTS),
    "gpt2": Family(gpt.gpt2, gpt.GPT2_DEFAULTS),
    "gpt_neox": Family(gpt.gpt_neox, gpt.GPT_NEOX_DEFAULTS),
    "llama": Family(llama.llama, llama.LLAMA_DEFAULTS),
    "mistral": Family(llama.mistral, llama.MISTRAL_DEFAULTS),
    "mixtral": Family(mixture.mixtral, mixture.MIXTRAL_DEFAULTS),
    "olmo2": Family(llama.olmo2, llama.OLMO2_DEFAULTS),
    "opt": Family(gpt.opt, gpt.OPT_DEFAULTS),
    "phi3": Family(llama.phi3, llama.PHI3_DEFAULTS),
    "qwen2": Family(llama.qwen2, llama.QWEN2_DEFAULTS),
    "qwen3": Family(llama.qwen3, llama.QWEN3_DEFAULTS),
    "qwen3_moe": Family(mixture.qwen3_moe, mixture.QWEN3_MOE_DEFAULTS),
    "starcoder2": Family(gpt.starcoder2, gpt.STARCODER2_DEFAULTS),
}
for _name, _family in _BUILT_IN.items():
    FAMILIES.add(_name, _family)


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    """The dict of a config.json -> what the decoder needs; the dict itself is kept as `source`.

    Raises OutsizeError naming key and value for an unknown model_type, for a value of the wrong
    type, and for every feature that is not supported. Dropout, layer drop and router jitter are
    off, whatever the config says.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise OutsizeError(f"config.json: model_type = {kind!r}; expected the name of a family")
    family = FAMILIES.find(kind)
    if family is None:
        raise OutsizeError(
            f"config.json: model_type = {kind!r} is not a family that Outsize has "
            f"({', '.join(FAMILIES.names())}){_guess(kind)}"
        )
    only(config, "is_encoder_decoder", False, "only decoders are built in")
    only(config, "add_cross_attention", False, "only decoders are built in")
    only(config, "use_bidirectional_attention", False, "attention is causal")
    facts = replace(family.read({**family.defaults, **config}), source=dict(config))
    for key in sorted(filed("wirings") & config.keys()):
        if config[key] is not None:
            facts = WIRES.get(key).read(facts, config)
    return coding.read(facts)


def _guess(kind: str) -> str:
    hint = nearest(kind, FAMILIES.names())
    return hint if "mean" in hint else ""
