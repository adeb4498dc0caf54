"""Kraken: every layer is several sub-layers beside one another, their outputs summed once.

Each of the n ways has some of the heads and of the feed-forward network's features, norms and a
residual stream of its own, and runs attention and network without a word to the others. The sum of
all streams runs beside the next layer's attention, which sees its own way's alone; the network
behind it sees all (Prabhakar et al., "Kraken: Inherently Parallel Transformers For Efficient
Multi-Device Inference", 2024, as the authors' own code has it). For way i of a layer,

    u_i = x_i + attention_i(norm_i(x_i))
    x_i <- u_i + mlp_i(norm_i(u_i + sum of the other ways' x_j))    in the first layer norm_i(u_i)

and behind the last layer one linear layer, the conjunction, makes x of all x_i. What is left of the
plain model: heads and features are those of config.json, cut into ways, and a norm of each query
and key head is shared. With one way this is the plain model.

The paper trains from scratch and says of no conversion. A plain model is converted so that a way
estimates the plain stream by its own part of it: what its branches give counts n times, and the
conjunction takes the mean. Where ways are alike, all that differs from the plain model is that a
network sees its own way's attention of the layer, and not the other ways'.

T tokens, D hidden, n ways, I in, O out; W value size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from outsize.collectives import Collective
from outsize.errors import OutsizeError
from outsize.kernels import product
from outsize.kernels.linear import GradSink
from outsize.models.attention import Attention
from outsize.models.config import DecoderConfig
from outsize.models.declared import Declared, Initial, Lies, Unit
from outsize.models.decoder import Decoder
from outsize.models.families.reading import integer
from outsize.models.linear import Linear
from outsize.models.mlp import MLP
from outsize.models.norm import Norm, Scale
from outsize.models.seams import Context, Mixer
from outsize.models.wiring import WIRES, Launch, Launching, Wire, at_once, sequential
from outsize.parallel.tensor.beside import Beside
from outsize.parallel.tensor.declared import BY_FEATURES, FANNED, SUMMAND, WHOLE, Boundary
from outsize.parallel.tensor.rewired import Rewired, first_counts, flying, launching

NAME = "kraken_ways"
UNIT: Unit = "ways"


class KrakenBlock(Launching):
    """(T, D) in the first one, (T, n D) in the others -> (T, n D): x_0, x_1, ...

    ways, first: how many are on this worker, and the first one's number.
    """

    def __init__(self, config: DecoderConfig, layer: int, ways: int) -> None:
        super().__init__()
        self.layer, self.hidden = layer, config.hidden
        self.ways, self.first = ways, 0
        self.attention_norm = WayNorm(config, ways)
        self.attention = KrakenAttention(config, layer, ways)
        self.mlp_norm = WayNorm(config, ways)
        self.mlp = KrakenMLP(config, ways)
        self.launch: Launch = at_once

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        x_TnD = self._streams(x)
        landing = self.launch(x_TnD.sum(1)) if self.layer else None
        attended_TnD = self.attention(self.attention_norm(x_TnD), ctx)
        attended_TnD = self._drop(attended_TnD, ctx, "attention")
        u_TnD = x_TnD + attended_TnD
        seen_TnD = u_TnD if landing is None else attended_TnD + landing().unsqueeze(1)
        fed_TnD = self.mlp(self.mlp_norm(seen_TnD), ctx)
        y: Tensor = (u_TnD + self._drop(fed_TnD, ctx, "mlp")).flatten(1)
        return y

    @property
    def mixer(self) -> Mixer:
        """What of the block lets tokens have an effect on others."""
        return self.attention

    def leave(self, x: Tensor, ctx: Context) -> None:
        """Keep what the block's input leaves for later tokens, and compute nothing else."""
        h_TnD = self.attention_norm(self._streams(x))
        self.attention.leave(self.entering(h_TnD, ctx), ctx)

    def _streams(self, x: Tensor) -> Tensor:
        """x_TnD."""
        if not self.layer:
            return x.unsqueeze(1).expand(-1, self.ways, -1)
        return x.view(len(x), self.ways, self.hidden)

    def _drop(self, x_TnD: Tensor, ctx: Context, branch: str) -> Tensor:
        if ctx.noise is None:
            return x_TnD
        names = (f"{self.layer}.{branch}.{self.first + i}" for i in range(self.ways))
        return torch.stack([ctx.drop(x_TnD[:, i], n) for i, n in enumerate(names)], dim=1)


