"""A chunk of a sequence: what it attends to, what it goes on from, and where gradients of keys and
values and of recurrent states wait for the chunks that left them.

T tokens of the sequences laid flat, C of a chunk, G key-value heads, K head size, W value size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from outsize.models.layout import clip, past
from outsize.models.seams import AttendSpec, Recurrence, StateSpec, Tensors


class Left:
    """What the tokens of a microbatch's whole sequences leave in a layer.

    Keys and values, and their gradients, in float32 at least, summed over chunks. Of a recurrent
    state what it is before each chunk that does not begin a document, and the gradient of the one
    that the chunk next in the backward pass leaves. every: states are kept until a backward pass;
    else each is gone when the next one comes. given: keys and values of all tokens, where chunks
    leave none: their gradients are then summed by others.
    """

    def __init__(
        self,
        bounds: tuple[int, ...],
        every: bool = False,
        given: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.bounds, self.every, self.given = bounds, every, given is not None
        self.states: dict[int, Tensors] = {}  # by the first token of the chunk that goes on there
        self.state_gradients: dict[int, list[Tensor | None]] = {}
        self._values = given
        self._gradients: tuple[Tensor, Tensor] | None = None

    def put(self, start: int, k_CGK: Tensor, v_CGW: Tensor) -> None:
        """Store those of the tokens from `start` on."""
        tokens = self.bounds[-1]
        if self._values is None:
            self._values = (
                k_CGK.new_empty((tokens, *k_CGK.shape[1:])),
                v_CGW.new_empty((tokens, *v_CGW.shape[1:])),
            )
        for held, new in zip(self._values, (k_CGK, v_CGW), strict=True):
            held[start : start + new.shape[0]] = new

    @property
    def values(self) -> tuple[Tensor, Tensor]:
        """k_TGK, v_TGW."""
        assert self._values is not None, "keys are stored before they are attended to"
        return self._values

    @property
    def gradients(self) -> tuple[Tensor, Tensor]:
        """Of k_TGK and v_TGW: zeros at first."""
        if self._gradients is None:
            k_TGK, v_TGW = self.values
            wide = torch.promote_types(k_TGK.dtype, torch.float32)
            self._gradients = (
                torch.zeros_like(k_TGK, dtype=wide),
                torch.zeros_like(v_TGW, dtype=wide),
            )
        return self._gradients


@dataclass(frozen=True)
class Part:
    """What one call attends: tokens start .. stop of `held`."""

    held: Left
    start: int
    stop: int
    spec: AttendSpec

    @property
    def past(self) -> int:
        """Tokens before the chunk that belong to the document it begins in."""
        return past(self.held.bounds, self.start)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Of the documents among what the chunk may see."""
        return clip(self.held.bounds, self.start - self.past, self.stop)

    def seen(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """From the start of the document that the chunk begins in to the chunk's end."""
        here = slice(self.start - self.past, self.stop)
        return x[0][here], x[1][here]

    def own_gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """Of the chunk's keys and values: complete once its own queries are differentiated."""
        if self.held.given:
            return None, None
        k_TGK, v_TGW = self.held.values
        gk_TGK, gv_TGW = self.held.gradients
        here = slice(self.start, self.stop)
        return gk_TGK[here].to(k_TGK.dtype), gv_TGW[here].to(v_TGW.dtype)


@runtime_checkable
class Shared(Protocol):
    """An Attend of tokens that workers of an axis share. spans: the stretches of all tokens that
    are here, in order."""

    @property
    def spans(self) -> tuple[tuple[int, int], ...]: ...

    def gathered(self, left: Left) -> Left:
        """What the tokens of all workers leave, of what those here do."""

    def summed(self, held: Left) -> tuple[Tensor, Tensor]:
        """Gradients of the keys and values of the tokens here, summed over the workers."""


class Caught:
    """A `Carry` that has what tokens leave as it came."""

    def __init__(self) -> None:
        self.left: Tensors = ()

    def keep(self, left: Tensors) -> None:
        """Keys and values."""
        self.left = left

    def run(
        self,
        layer: int,
        states: tuple[StateSpec, ...],
        recurrence: Recurrence,
        inputs: Tensors,
        bounds: tuple[int, ...],
    ) -> Tensor:
        raise AssertionError("recurrent states are not shared")


@dataclass(frozen=True)
class ChunkCarry:
    """The `Carry` of the tokens start .. stop. Without gradients it stores what these leave. With
    them, what was left before must be there, and what later chunks found of the gradient of the
    state that these leave is added to that of their outputs."""

    held: Left
    start: int
    stop: int

    def keep(self, left: Tensors) -> None:
        """Keys and values."""
        k_CGK, v_CGW = left
        self.held.put(self.start, k_CGK, v_CGW)

    def run(
        self,
        layer: int,
        states: tuple[StateSpec, ...],
        recurrence: Recurrence,
        inputs: Tensors,
        bounds: tuple[int, ...],
    ) -> Tensor:
        held = self.held
        if not torch.is_grad_enabled():
            before = held.states.get(self.start)
            y, behind = recurrence.whole(inputs, bounds, before)
            if not held.every:
                held.states.clear()
            if past(held.bounds, self.stop):
                held.states[self.stop] = behind
            return y
        before = held.states.pop(self.start, None)
        if before is not None:
            before = self._watched(before)
        y, behind = recurrence.whole(inputs, bounds, before)
        if self.stop in held.state_gradients:
            gradients = held.state_gradients.pop(self.stop)
            y = _Joined.apply(y, gradients, *behind)  # type: ignore[no-untyped-call]
        return y

    def _watched(self, before: Tensors) -> Tensors:
        """Leaves whose gradients are kept for the chunk that left them."""
        gradients: list[Tensor | None] = [None] * len(before)
        self.held.state_gradients[self.start] = gradients
        leaves = tuple(x.detach().requires_grad_() for x in before)
        for index, leaf in enumerate(leaves):
            leaf.register_hook(partial(gradients.__setitem__, index))
        return leaves


class _Joined(torch.autograd.Function):
    """y; going back, the gradients that are known of what was left beside it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, gradients: list[Tensor | None], *behind: Tensor) -> Tensor:
        ctx.gradients = gradients
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        return gy, None, *ctx.gradients
