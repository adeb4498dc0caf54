"""Blocks of a step recorded once on a device and played from then on.

A step of few tokens is over sooner than a host can hand out its operators one by one. What blocks
do in such a step depends on numbers that lie on the device: hidden states, rotations, places of new
tokens in the pages, the pages that each token sees. So the work of a run of blocks is recorded for
so many tokens and pages (graphs of a device, as vLLM and others decode), and played with other
numbers in the same places. Operators are those of the modules.

T tokens, a power of two: those behind the step's own repeat its first, and write what that writes.
D hidden, P pages of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from outsize import accelerator
from outsize.decode.paged import PagedCache, PagedPast
from outsize.decode.runs import Through, each_alone
from outsize.kernels import paged
from outsize.models.attention import Attention, LatentAttention
from outsize.models.decoder import Block, Decoder
from outsize.models.mlp import MLP
from outsize.models.seams import AttendSpec
from outsize.models.wiring import as_it_is
from outsize.torch_private import FakeTensor

if TYPE_CHECKING:
    from outsize.models.seams import Context

MOST = 64  # tokens of a step that is played
_PLENTY = 4  # pieces of a cache at least: shorter ones are not worth a recording of their own


class Recording(Protocol):
    """As outsize.accelerator.Recorded."""

    made: Tensor

    def play(self) -> None:
        """Once more."""


Record = Callable[[Callable[[], Tensor], torch.device], Recording]


class Graphs:
    """The runs of blocks of a model in memory, in steps whose tokens are attended each alone. why:
    what keeps a block from being in one, by its place."""

    def __init__(self, model: Decoder, record: Record = accelerator.Recorded) -> None:
        self._record = record
        self.why = {
            place: said
            for place, one in enumerate(model.blocks)
            if (said := _unfit(one)) is not None
        }
        self._fit = {one for place, one in enumerate(model.blocks) if place not in self.why}
        self._made = dict[object, _Graph | None]()
        self._cache: PagedCache | None = None

    def __call__(self, modules: Sequence[nn.Module], ctx: Context) -> list[Through]:
        """What takes x_TD through some blocks, one after another: a step of its kind is recorded
        when it comes a second time."""
        past, tokens = ctx.attend, len(ctx.positions_T)
        if (
            not isinstance(past, PagedPast)
            or tokens > MOST
            or isinstance(ctx.positions_T, FakeTensor)
            or not self._fit.issuperset(modules)
        ):
            return each_alone(modules, ctx)
        if past.cache is not self._cache:
            self._made, self._cache = {}, past.cache
        key = tuple(modules), _rounded(tokens), _rounded(paged.pieces(past.longest), _PLENTY)
        if key not in self._made:
            self._made[key] = None
            return each_alone(modules, ctx)
        graph = self._made[key]
        if graph is None:
            graph = self._made[key] = _Graph(*key, ctx, past, self._record)
        return [lambda x_TD: graph.through(x_TD, ctx, past)]


def _rounded(count: int, least: int = 1) -> int:
    return max(least, 1 << (count - 1).bit_length())


def _unfit(block: nn.Module) -> str | None:
    """What keeps a block from being recorded: only what is known to read nothing on the host is."""
    if not isinstance(block, Block) or block.entering is not as_it_is:
        return "its blocks are wired otherwise"
    attention, mlp = block.attention, block.mlp
    if type(attention) not in (Attention, LatentAttention):
        return "its attention"
    if type(mlp) is not MLP or mlp.mixture is not None:
        return "its feed-forward network"
    if not block.bare or getattr(attention, "virtual", None) is not None:
        return "its adapter"
    if any(getattr(one, "coded", None) is not None for one in block.modules()):
        return "its format of weights"
    return None


class _Graph:
    """Of some blocks, for so many tokens over so many pieces of a cache."""

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        tokens: int,
        pieces: int,
        ctx: Context,
        past: PagedPast,
        record: Record,
    ) -> None:
        self._modules, self._tokens, self._record = modules, tokens, record
        device, cache = ctx.positions_T.device, past.cache
        self._width = -(-pieces * paged.PIECE // cache.size)
        self._numbers_N = torch.zeros(tokens * (self._width + 2), dtype=torch.int32, device=device)
        self._where_T = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._rope = {
            name: (cos.new_empty(tokens, cos.shape[1]), sin.new_empty(tokens, sin.shape[1]))
            for name, (cos, sin) in ctx.rope.items()
        }
        seen = paged.sights(self._numbers_N[: tokens * (self._width + 1)], self._width)
        self._ctx = replace(
            ctx,
            positions_T=torch.zeros(tokens, dtype=torch.int64, device=device),
            bounds=tuple(range(tokens + 1)),
            rope=self._rope,
            attend=_Attend(cache, self._where_T, seen),
        )
        self._x_TD: Tensor | None = None
        self._played: Recording | None = None

    def through(self, x_TD: Tensor, ctx: Context, past: PagedPast) -> Tensor:
        self._put(x_TD, ctx, past)
        if self._played is None:
            self._run()  # what is set up at first is set up here
            self._played = self._record(self._run, x_TD.device)
        self._played.play()
        return self._played.made[: len(x_TD)].clone()  # the next playing writes there

    def _put(self, x_TD: Tensor, ctx: Context, past: PagedPast) -> None:
        """The numbers of a step in their places."""
        count, device = len(x_TD), x_TD.device
        if self._x_TD is None:
            self._x_TD = x_TD.new_empty((self._tokens, x_TD.shape[1]))
        tables, places = past.tables
        more = self._tokens - count
        flat = paged.flat([*tables, *tables[:1] * more], [*places, *places[:1] * more], self._width)
        where = past.places
        flat += [*where, *where[:1] * more]
        self._numbers_N.copy_(accelerator.sent(torch.tensor(flat, dtype=torch.int32), device))
        self._where_T.copy_(self._numbers_N[-self._tokens :])
        _fill(self._x_TD, x_TD)
        _fill(self._ctx.positions_T, ctx.positions_T)
        for name, pair in self._rope.items():
            for mine, theirs in zip(pair, ctx.rope[name], strict=True):
                _fill(mine, theirs)

    def _run(self) -> Tensor:
        assert self._x_TD is not None, "a step has come"
        x_TD = self._x_TD
        for module in self._modules:
            x_TD = module(x_TD, self._ctx)
        return x_TD


def _fill(mine_T: Tensor, theirs_T: Tensor) -> None:
    count = len(theirs_T)
    mine_T[:count].copy_(theirs_T)
    if count < len(mine_T):
        mine_T[count:].copy_(theirs_T[:1].expand(len(mine_T) - count, *theirs_T.shape[1:]))


class _Attend:
    """Attention over pages by tables that lie on the device."""

    def __init__(self, cache: PagedCache, where_T: Tensor, seen: paged.Sights) -> None:
        self._cache, self._where_T, self._seen = cache, where_T, seen

    def __call__(
        self,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGW: Tensor,
        bounds: tuple[int, ...],
        spec: AttendSpec,
    ) -> Tensor:
        assert spec.plain, "what is cached is attended to in order"
        keys, values = self._cache.put(self._where_T, k_TGK, v_TGW, spec)
        facts = spec.scale, spec.window, spec.softcap
        return paged.attend(q_THK.contiguous(), keys, values, self._seen, *facts)
