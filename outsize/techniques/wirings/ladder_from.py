"""Ladder residual: every branch reads the stream without the branch before it.

So a branch's sum over the tensor axis has the whole next branch to run beside (Zhang et al.,
"Ladder-Residual: Parallelism-Aware Architecture for Accelerating Large Model Inference with
Communication Overlapping", 2025). Where plain layers come before it, the ladder's first attention
misses the network of the last of these, as in the authors' code. The weights are those of a plain
model, the maths is not: the paper trains from scratch, or converts the upper half of the layers and
trains 3B tokens more.

Between blocks go x_TD and m_TD side by side, (T, 2 D): the stream, and what the last feed-forward
network adds to it, which on a tensor axis may still be this worker's summand.

T tokens, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outsize.collectives import Collective
from outsize.errors import OutsizeError
from outsize.models.branches import feed_forward, mixer, typed_mixer
from outsize.models.config import DecoderConfig
from outsize.models.declared import Unit
from outsize.models.decoder import Decoder
from outsize.models.families.reading import count
from outsize.models.norm import Norm
from outsize.models.seams import Context, Mixer
from outsize.models.wiring import WIRES, Launch, Launching, Wire, at_once, sequential
from outsize.parallel.sums import Crossing
from outsize.parallel.tensor.beside import Beside
from outsize.parallel.tensor.declared import Boundary, boundaries
from outsize.parallel.tensor.rewired import Rewired, first_counts, flying, launching

NAME = "ladder_from"
SUM: Crossing = ("all_reduce", "none")
BIASES = ("attention.o.bias", "mlp.down.bias")


class LadderBlock(Launching):
    """(T, D) in the first one, (T, 2 D) in the others -> (T, 2 D). plain: its own network sees its
    attention; what that network gives is apart."""

    def __init__(self, config: DecoderConfig, layer: int, plain: bool = False) -> None:
        super().__init__()
        self.layer, self.hidden, self.plain = layer, config.hidden, plain
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
        landing, name = self.launch(attended_TD), f"{self.layer}.attention"
        if self.plain:
            stream_TD = stream_TD + ctx.drop(landing(), name)
        fed_TD: Tensor = self.mlp(self.mlp_norm(stream_TD), ctx)
        if not self.plain:
            stream_TD = stream_TD + ctx.drop(landing(), name)
        return torch.cat((stream_TD, fed_TD), dim=-1)

    @property
    def mixer(self) -> Mixer:
        """What of the block lets tokens have an effect on others."""
        return typed_mixer(self.attention)

    def leave(self, x: Tensor, ctx: Context) -> None:
        """Keep what the block's input leaves for later tokens, and compute nothing else."""
        x_TD = self.attention_norm(x[:, : self.hidden])
        self.mixer.leave(self.entering(x_TD, ctx), ctx)


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


@dataclass(frozen=True)
class Ladder:
    """Of the layers from `first` on, of so many. On a tensor axis what a branch gives is summed as
    in a plain model, one branch later."""

    first: int
    layers: int
    key = NAME

    @property
    def begins(self) -> int:
        """The first layer that gives its network's output apart."""
        return max(self.first - 1, 0)

    def block(self, config: DecoderConfig, layer: int) -> LadderBlock | None:
        if layer < self.begins:
            return None
        return LadderBlock(config, layer, plain=layer < self.first)

    def join(self, config: DecoderConfig) -> LadderJoin:
        return LadderJoin(config)

    def width(self, layer: int, size: int) -> float:
        return 2.0 if layer >= self.begins else 1.0

    def units(self) -> dict[Unit, int]:
        return {}

    def check(self, size: int, sequence_parallel: bool) -> None:
        """Any axis can share it."""

    def inside(self) -> tuple[str, ...]:
        return tuple(f"blocks.{i}.{b}" for i in range(self.begins, self.layers) for b in BIASES)

    def boundaries(self, sequence_parallel: bool) -> tuple[Boundary, ...]:
        return boundaries(sequence_parallel)

    def rewire(
        self, model: Decoder, axis: Collective, sequence_parallel: bool, beside: Beside | None
    ) -> Rewired:
        names = set[str]()
        for i, block in enumerate(model.blocks):
            for name in ("attention", "mlp") if isinstance(block, LadderBlock) else ():
                first_counts(getattr(block, name), axis)
                names.add(f"blocks.{i}.{name}")
        if beside is None or sequence_parallel:  # tokens that are cut have no place for summands
            return Rewired(frozenset(names))
        launching(model, flying(axis, beside, SUM))
        return Rewired(frozenset(names), flying=True)


def laddered(config: DecoderConfig, first: int | None = None) -> DecoderConfig:
    """The config of the same model with its layers from `first` on as a ladder; the upper half, as
    the paper converts trained models, where it is not given. OutsizeError for a model whose
    branches are arranged otherwise than x + f(norm(x)), one after the other."""
    layers = len(config.layers)
    first = layers // 2 if first is None else first
    if not 0 <= first < layers:
        raise OutsizeError(f"ladder_from is {first}; expected 0 to {layers - 1}, a layer")
    sequential(config, NAME)
    return replace(config, wiring=Ladder(first, layers), source={**config.source, NAME: first})


WIRES.add(
    NAME,
    Wire(
        lambda config, said: laddered(config, count(said, NAME)),
        lambda draw, made: {**made, NAME: draw.choice((0, 0, 1))},
        0.1,
    ),
)