class KrakenJoin(nn.Module):
    """(T, n D) -> (T, D): the conjunction."""

    def __init__(self, config: DecoderConfig, ways: int) -> None:
        super().__init__()
        size = config.hidden
        self.conjunction = Linear(ways * size, size, config.mlp_bias, "row", UNIT)
        self.launch: Launch = at_once

    def forward(self, x: Tensor, ctx: Context | None) -> Tensor:
        return self.launch(self.conjunction(x))()


class WayNorm(Norm):
    """x_TnD -> y_TnD: a norm a way, their weights one behind another."""

    def __init__(self, config: DecoderConfig, ways: int) -> None:
        super().__init__(ways * config.hidden, config.norm, Lies(0, UNIT))
        self.hidden = config.hidden

    @property
    def wide(self) -> bool:
        return False

    def forward(self, x_TnD: Tensor) -> Tensor:
        count = x_TnD.shape[1]
        weights, biases = (
            [None] * count if p is None else p.unflatten(0, (count, -1)).unbind()
            for p in (self.weight, self.bias)
        )
        ways = zip(x_TnD.unbind(1), weights, biases, strict=True)
        return torch.stack([self.run(Scale(self.facts, w, b), x) for x, w, b in ways], dim=1)


class WayRow(Linear):
    """x_TnI -> y_TnO of a row weight, way by way, with biases one behind another."""

    def __init__(self, d_in: int, d_out: int, bias: bool, unit: Unit, ways: int) -> None:
        super().__init__(d_in, d_out, bias, "row", unit)
        self.bias = nn.Parameter(torch.empty(ways * d_out)) if bias else None
        self.product = rows

    def declare(self, leaf: str) -> Declared:
        return Declared(Initial(), Lies(0, UNIT)) if leaf == "bias" else super().declare(leaf)


class KrakenAttention(Attention):
    """h_TnD -> y_TnD: each way with its heads."""

    def __init__(self, config: DecoderConfig, layer: int, ways: int) -> None:
        super().__init__(config, layer)
        for one in (self.q, self.k, self.v):
            one.product = columns
        size = config.heads * config.value_size
        self.o = WayRow(size, config.hidden, config.o_bias, "heads", ways)

    def forward(self, h_TnD: Tensor, ctx: Context) -> Tensor:
        y_TnD: Tensor = self.o(self.attended(h_TnD, ctx).unflatten(-1, (h_TnD.shape[1], -1)))
        return y_TnD


class KrakenMLP(MLP):
    """h_TnD -> y_TnD: each way with its inner features."""

    def __init__(self, config: DecoderConfig, ways: int) -> None:
        inner = config.mlp_hidden
        super().__init__(config.hidden, inner, config.activation, config.gated, config.mlp_bias)
        self.up.product = columns
        if self.gate is not None:
            self.gate.product = columns
        self.down = WayRow(inner, config.hidden, config.mlp_bias, "inner", ways)

    def forward(self, h_TnD: Tensor, ctx: Context | None = None) -> Tensor:
        y_TnD: Tensor = self.down(self.inner(h_TnD).unflatten(-1, (h_TnD.shape[1], -1)))
        return y_TnD


# -- products way by way --------------------------------------------------------------------------


def columns(one: Linear, x_TnI: Tensor, bias: Tensor | None) -> Tensor:
    """y_TO of a weight whose output features are the ways', one after another: way i's of x_i."""
    return _product(x_TnI, one, bias, _columns)


