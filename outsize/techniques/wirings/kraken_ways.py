"""Kraken: every layer is several sub-layers beside one another, their outputs summed once.

Each of the n ways has some of the heads and of the feed-forward network's features, and runs
attention and network without a word to the others; the sum of what all of them gave runs beside the
next layer's attention, which sees its own way's part alone (Prabhakar et al., "Kraken: Inherently
Parallel Transformers For Efficient Multi-Device Inference", 2024). For way i of a layer,

    a_i = attention_i(norm(x + c_i))        c: what the ways gave in the layer before
    x <- x + sum_j c_j                      the layer's one sum over the workers
    c_i <- a_i + mlp_i(norm(x + a_i))

With one way this is the plain model. The paper trains from scratch and says of no conversion; here
the weights are those of a plain model, heads and features cut into ways, so that any plain
checkpoint can be what training starts from. Norms are shared by the ways (the paper's have their
own), and how the residual is added is ours.

T tokens, D hidden, n ways, I in, O out; W value size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from outsize.collectives import Collective
from outsize.errors import OutsizeError
from outsize.kernels import product
from outsize.kernels.linear import GradSink
from outsize.models.attention import Attention
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.models.families.reading import integer
from outsize.models.linear import Linear
from outsize.models.mlp import MLP
from outsize.models.norm import Norm
from outsize.models.seams import Context, Mixer
from outsize.models.wiring import WIRES, Launch, Launching, Wire, at_once, sequential
from outsize.parallel.tensor.beside import Beside
from outsize.parallel.tensor.declared import BY_FEATURES, FANNED, SUMMAND, WHOLE, Boundary
from outsize.parallel.tensor.rewired import Rewired, first_counts, flying, launching

NAME = "kraken_ways"


class KrakenBlock(Launching):
    """(T, D) in the first one, (T, (1 + n) D) in the others -> (T, (1 + n) D): x, c_0, c_1, ...

    ways, first: how many are on this worker, and the first one's number.
    """

    def __init__(self, config: DecoderConfig, layer: int, ways: int) -> None:
        super().__init__()
        self.layer, self.hidden = layer, config.hidden
        self.ways, self.first = ways, 0
        self.attention_norm = Norm(config.hidden, config.norm)
        self.attention = KrakenAttention(config, layer)
        self.mlp_norm = Norm(config.hidden, config.norm)
        self.mlp = KrakenMLP(config)
        self.launch: Launch = at_once

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        stream_TD, given_TnD = self._parts(x)
        landing = None if given_TnD is None else self.launch(given_TnD.sum(1))
        h_TnD = self.attention_norm(self._views(stream_TD, given_TnD))
        attended_TnD = self._drop(self.attention(h_TnD, ctx), ctx, "attention")
        if landing is not None:
            stream_TD = stream_TD + landing()
        fed_TnD = self.mlp(self.mlp_norm(stream_TD.unsqueeze(1) + attended_TnD), ctx)
        given_TnD = attended_TnD + self._drop(fed_TnD, ctx, "mlp")
        return torch.cat((stream_TD, given_TnD.flatten(1)), dim=-1)

    @property
    def mixer(self) -> Mixer:
        """What of the block lets tokens have an effect on others."""
        return self.attention

    def leave(self, x: Tensor, ctx: Context) -> None:
        """Keep what the block's input leaves for later tokens, and compute nothing else."""
        self.attention.leave(self.attention_norm(self._views(*self._parts(x))), ctx)

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return parts(x, self.hidden)

    def _views(self, stream_TD: Tensor, given_TnD: Tensor | None) -> Tensor:
        """The stream as each way sees it."""
        if given_TnD is None:
            return stream_TD.unsqueeze(1).expand(-1, self.ways, -1)
        return stream_TD.unsqueeze(1) + given_TnD

    def _drop(self, x_TnD: Tensor, ctx: Context, branch: str) -> Tensor:
        if ctx.noise is None:
            return x_TnD
        names = (f"{self.layer}.{branch}.{self.first + i}" for i in range(self.ways))
        return torch.stack([ctx.drop(x_TnD[:, i], n) for i, n in enumerate(names)], dim=1)


class KrakenJoin:
    """(T, (1 + n) D) -> (T, D): the stream with all that was added to it."""

    def __init__(self, config: DecoderConfig) -> None:
        self.hidden = config.hidden
        self.launch: Launch = at_once

    def __call__(self, x: Tensor, ctx: Context | None) -> Tensor:
        stream_TD, given_TnD = parts(x, self.hidden)
        assert given_TnD is not None, "what the last layer gave"
        return stream_TD + self.launch(given_TnD.sum(1))()


