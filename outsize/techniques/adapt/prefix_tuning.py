"""Prefix tuning: trained keys and values before every document, in every layer of a frozen model.

Li and Liang, "Prefix-Tuning: Optimizing Continuous Prompts for Generation", 2021. They begin small,
as weights of a new model do, and are attended to as they are, without rotation. Files are peft's;
where it had them from a smaller network they hold what that gives.

    adapt: {prefix: {tokens: 20}}                   # in a run's file

They take room in rows and caches as other tokens do, and go through the layers like these, though
nobody reads what comes of that. No weight can take them up. On a tensor axis they are cut between
the key-value heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from outsize.errors import OutsizeError
from outsize.models.adapter import FORMATS, Adapted, Naming
from outsize.models.attention import Attention
from outsize.models.declared import Lies
from outsize.models.decoder import Decoder, typed
from outsize.models.targets import freeze, number, refuse_others
from outsize.models.virtual import Rows
from outsize.registry import setting, technique
from outsize.techniques.adapt.prompt_tuning import FILE, OTHERS, said

KEY, FORMAT = "adapt.prefix", "PREFIX_TUNING"
HEADS = Lies(1, "kv_heads")


@dataclass(frozen=True)
class Prefix:
    """How many keys and values are before every document in each layer."""

    tokens: int = setting(20, "virtual tokens before every document", least=1)

    @property
    def virtual_tokens(self) -> int:
        return self.tokens

    def attach(self, model: nn.Module) -> None:
        """OutsizeError for a model whose layers have no keys and values of their own."""
        assert isinstance(model, Decoder), "attached to one"
        mixers = [block.mixer for block in typed(model.blocks)]
        found = [one for one in mixers if isinstance(one, Attention)]
        if len(found) < len(mixers) or model.config.rewired:
            other = next((type(one).__name__ for one in mixers if one not in found), None)
            raise OutsizeError(
                f"{KEY}: layers of this model have {other or model.config.rewired} in the place of"
                " attention with keys and values by head; expected another adapter (outsize keys"
                " adapt)"
            )
        freeze(model)
        for one in found:
            sizes = {"key": one.k.sizes[0], "value": one.v.sizes[0]}
            one.virtual = nn.ModuleDict(
                {what: Rows(self.tokens, size, HEADS, FILE) for what, size in sizes.items()}
            )

    def to_json(self, adapted: Adapted) -> dict[str, Any]:
        return said(FORMAT, self.tokens, prefix_projection=False)


def read(found: Mapping[str, Any], naming: Naming) -> Prefix:
    """The adapter that an adapter_config.json says. OutsizeError for what is not read here."""
    refuse_others(found, OTHERS)
    return Prefix(number(found, "num_virtual_tokens"))


FORMATS.add(FORMAT, read)
technique(KEY, Prefix, "trains keys and values before every document, in every frozen layer")
