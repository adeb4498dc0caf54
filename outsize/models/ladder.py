"""Ladder residual: every branch reads the stream without the branch before it.

So a branch's sum over the tensor axis has the whole next branch to run beside (Zhang et al.,
"Ladder-Residual: Parallelism-Aware Architecture for Accelerating Large Model Inference with
Communication Overlapping", 2025). The weights are those of a plain model, the maths is not: the
paper trains from scratch, or converts the upper half of the layers and trains 3B tokens more.

Between blocks go x_TD and m_TD side by side, (T, 2 D): the stream, and what the last feed-forward
network adds to it, which on a tensor axis may still be this worker's summand.

T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from outsize.errors import OutsizeError
from outsize.models.branches import feed_forward, mixer, typed_mixer
from outsize.models.config import DecoderConfig
from outsize.models.norm import Norm
from outsize.models.seams import Context, Mixer

Launch = Callable[[Tensor], Callable[[], Tensor]]  # begins to add up; what that gives has the sum


def at_once(x: Tensor) -> Callable[[], Tensor]:
    """Nothing is left to add: one worker, or a sum that was taken before."""
    return lambda: x


class LadderBlock(nn.Module):
    """(T, D) in the first one, (T, 2 D) in the others -> (T, 2 D)."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.hidden = layer, config.hidden
        self.attention_norm = Norm(config.hidden, config.norm)
        self.attention = mixer(config, layer)
        self.mlp_norm = Norm(config.hidden, config.norm)
        self.mlp = feed_forward(config, layer)
        self.launch: Launch = at_once

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        stream_TD, landing = x[:, : self.hidden], None
        if x.shape[1] > self.hidden:
            landing = self.launch(x[:, self.hidden :])
        attended_TD: Tensor = self.attention(self.attention_norm(stream_TD), ctx)
        if landing is not None:
            stream_TD = stream_TD + ctx.drop(landing(), f"{self.layer - 1}.mlp")
        landing = self.launch(attended_TD)
        fed_TD: Tensor = self.mlp(self.mlp_norm(stream_TD), ctx)
        stream_TD = stream_TD + ctx.drop(landing(), f"{self.layer}.attention")
        return torch.cat((stream_TD, fed_TD), dim=-1)

    @property
    def mixer(self) -> Mixer:
        """What of the block lets tokens have an effect on others."""
        return typed_mixer(self.attention)

    def leave(self, x: Tensor, ctx: Context) -> None:
        """Keep what the block's input leaves for later tokens, and compute nothing else."""
        self.mixer.leave(self.attention_norm(x[:, : self.hidden]), ctx)


class LadderJoin:
    """(T, 2 D) -> (T, D): the stream with all that was added to it."""

    def __init__(self, config: DecoderConfig) -> None:
        self.hidden, self.last = config.hidden, len(config.layers) - 1
        self.launch: Launch = at_once

    def __call__(self, x: Tensor, ctx: Context | None) -> Tensor:
        fed_TD = self.launch(x[:, self.hidden :])()
        if ctx is not None:
            fed_TD = ctx.drop(fed_TD, f"{self.last}.mlp")
        return x[:, : self.hidden] + fed_TD


def laddered(config: DecoderConfig, first: int | None = None) -> DecoderConfig:
    """The config of the same model with its layers from `first` on as a ladder; the upper half, as
    the paper converts trained models, where it is not given. OutsizeError for a model whose
    branches are arranged otherwise than x + f(norm(x)), one after the other."""
    count = len(config.layers)
    first = count // 2 if first is None else first
    if not 0 <= first < count:
        raise OutsizeError(f"ladder_from is {first}; expected 0 to {count - 1}, a layer")
    sequential(config, "ladder_from")
    if config.ways > 1:
        raise OutsizeError("config.json: ladder_from and kraken_ways exclude each other; drop one")
    source = {**config.source, "ladder_from": first}
    return replace(config, ladder_from=first, source=source)


def sequential(config: DecoderConfig, key: str) -> None:
    """OutsizeError unless branches are x + f(norm(x)), one after the other."""
    if config.placement != "before" or config.parallel:
        how = "side by side" if config.parallel else f"with norms {config.placement}"
        raise OutsizeError(
            f"config.json: {key} is set, but {config.family} has its branches {how}; only models"
            " with x + f(norm(x)), one branch after the other, can be wired like this"
        )