def parts(x: Tensor, hidden: int) -> tuple[Tensor, Tensor | None]:
    """x_TD, c_TnD."""
    if x.shape[1] == hidden:
        return x, None
    return x[:, :hidden], x[:, hidden:].unflatten(-1, (-1, hidden))


class KrakenAttention(Attention):
    """h_TnD -> y_TnD: each way with its heads. The bias of the output is the first way's."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        for one in (self.q, self.k, self.v):
            one.product = columns
        self.o.product = rows

    def forward(self, h_TnD: Tensor, ctx: Context) -> Tensor:
        y_TnD: Tensor = self.o(self.attended(h_TnD, ctx).unflatten(-1, (h_TnD.shape[1], -1)))
        return y_TnD


class KrakenMLP(MLP):
    """h_TnD -> y_TnD: each way with its inner features."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(
            config.hidden, config.mlp_hidden, config.activation, config.gated, config.mlp_bias
        )
        self.up.product, self.down.product = columns, rows
        if self.gate is not None:
            self.gate.product = columns

    def forward(self, h_TnD: Tensor, ctx: Context | None = None) -> Tensor:
        y_TnD: Tensor = self.down(self.inner(h_TnD).unflatten(-1, (h_TnD.shape[1], -1)))
        return y_TnD


# -- products way by way --------------------------------------------------------------------------


def columns(one: Linear, x_TnI: Tensor, bias: Tensor | None) -> Tensor:
    """y_TO of a weight whose output features are the ways', one after another: way i's of x_i."""
    return _product(x_TnI, one, bias, _columns)


def rows(one: Linear, x_TnI: Tensor, bias: Tensor | None) -> Tensor:
    """y_TnO of a weight whose input features are the ways': way i's of x_i; a bias is the first
    one's."""
    y_TnO = _product(x_TnI, one, None, _rows)
    if bias is None:
        return y_TnO
    return y_TnO + torch.cat((bias[None], torch.zeros_like(y_TnO[0, 1:])))


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
    """On a tensor axis the stream has whole values and partial gradients from the embedding to the
    head, for each way sees it in its own way; the one sum of a layer is a sum in both directions.
    """

    ways: int
    key = NAME

    def block(self, config: DecoderConfig, layer: int) -> KrakenBlock:
        return KrakenBlock(config, layer, self.ways)

    def join(self, config: DecoderConfig) -> KrakenJoin:
        return KrakenJoin(config)

    def width(self, layer: int, size: int) -> float:
        return 1.0 if layer < 0 else 1 + self.ways / size

    def check(self, size: int, sequence_parallel: bool) -> None:
        if self.ways % size:
            fits = max(n for n in range(1, size + 1) if self.ways % n == 0)
            raise OutsizeError(
                f"mesh: tensor is {size}, which does not divide the model's {NAME}, {self.ways};"
                f" the nearest that works is tensor={fits}"
            )
        if sequence_parallel:
            raise OutsizeError(
                f"plan: sequence_parallel is set, but a model with {NAME} {self.ways} sees its"
                " stream differently on every worker; set it to false"
            )

    def inside(self) -> tuple[str, ...]:
        norms = ("blocks.*_norm.*", "epilogue.norm.*", "epilogue.project.*")
        return (*norms, "blocks.*.attention.o.bias", "blocks.*.mlp.down.bias")

    def boundaries(self, sequence_parallel: bool) -> tuple[Boundary, ...]:
        return (
            Boundary("prologue.tokens", "output", SUMMAND, WHOLE),
            Boundary("blocks.0", "input", WHOLE, FANNED),
            Boundary("epilogue.head", "output", BY_FEATURES, WHOLE),
        )

    def rewire(
        self, model: Decoder, axis: Collective, sequence_parallel: bool, beside: Beside | None
    ) -> Rewired:
        for module in model.modules():
            if isinstance(module, KrakenBlock):
                module.ways = self.ways // axis.size
                module.first = axis.rank * module.ways
            elif isinstance(module, KrakenAttention | KrakenMLP):
                first_counts(module, axis)
        launching(model, flying(axis, beside, ("all_reduce", "all_reduce")))
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


def _drawn(draw: Random, made: dict[str, Any]) -> dict[str, Any]:
    counts = (made.get("num_attention_heads", 1), made.get("num_key_value_heads", 1))
    ways = [n for n in (2, 3, 4) if not any(count % n for count in counts)]
    if not ways:
        return made
    way = draw.choice(ways)
    return {**made, NAME: way, "intermediate_size": way * draw.randrange(4, 13)}


WIRES.add(NAME, Wire(lambda c, said: krakened(c, integer(said, NAME)), _drawn, 0.2))
