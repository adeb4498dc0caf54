"""P-tuning: trained embeddings before every document, which a small network makes.

Liu et al., "GPT Understands, Too", 2021; the network of peft's files of today, three layers with
ReLU between them, in the place of a recurrent one. It is trained and nothing else: once trained,
what it gives is all that is needed, and `outsize export --to peft` writes that as a prompt.

    adapt: {p_tuning: {tokens: 20, hidden: 128}}    # in a run's file

Its values lie in the residual stream: whole on every worker of a tensor axis. Checkpoints hold the
network, under a peft_type of our own. Embeddings begin as normal numbers, layers as torch's do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.models.adapter import FORMATS, OWN, Adapted, Adapter, Naming
from outsize.models.declared import STREAM, Initial
from outsize.models.decoder import Decoder
from outsize.models.targets import freeze, number, refuse_others
from outsize.models.virtual import Rows, places
from outsize.registry import setting, technique
from outsize.techniques.adapt.prompt_tuning import OTHERS, Prompt, said
from outsize.techniques.adapt.serial_adapters import Projection

KEY, FORMAT = "adapt.p_tuning", f"{OWN}P_TUNING"
FILE = "/prompt_encoder"


@dataclass(frozen=True)
class PTuning:
    """How many embeddings are before every document, and how wide their network is inside."""

    tokens: int = setting(20, "virtual tokens before every document", least=1)
    hidden: int = setting(128, "features inside the network that makes them", least=1)

    @property
    def virtual_tokens(self) -> int:
        return self.tokens

    def attach(self, model: nn.Module) -> None:
        assert isinstance(model, Decoder), "attached to one"
        freeze(model)
        size = model.prologue.tokens.weight.shape[1]
        model.prologue.virtual = Encoder(self.tokens, size, self.hidden)

    def to_json(self, adapted: Adapted) -> dict[str, Any]:
        return said(FORMAT, self.tokens, encoder_hidden_size=self.hidden)

    def plainer(self, model: nn.Module) -> tuple[Adapter, Mapping[str, Tensor]]:
        """The embeddings alone."""
        assert isinstance(model, Decoder) and isinstance(model.prologue.virtual, Encoder)
        return Prompt(self.tokens), {"prologue.virtual.weight": model.prologue.virtual.table()}


class Encoder(nn.Module):
    """positions_T -> the values (T, E) that virtual tokens have, and whether a token is one."""

    def __init__(self, count: int, size: int, hidden: int) -> None:
        super().__init__()
        self.count = count
        self.embedding = Rows(count, size, STREAM, f"{FILE}.embedding.weight", Initial(std=1.0))
        sizes = (size, hidden, hidden, size)
        self.layers = nn.ModuleList(
            Projection(d_in, d_out, f"{FILE}.mlp_head.{2 * i}", 1 / math.sqrt(d_in))
            for i, (d_in, d_out) in enumerate(pairwise(sizes))
        )

    def table(self) -> Tensor:
        """(P, E): what the network makes of its embeddings."""
        every_P = torch.arange(self.count, device=self.embedding.weight.device)
        x, _ = self.embedding(every_P)
        for i, layer in enumerate(self.layers):
            x = layer(F.relu(x) if i else x)
        made: Tensor = x
        return made

    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        at_T, here_T1 = places(positions_T, self.count)
        return F.embedding(at_T, self.table()), here_T1


def read(found: Mapping[str, Any], naming: Naming) -> PTuning:
    """The adapter that an adapter_config.json says. OutsizeError for what is not one."""
    refuse_others(found, OTHERS)
    return PTuning(number(found, "num_virtual_tokens"), number(found, "encoder_hidden_size"))


FORMATS.add(FORMAT, read)
technique(KEY, PTuning, "trains a network that makes embeddings before every document")
