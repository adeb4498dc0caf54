"""Blocks of one kind as one native call a step, derived from the modules themselves.

What their passes are to be told is read off the modules once: which norm, which product, which
pages. The bits are those of the modules, since the passes are. A block that says or does anything
else is called as it is.

T tokens, D hidden, G, K, W as in outsize/decode/paged.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from outsize import accelerator
from outsize.decode.paged import PagedCache, PagedPast
from outsize.kernels import blocks, native, rows
from outsize.kernels.attention import WIDTH
from outsize.kernels.gate import SILU
from outsize.kernels.pages import EVERY
from outsize.kernels.rows import Matrix, matrix
from outsize.models import norm as norms
from outsize.models.attention import Attention
from outsize.models.decoder import Block, Decoder
from outsize.models.linear import Linear, by_codes, dense
from outsize.models.mlp import MLP, gated
from outsize.models.rope import rotate
from outsize.models.wiring import as_it_is
from outsize.torch_private import FakeTensor

if TYPE_CHECKING:
    from outsize.decode.graphs import Graphs
    from outsize.models.seams import Context

Through = Callable[[Tensor], Tensor]  # x_TD through some blocks
Run = Callable[[Sequence[nn.Module], "Context"], list[Through]]  # how some blocks are taken


class Runs:
    """The runs of blocks whose weights stay where they are, in steps over pages. dtype: of what
    goes through; prompts: whether steps with long slices of these go so too; why: what keeps a
    block from being in one, by its place."""

    def __init__(
        self, modules: Iterable[nn.Module], dtype: torch.dtype, prompts: bool = True
    ) -> None:
        self._dtype, self._held, self._prompts = dtype, list[object](), prompts
        self.why = dict[int, str]()
        self._layers = dict[nn.Module, blocks.Layer]()
        self._names = dict[str, int]()  # of ropes
        for place, module in enumerate(modules):
            try:
                self._layers[module] = self._layer(module)
            except _Other as other:
                self.why[place] = str(other)
        self._made = dict[tuple[nn.Module, ...], _Run]()

    def __call__(self, modules: Sequence[nn.Module], ctx: Context) -> list[Through]:
        """What takes x_TD through some blocks, one after another: runs overwrite it."""
        past = ctx.attend
        if not (isinstance(past, PagedPast) and rows.here()):
            return each_alone(modules, ctx)
        if isinstance(ctx.positions_T, FakeTensor) or (past.tiled and not self._prompts):
            return each_alone(modules, ctx)
        found, ropes = list[Through](), [ctx.rope[name] for name in self._names]
        for own, some in itertools.groupby(modules, lambda one: one in self._layers):
            if own:
                run = self._run(tuple(some))
                found.append(partial(run.through, past=past, ropes=ropes))
            else:
                found += each_alone(list(some), ctx)
        return found

    def _run(self, modules: tuple[nn.Module, ...]) -> _Run:
        if modules not in self._made:
            self._made[modules] = _Run([self._layers[one] for one in modules], modules)
        return self._made[modules]

    def _layer(self, block: nn.Module) -> blocks.Layer:
        _expect(type(block) is Block, "its blocks are wired otherwise")
        assert isinstance(block, Block)
        plain = not (block.parallel or block.after_sum) and block.entering is as_it_is
        _expect(plain and block.bare, "its branches are not one after another")
        attention, mlp = block.attention, block.mlp
        _expect(type(attention) is Attention and attention.virtual is None, "its attention")
        assert isinstance(attention, Attention)
        _expect(attention.rotate is rotate and not attention.whole_norm, "its attention")
        same = type(mlp) is MLP and mlp.mixture is None and mlp.gating is gated
        _expect(
            same and mlp.activation == SILU and mlp.gate is not None, "its feed-forward network"
        )
        spec, found = attention.spec, blocks.Layer()
        for name, one in (
            ("attention", block.attention_norm), ("attention_out", block.attention_out_norm),
            ("mlp", block.mlp_norm), ("mlp_out", block.mlp_out_norm),
        ):  # fmt: skip
            setattr(found, f"{name}_norm", self._norm(one, attention.q.sizes[1]))
        found.query_norm = self._norm(attention.q_norm, attention.head_size)
        found.key_norm = self._norm(attention.k_norm, attention.head_size)
        for name in blocks.PRODUCTS:
            one = getattr(attention if hasattr(attention, name) else mlp, name)
            setattr(found, name, self._product(one))
        found.head, found.value = attention.head_size, attention.value_size
        _expect(max(found.head, found.value) <= WIDTH, "the size of its heads")
        found.heads = found.q.outputs // found.head
        found.groups = found.k.outputs // found.head
        found.window, found.scale = spec.window or EVERY, spec.scale
        found.softcap, found.rope = spec.softcap or 0.0, -1
        if attention.rope is not None and attention.rope_name is not None:
            found.rope = self._names.setdefault(attention.rope_name, len(self._names))
            found.interleaved = attention.rope.interleaved
        return found

    def _norm(self, one: nn.Module | None, size: int) -> blocks.NormOf:
        if one is None or type(one) is nn.Identity:
            return blocks.NormOf()
        same = type(one) is norms.Norm and one.run is norms.normed and one.facts.kind == "rms"
        _expect(same, "its norms")
        assert isinstance(one, norms.Norm) and one.weight is not None
        _expect(one.weight.shape == (size,), "its norms")
        weight = self._here(one.weight)
        facts, code = one.facts, native.CODES[weight.dtype]
        return blocks.NormOf(weight.data_ptr(), facts.eps, 1.0 - facts.unit, code)

    def _product(self, one: Linear) -> Matrix:
        _expect(one.beside is None and one.adds_bias, "its adapter")
        bias = None if one.bias is None else self._here(one.bias)
        own = (x.dtype for x in (one.bias, one.weight_here) if x is not None)
        _expect(all(dtype is self._dtype for dtype in own), "the dtype of its weights")
        if one.product is dense:
            return matrix(self._here(one.weight), *one.sizes, bias)
        _expect(one.product is by_codes, "its products")
        laid = one.laid()
        _expect(laid is not None and laid.ready, "its format of weights")
        assert laid is not None and one.coded is not None
        self._held.append(laid)
        return laid.matrix(one.sizes[1], bias, one.coded.eights)

    def _here(self, weight: Tensor) -> Tensor:
        """One that lies as the passes read it."""
        fits = weight.is_cpu and weight.is_contiguous() and weight.dtype in native.CODES
        _expect(fits, "where its weights lie")
        self._held.append(weight.detach())  # what it lies in, whatever becomes of the parameter
        return weight


class _Run:
    """Blocks one after another, over the pages of the cache that they met last."""

    def __init__(self, layers: Sequence[blocks.Layer], modules: Sequence[nn.Module]) -> None:
        self._layers, self._modules = (blocks.Layer * len(layers))(*layers), modules
        self._cache: PagedCache | None = None

    def through(
        self, x_TD: Tensor, past: PagedPast, ropes: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        if past.cache is not self._cache:
            self._hold(past.cache, x_TD)
        return blocks.run(self._layers, x_TD, past.where, past.cache.size, past.seen, ropes)

    def _hold(self, cache: PagedCache, x_TD: Tensor) -> None:
        for layer, module in zip(self._layers, self._modules, strict=True):
            assert isinstance(module, Block) and isinstance(module.attention, Attention)
            k_TGK, v_TGW = (
                x_TD.new_empty(0, layer.groups, size) for size in (layer.head, layer.value)
            )
            layer.hold(*cache.layer(module.attention.spec.layer, k_TGK, v_TGW))
        self._cache = cache


class _Other(Exception):
    """What a run cannot do."""


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise _Other(what)


def each_alone(modules: Sequence[nn.Module], ctx: Context) -> list[Through]:
    return [partial(_block, one, ctx) for one in modules]


def _block(module: nn.Module, ctx: Context, x_TD: Tensor) -> Tensor:
    y_TD: Tensor = module(x_TD, ctx)
    return y_TD


def runs_of(model: Decoder, prompts: bool = True) -> Runs | Graphs | None:
    """Of a model whose weights stay where they are; None where no blocks can be in a run. prompts:
    as of Runs; a run of them works in fewer bytes than modules, which are what is foretold."""
    found = _found(model, prompts)
    return None if found is None or len(found.why) == len(model.blocks) else found


def singly(model: Decoder) -> str | None:
    """Which blocks of such a model are not in runs, and why, in words."""
    found, count = _found(model), len(model.blocks)
    if found is None:
        like = model.prologue.tokens.weight
        why = f"{like.dtype} on {like.device.type} without this machine's own kernels"
        return f"blocks are called operator by operator: {why}"
    if not found.why:
        return None
    some = "blocks" if len(found.why) == count else f"{len(found.why)} of {count} blocks"
    why = ", ".join(sorted(set(found.why.values())))
    return f"{some} are called operator by operator, for {why}"


def _found(model: Decoder, prompts: bool = True) -> Runs | Graphs | None:
    """None where there are no passes for any."""
    like = model.prologue.tokens.weight
    if accelerator.records(like.device):
        from outsize.decode.graphs import Graphs  # of devices

        return Graphs(model)
    return Runs(model.blocks, like.dtype, prompts) if native.reads(like) else None
