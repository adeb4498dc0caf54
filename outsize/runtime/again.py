"""Parts that are computed again in the backward pass: recompute of chosen parts, and tiles.

A part keeps its input alone. In the backward pass it is run again, a tile of tokens at a time if
it is token-wise, and each tile is differentiated before the next one begins: activations of one
tile exist at once. (Tiled feed-forward: Bekman et al., "Arctic Long Sequence Training", 2025.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from outsize import accelerator
from outsize.models.seams import Context
from outsize.runtime.casts import Casts
from outsize.runtime.trees import Tree, flatten, unflatten
from outsize.torch_private import (
    buffers_here,
    rehearsing,
)

Leaves = list[Tensor]


class Call:
    """A module's call with its tensors taken out: run(tensors) -> output tensors, under autocast as
    it is where this is made."""

    def __init__(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.forward, self.casts = forward, Casts()
        leaves, self.spec = flatten((args, kwargs), frozen=True)
        self.tensors: Leaves = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.out_spec: Tree | None = None
        self.out_rest: list[Any] = []

    def run(self, tensors: Leaves) -> Leaves:
        """Call with these tensors in the places of the first ones."""
        leaves = list(self.rest)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = unflatten(leaves, self.spec)
        with self.casts.within():
            outs, self.out_spec = flatten(self.forward(*args, **kwargs))
        self.out_rest = [None if isinstance(out, Tensor) else out for out in outs]
        self._out_tensor = [isinstance(out, Tensor) for out in outs]
        return [out for out in outs if isinstance(out, Tensor)]

    def result(self, tensors: Leaves) -> Any:
        """The call's result with these tensors as its outputs."""
        assert self.out_spec is not None
        given = iter(tensors)
        leaves = [
            next(given) if is_tensor else rest
            for rest, is_tensor in zip(self.out_rest, self._out_tensor, strict=True)
        ]
        return unflatten(leaves, self.out_spec)


