"""Prompt tuning: a few trained embeddings before every document, in front of a frozen model.

Lester et al., "The Power of Scale for Parameter-Efficient Prompt Tuning", 2021. They begin as
embeddings of a new model do. Files are peft's; those of its P-tuning hold what its encoder gives,
and are read as such embeddings.

    adapt: {prompt: {tokens: 20}}                   # in a run's file

They take room in rows and caches as other tokens do. No weight can take them up. On a tensor axis
they are whole on every worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from outsize.models.adapter import FORMATS, Adapted, Naming
from outsize.models.declared import STREAM
from outsize.models.decoder import Decoder
from outsize.models.targets import freeze, number, refuse_others
from outsize.models.virtual import Rows
from outsize.registry import setting, technique

KEY, FORMAT, ENCODED = "adapt.prompt", "PROMPT_TUNING", "P_TUNING"
FILE = "/prompt_embeddings"
OTHERS = {"num_transformer_submodules": 1}


@dataclass(frozen=True)
class Prompt:
    """How many embeddings are before every document."""

    tokens: int = setting(20, "virtual tokens before every document", least=1)

    @property
    def virtual_tokens(self) -> int:
        return self.tokens

    def attach(self, model: nn.Module) -> None:
        assert isinstance(model, Decoder), "attached to one"
        freeze(model)
        size = model.prologue.tokens.weight.shape[1]
        model.prologue.virtual = Rows(self.tokens, size, STREAM, FILE)

    def to_json(self, adapted: Adapted) -> dict[str, Any]:
        return said(FORMAT, self.tokens, prompt_tuning_init="RANDOM")


def said(kind: str, tokens: int, **more: object) -> dict[str, Any]:
    """What an adapter_config.json says of virtual tokens."""
    return {
        "peft_type": kind, "task_type": "CAUSAL_LM", "inference_mode": True,
        "num_virtual_tokens": tokens, **OTHERS, **more,
    }  # fmt: skip


def read(found: Mapping[str, Any], naming: Naming) -> Prompt:
    """The adapter that an adapter_config.json says. OutsizeError for what is not read here."""
    refuse_others(found, OTHERS)
    return Prompt(number(found, "num_virtual_tokens"))


FORMATS.add(FORMAT, read)
FORMATS.add(ENCODED, read)
technique(KEY, Prompt, "trains embeddings that stand before every document of a frozen model")
