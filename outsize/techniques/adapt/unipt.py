"""UniPT: a side network on what frozen blocks took, through which no gradient passes.

Diao et al., "UniPT: Universal Parallel Tuning for Transfer Learning with Efficient Parameter and
Memory", 2024 (arXiv 2308.14316). What block i took is brought to few features, t_i, and what the
last one gave, a, in the same way. Parallel interaction: m_i = attention of a to t_i, plus t_i.
Confidence aggregation: the m_i are summed by a softmax over layers of g (a * t_i). What comes of
that is added to what the last block gave:

    y = x + U relu(a + norm(P sum_i c_i m_i)),    t_i = norm(D_i x_i)

The base runs without a graph: nothing inside of a block is kept, its inputs are. U begins as zeros,
so that the model begins as it was. The paper's features are of whole texts, which a causal model
may not see: here each token has its own confidence and attends to itself and earlier ones of its
document, by softmax, which every cache and axis of tokens knows, where the paper divides rectified
scores by their sum. Norms have no weights, and layers no biases.

    adapt: {unipt: {size: 64}}                      # in a run's file

No weight can take it up. It is whole on every worker of a tensor axis; a pipeline has no way for
what its blocks took. peft has no such adapter: files are of a peft_type of our own.

T tokens, D hidden, L layers, R features of the side network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.errors import OutsizeError
from outsize.models.adapter import FORMATS, OWN, Adapted, Naming
from outsize.models.attention import keys_and_values
from outsize.models.branches import typed_mixer
from outsize.models.config import SIDE, DecoderConfig, LayerFacts
from outsize.models.declared import STREAM, Declared, Initial
from outsize.models.decoder import Block, Decoder, typed
from outsize.models.low_rank import Factor
from outsize.models.norm import upcast
from outsize.models.seams import MIXERS, AttendSpec, Context, Mixer, StateSpec
from outsize.models.targets import freeze, number, refuse_others
from outsize.models.wiring import AnyBlock
from outsize.registry import setting, technique

KEY, FORMAT = "adapt.unipt", f"{OWN}UNIPT"
EPS = 1e-5


@dataclass(frozen=True)
class UniPT:
    """How wide the side network is."""

    size: int = setting(64, "features of the side network", least=1)

    @property
    def appended(self) -> LayerFacts:
        return LayerFacts(1 / math.sqrt(self.size), kind=SIDE, mixing=self)

    def attach(self, model: nn.Module) -> None:
        """OutsizeError for a model whose branches are wired otherwise."""
        assert isinstance(model, Decoder), "attached to one"
        if model.config.rewired:
            raise OutsizeError(
                f"{KEY}: the model has {model.config.rewired}, whose blocks give more than the"
                " stream; adapt the plain model instead"
            )
        freeze(model)
        for block in typed(model.blocks):
            assert isinstance(block, Block), "those of a plain model"
            block.seen = True
        config = replace(model.config, adapter=self)
        model.blocks.append(SideBlock(config, len(model.blocks)))

    def to_json(self, adapted: Adapted) -> dict[str, Any]:
        return {
            "peft_type": FORMAT, "task_type": "CAUSAL_LM", "inference_mode": True,
            "size": self.size,
        }  # fmt: skip


class Interaction(nn.Module):
    """What lets tokens of the side network have an effect on later ones: attention of a to t_i, by
    layer as other attention is by head. It has no parameters."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        facts = config.layers[layer]
        assert isinstance(facts.mixing, UniPT), "a layer of this kind is its"
        self.layers, self.size = layer, facts.mixing.size
        self.spec = AttendSpec(layer, facts.scale)

    def forward(self, a_TR: Tensor, t_TLR: Tensor, ctx: Context) -> Tensor:
        """m_TLR, without what is a token's own."""
        q_TLR = a_TR.unsqueeze(1).expand_as(t_TLR)
        return ctx.attend(q_TLR, t_TLR, t_TLR, ctx.bounds, self.spec)

    def states(self, dtype: torch.dtype) -> tuple[StateSpec, ...]:
        return keys_and_values(self.layers, self.size, self.size, dtype)

    def leave(self, t_TLR: Tensor, ctx: Context) -> None:
        ctx.carry.keep((t_TLR, t_TLR))


class SideBlock(AnyBlock):
    """x_TD -> y_TD, behind all blocks of the base. down: by layer, and of the last one's output."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        wide, own = config.hidden, Interaction(config, layer)
        size, every = own.size, range(layer + 1)
        self.interaction = own
        self.down = nn.ModuleList(_factor(wide, size, f"down.{i}") for i in every)
        self.gate = _factor(size, 1, "gate")
        self.project = _factor(size, size, "project")
        self.up = _factor(size, wide, "up", begins=False)

    @property
    def mixer(self) -> Mixer:
        return typed_mixer(self.interaction)

    def forward(self, x_TD: Tensor, ctx: Context) -> Tensor:
        t_TLR, a_TR = self._targets(ctx), _normed(self.down[-1](x_TD.detach()))
        m_TLR = self.interaction(a_TR, t_TLR, ctx) + t_TLR
        score_TL1: Tensor = self.gate(a_TR.unsqueeze(1) * t_TLR)
        c_TL1 = upcast(score_TL1).softmax(1).to(m_TLR.dtype)
        inner_TR = a_TR + _normed(self.project((c_TL1 * m_TLR).sum(1)))
        y_TD: Tensor = x_TD + self.up(F.relu(inner_TR))
        return y_TD

    def leave(self, x: Tensor, ctx: Context) -> None:
        """Keep what these tokens leave for later ones, and compute nothing else."""
        self.mixer.leave(self._targets(ctx), ctx)

    def _targets(self, ctx: Context) -> Tensor:
        """t_TLR, of what the blocks took."""
        layers = self.interaction.layers
        assert len(ctx.taken) == layers, "all blocks ran with this Context"
        each = (_normed(self.down[i](ctx.taken[i].detach())) for i in range(layers))
        return torch.stack(list(each), 1)


def _factor(d_in: int, d_out: int, name: str, begins: bool = True) -> Factor:
    start = Initial(bound=1 / math.sqrt(d_in)) if begins else Initial()
    return Factor((d_in, d_out), Declared(start, STREAM, f"/unipt.{name}.weight"))


def _normed(x_TR: Tensor) -> Tensor:
    return F.layer_norm(x_TR, x_TR.shape[-1:], eps=EPS)


def read(found: Mapping[str, Any], naming: Naming) -> UniPT:
    """The adapter that an adapter_config.json says. OutsizeError for what is not one."""
    refuse_others(found, {})
    return UniPT(number(found, "size"))


MIXERS.add(SIDE, Interaction)
FORMATS.add(FORMAT, read)
technique(KEY, UniPT, "trains a side network on what frozen blocks took, which keep nothing else")