class Replay:
    """Makes a second forward the twin of the first: same random numbers, same buffers, which are
    changed once, same attributes, as a count of calls is one. It is made before the first one, and
    told that this has `ended`.

    Batch normalisation updates its running statistics in every forward; the second must not. Others
    read what they change, as spectral_norm and codebooks do; the second must read what the first
    did.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.devices = accelerator.drawing(module.parameters())
        self.states = self._read()
        self._began = {
            (m, name): b.detach().clone()
            for m in module.modules()
            for name, b in buffers_here(m).items()
            if b is not None
        }
        self._attributes = [(vars(m), dict(vars(m))) for m in module.modules()]

    def ended(self) -> None:
        """Let go of copies of buffers, and of attributes, that the first forward left as they were.
        Where values cannot be compared all copies stay: a forecast has none, and an accelerator
        would be waited for."""
        self._attributes = [pair for pair in self._attributes if not _same(*pair)]
        if rehearsing():
            return
        for (module, name), copy in list(self._began.items()):
            buffer = buffers_here(module)[name]
            if buffer is not None and _equal(buffer, copy):
                del self._began[module, name]

    def _read(self) -> list[Tensor]:
        return [torch.get_rng_state(), *map(accelerator.random_state, self.devices)]

    def _write(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for device, state in zip(self.devices, states[1:], strict=True):
            accelerator.set_random_state(state, device)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        # Copies stand in for the buffers, since autograd may have saved the buffers themselves.
        homes = [(m, name, b) for m in self.module.modules() for name, b in buffers_here(m).items()]
        now = self._read()
        self._write(self.states)
        for module, name, buffer in homes:
            copy = self._began.pop((module, name), buffer)
            buffers_here(module)[name] = None if copy is None else copy.clone()
        after = [(own, dict(own)) for own, _ in self._attributes]
        _put(self._attributes)
        try:
            yield
        finally:
            self._write(now)
            _put(after)
            for module, name, buffer in homes:
                buffers_here(module)[name] = buffer


def _same(own: dict[str, Any], began: dict[str, Any]) -> bool:
    """Whether a module has the very attributes that it had."""
    return len(own) == len(began) and all(map(is_, own.values(), began.values()))


def _put(attributes: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for own, values in attributes:
        own.clear()
        own.update(values)


def _equal(one: Tensor, other: Tensor) -> bool:
    here = not accelerator.apart(one.device) and one.device == other.device
    return here and one.shape == other.shape and torch.equal(one, other)


def leaf(tensor: Tensor) -> Tensor:
    """A fresh leaf over the same memory, differentiable where that has a meaning."""
    cut = tensor.detach()
    return cut.requires_grad_() if cut.is_floating_point() else cut


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, replay: Replay | None, anchor: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call, ctx.replay = call, replay
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        outs = tuple(call.run(list(tensors)))
        if replay is not None:
            replay.ended()
        ctx.mark_non_differentiable(*(out for out in outs if not out.is_floating_point()))
        return outs

    @staticmethod
    def backward(ctx: Any, *gouts: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = [leaf(tensor) for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            if ctx.replay is None:
                outs = ctx.call.run(inputs)
            else:
                with ctx.replay():
                    outs = ctx.call.run(inputs)
        backward(outs, list(gouts))
        return (None, None, None, *(i.grad for i in inputs))


def backward(outs: Leaves, gouts: list[Tensor | None]) -> None:
    """Differentiate the outputs that have a gradient, into the leaves below them."""
    pairs = [
        (out, g) for out, g in zip(outs, gouts, strict=True) if g is not None and out.requires_grad
    ]
    if pairs:
        torch.autograd.backward([out for out, _ in pairs], [g for _, g in pairs])


def recomputed(module: nn.Module, replay: bool) -> Callable[..., Any]:
    """A forward for `module` that keeps only its inputs. replay: guard random numbers, buffers."""
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        call = Call(plain, args, kwargs)
        anchor = torch.empty(0, requires_grad=True)
        outs = _Again.apply(call, Replay(module) if replay else None, anchor, *call.tensors)  # type: ignore[no-untyped-call]
        return call.result(list(outs))

    return forward


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Tensor], Tensor], tiles: Sequence[slice], x_TD: Tensor
    ) -> Tensor:
        ctx.run, ctx.tiles = run, tiles
        ctx.save_for_backward(x_TD)
        return _tiles(run, tiles, x_TD)

    @staticmethod
    def backward(ctx: Any, gy_TD: Tensor) -> tuple[None, None, Tensor]:
        (x_TD,) = ctx.saved_tensors
        gx_TD = torch.empty_like(x_TD)
        for here in ctx.tiles:
            x_tile = leaf(x_TD[here])
            with torch.enable_grad():
                y_tile = ctx.run(x_tile)
            torch.autograd.backward(y_tile, gy_TD[here])
            assert x_tile.grad is not None
            gx_TD[here], x_tile.grad = x_tile.grad, None
        return None, None, gx_TD


def _tiles(run: Callable[[Tensor], Tensor], tiles: Sequence[slice], x_TD: Tensor) -> Tensor:
    first = run(x_TD[tiles[0]])
    y_TD = first.new_empty((x_TD.shape[0], *first.shape[1:]))
    y_TD[tiles[0]] = first
    for here in tiles[1:]:
        y_TD[here] = run(x_TD[here])
    return y_TD


def tiled(module: nn.Module, tile: int) -> Callable[..., Tensor]:
    """A forward for a token-wise `module(x_TD, ...)`; `tile` tokens' activations exist at once. A
    Context may ask for more tiles than there are tokens for: the last ones are empty."""
    plain = module.forward

    def forward(x_TD: Tensor, *rest: Any) -> Tensor:
        asked = (one.most for one in rest if isinstance(one, Context))
        tiles = [slice(at, at + tile) for at in range(0, max(x_TD.shape[0], *asked, 0), tile)]
        if len(tiles) <= 1:
            return plain(x_TD, *rest)  # type: ignore[no-any-return]

        def run(x: Tensor) -> Tensor:
            return plain(x, *rest)  # type: ignore[no-any-return]

        if not torch.is_grad_enabled():
            return _tiles(run, tiles, x_TD)
        y: Tensor = _Tiled.apply(run, tiles, x_TD if x_TD.requires_grad else leaf(x_TD))  # type: ignore[no-untyped-call]
        return y

    return forward