def rows(one: Linear, x_TnI: Tensor, bias: Tensor | None) -> Tensor:
    """y_TnO of a weight whose input features are the ways': way i's of x_i."""
    y_TnO = _product(x_TnI, one, None, _rows)
    return y_TnO if bias is None else y_TnO + bias.unflatten(0, (y_TnO.shape[1], -1))


Cutting = Callable[[Tensor, int], tuple[Tensor, ...]]


def _columns(weight_OI: Tensor, n: int) -> tuple[Tensor, ...]:
    return weight_OI.chunk(n, dim=0)


def _rows(weight_OI: Tensor, n: int) -> tuple[Tensor, ...]:
    return weight_OI.chunk(n, dim=1)


def _product(x_TnI: Tensor, one: Linear, bias_O: Tensor | None, cut: Cutting) -> Tensor:
    if not torch.is_grad_enabled():
        return _forward(x_TnI, one.weight, bias_O, cut)
    if one.sink is not None and not x_TnI.requires_grad:  # the Function must be entered
        x_TnI = x_TnI.detach().requires_grad_()
    y: Tensor = _Ways.apply(x_TnI, one.weight, bias_O, one.sink, cut)  # type: ignore[no-untyped-call]
    return y


def _forward(x_TnI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, cut: Cutting) -> Tensor:
    weights = cut(weight_OI, x_TnI.shape[1])
    pieces = [
        product.linear(x.contiguous(), w.contiguous(), None)  # strided ones take ten times as long
        for x, w in zip(x_TnI.unbind(1), weights, strict=True)
    ]
    if cut is _rows:
        return torch.stack(pieces, dim=1)
    y_TO = torch.cat(pieces, dim=-1)
    return y_TO if bias_O is None else y_TO.add_(bias_O)


class _Ways(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sink: GradSink | None,
        cut: Cutting,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.sink, ctx.cut = weight, bias, sink, cut
        return _forward(x, weight, bias, cut)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight, bias, sink, cut = ctx.saved_tensors, ctx.weight, ctx.bias, ctx.sink, ctx.cut
        n = x.shape[1]
        gys = gy.unbind(1) if cut is _rows else gy.chunk(n, dim=-1)
        parts = cut(weight, n)
        gx = None
        if ctx.needs_input_grad[0]:
            found = [
                product.product(g.contiguous(), w.contiguous())
                for g, w in zip(gys, parts, strict=True)
            ]
            gx = torch.stack(found, dim=1)

        def add(grad: Tensor) -> None:
            for piece, g, x_TI in zip(cut(grad, n), gys, x.unbind(1), strict=True):
                piece.add_(g.t() @ x_TI)

        gw = gb = None
        if weight.requires_grad and sink is not None:
            sink(weight, add)
        elif weight.requires_grad:
            gw = torch.zeros_like(weight)
            add(gw)
        if bias is not None and bias.requires_grad and sink is not None:
            sink(bias, lambda grad: grad.add_(gy.sum(0)))
        elif bias is not None and bias.requires_grad:
            gb = gy.sum(0)
        return gx, gw, gb, None, None


@dataclass(frozen=True)
class Kraken:
    """On a tensor axis a worker has whole ways, whose streams nobody else has; the one sum of a
    layer is a sum in both directions, that of the conjunction as any row weight's.
    """

    ways: int
    key = NAME

    def block(self, config: DecoderConfig, layer: int) -> KrakenBlock:
        return KrakenBlock(config, layer, self.ways)

    def join(self, config: DecoderConfig) -> KrakenJoin:
        return KrakenJoin(config, self.ways)

    def width(self, layer: int, size: int) -> float:
        return 1.0 if layer < 0 else self.ways / size

    def units(self) -> dict[Unit, int]:
        return {UNIT: self.ways}

    def check(self, size: int, sequence_parallel: bool) -> None:
        if sequence_parallel:
            raise OutsizeError(
                f"plan: sequence_parallel is set, but a model with {NAME} {self.ways} has other"
                " streams on every worker; set it to false"
            )

    def inside(self) -> tuple[str, ...]:
        return ("epilogue.join.conjunction.bias",)

    def boundaries(self, sequence_parallel: bool) -> tuple[Boundary, ...]:
        return (
            Boundary("prologue.tokens", "output", SUMMAND, WHOLE),
            Boundary("blocks.0", "input", WHOLE, FANNED),
            Boundary("epilogue", "output", WHOLE, FANNED),
            Boundary("epilogue.head", "output", BY_FEATURES, WHOLE),
        )

    def rewire(
        self, model: Decoder, axis: Collective, sequence_parallel: bool, beside: Beside | None
    ) -> Rewired:
        for block in model.blocks:
            assert isinstance(block, KrakenBlock)
            block.ways = self.ways // axis.size
            block.first = axis.rank * block.ways
        launching(model, flying(axis, beside, ("all_reduce", "all_reduce")))
        join = model.epilogue.join
        assert isinstance(join, KrakenJoin)
        first_counts(join, axis)
        join.launch = flying(axis, beside, ("all_reduce", "none"))
        return Rewired()


def krakened(config: DecoderConfig, ways: int) -> DecoderConfig:
    """The config of the same model in so many ways. OutsizeError where heads or features do not
    divide, or for what has no ways: latent attention, experts, norms over all heads at once."""
    sequential(config, NAME)
    lacking = (
        *((layer.kind != "attention", layer.kind) for layer in config.layers),
        (any(layer.experts for layer in config.layers), "experts"),
        (config.qk_norm == "whole", "norms over all heads at once"),
    )
    for there, what in lacking:
        if there:
            raise OutsizeError(f"config.json: {NAME} is {ways}, but the model has {what}")
    counts = {"heads": config.heads, "key-value heads": config.kv_heads}
    counts["inner features"] = config.mlp_hidden
    for what, number in counts.items():
        if ways < 1 or number % ways:
            raise OutsizeError(
                f"config.json: {NAME} is {ways}; expected a divisor of the {number} {what}"
            )
    wiring = Kraken(ways) if ways > 1 else None
    return replace(config, wiring=wiring, source={**config.source, NAME: ways})


def converted(model: Decoder, config: DecoderConfig) -> Decoder:
    """A plain model in the ways of `config`, which are the model's `krakened`. What does not change
    is shared with it."""
    assert isinstance(config.wiring, Kraken)
    ways, size = config.wiring.ways, config.hidden
    with torch.device("meta"):
        made = Decoder(config)
    owners = dict(model.named_parameters(remove_duplicate=False))
    like = model.prologue.tokens.weight.detach()
    for prefix, module in made.named_modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            found = owners.get(f"{prefix}.{leaf}")
            if found is None:
                eye_DD = torch.eye(size, dtype=like.dtype, device=like.device)
                value = eye_DD.repeat(1, ways) / ways if leaf == "weight" else like.new_zeros(size)
            elif isinstance(module, WayRow) and leaf == "weight":
                value = found.detach() * ways
            elif found.shape != parameter.shape:
                value = found.detach().repeat(ways)
            else:
                module.register_parameter(leaf, found)
                continue
            module.register_parameter(leaf, nn.Parameter(value))
    made.origin, made.words = model.origin, model.words
    return made


def _drawn(draw: Random, made: dict[str, Any]) -> dict[str, Any]:
    counts = (made.get("num_attention_heads", 1), made.get("num_key_value_heads", 1))
    ways = [n for n in (2, 3, 4) if not any(count % n for count in counts)]
    if not ways:
        return made
    way = draw.choice(ways)
    return {**made, NAME: way, "intermediate_size": way * draw.randrange(4, 13)}


WIRES.add(NAME, Wire(lambda c, said: krakened(c, integer(said, NAME)), _drawn, 0.2, converted))
