"""What earlier tokens left, in pages: the Attend and Carry of serving.

The buffers of a layer are one pool, and a request has pages of it that lie anywhere. In float32 and
bfloat16 on a CPU each token is attended alone (outsize/kernels/pages.py), so that its bits depend
on the request alone; elsewhere pages are gathered first.

P pages of `size` tokens, N slots, T tokens of a step, H, G, K, W as in outsize/decode/cache.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from outsize import accelerator
from outsize.decode.cache import attend_tail
from outsize.kernels import pages as kernel
from outsize.models.seams import AttendSpec, Recurrence, StateSpec, Tensors


class Part(NamedTuple):
    """A request's tokens in a step. pages: with room for all of them; start: tokens before;
    tokens: of this step; ahead: that are known to follow in later ones; slot: of its states."""

    pages: Sequence[int]
    start: int
    tokens: int
    ahead: int
    slot: int

    @property
    def stop(self) -> int:
        return self.start + self.tokens


class PagedCache:
    """Pages for what each token leaves and slots for what each sequence does, allocated when a
    layer first uses them. form: of what pages hold."""

    def __init__(self, pages: int, size: int, slots: int, form: str = kernel.AS_STORED) -> None:
        self.pages, self.size, self.slots = pages, size, slots
        self._form = kernel.FORMS[form]
        self._layers: dict[int, tuple[kernel.Pool, kernel.Pool]] = {}
        self._states: dict[int, Tensors] = {}  # (N, ...) each

    @property
    def bytes(self) -> int:
        pools = sum(pool.bytes for some in self._layers.values() for pool in some)
        return pools + sum(x.nbytes for some in self._states.values() for x in some)

    def clear(self, slot: int) -> None:
        """A sequence begins there."""
        for states in self._states.values():
            for state in states:
                state[slot] = 0

    def layer(self, index: int, k_TGK: Tensor, v_TGW: Tensor) -> tuple[kernel.Pool, kernel.Pool]:
        if index not in self._layers:
            keys, values = (
                kernel.Pool(self._form, self.pages, self.size, x) for x in (k_TGK, v_TGW)
            )
            self._layers[index] = keys, values
        return self._layers[index]

    def states(self, layer: int, declared: tuple[StateSpec, ...], device: torch.device) -> Tensors:
        if layer not in self._states:
            self._states[layer] = tuple(
                torch.zeros((self.slots, *one.shape), dtype=one.dtype, device=device)
                for one in declared
            )
        return self._states[layer]


@dataclass(frozen=True)
class PagedPast:
    """A step of some requests, each of which comes once. For inference only."""

    cache: PagedCache
    parts: tuple[Part, ...]

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        return (0, *itertools.accumulate(part.tokens for part in self.parts))

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(part.stop + part.ahead for part in self.parts)

    def positions(self, device: torch.device | None = None) -> Tensor:
        """(T,) int64: the position of each new token in its sequence."""
        return accelerator.sent(torch.tensor(self._positions), device or torch.device("cpu"))

    @cached_property
    def _positions(self) -> list[int]:
        return [place for part in self.parts for place in range(part.start, part.stop)]

    @cached_property
    def _where(self) -> Tensor:
        """Of each new token, its place among those of all pages."""
        size = self.cache.size
        places = (
            part.pages[place // size] * size + place % size
            for part in self.parts
            for place in range(part.start, part.stop)
        )
        return torch.tensor(list(places))

    @cached_property
    def _seen(self) -> kernel.Seen:
        tables, begins = list[int](), list[int]()
        for part in self.parts:
            begins += [len(tables)] * part.tokens
            tables += part.pages
        return kernel.Seen(*map(kernel.numbers, (tables, begins, self._positions)))

    def __call__(
        self,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGW: Tensor,
        bounds: tuple[int, ...],
        spec: AttendSpec,
    ) -> Tensor:
        assert bounds == self.bounds, "a step's Attend serves the batch it was made for"
        assert spec.plain, "what is cached is attended to in order"
        keys, values = self.cache.layer(spec.layer, k_TGK, v_TGW)
        where = accelerator.sent(self._where, k_TGK.device)
        keys.put(where, k_TGK)
        values.put(where, v_TGW)
        q_THK = q_THK.contiguous()
        if kernel.fits(q_THK, keys, values):
            facts = (spec.scale, spec.window, spec.softcap)
            return kernel.attend(q_THK, keys, values, self._seen, *facts)
        return torch.cat(
            [
                attend_tail(q_THK[first:last], *self._gathered(part, keys, values), spec)
                for part, (first, last) in zip(self.parts, itertools.pairwise(bounds), strict=True)
            ]
        )

    def _gathered(
        self, part: Part, keys: kernel.Pool, values: kernel.Pool
    ) -> tuple[Tensor, Tensor]:
        """k_GLK, v_GLW of all tokens of a sequence."""
        index = accelerator.sent(torch.tensor(list(part.pages)), keys.data.device)
        k_LGK, v_LGW = (x.get(index).flatten(0, 1)[: part.stop] for x in (keys, values))
        return k_LGK.transpose(0, 1), v_LGW.transpose(0, 1)

    def cut(self, middle: int) -> tuple[PagedPast, PagedPast]:
        return self._stretch(0, middle), self._stretch(middle, self.bounds[-1])

    def _stretch(self, first: int, last: int) -> PagedPast:
        """A step of some of the tokens, when those before them have gone through a layer."""
        found = list[Part]()
        for part, (start, stop) in zip(self.parts, itertools.pairwise(self.bounds), strict=True):
            low, high = max(start, first), min(stop, last)
            if low < high:
                ahead = part.ahead + stop - high
                here = part._replace(start=part.start + low - start, tokens=high - low, ahead=ahead)
                found.append(here)
        return PagedPast(self.cache, tuple(found))

    def run(
        self,
        layer: int,
        states: tuple[StateSpec, ...],
        recurrence: Recurrence,
        inputs: Tensors,
        bounds: tuple[int, ...],
    ) -> Tensor:
        """One sequence after the other, and a token by itself as one of a prompt's last would be:
        alike in any company."""
        assert bounds == self.bounds, "a step's Carry serves the batch it was made for"
        held = self.cache.states(layer, states, inputs[0].device)
        outputs = []
        for part, (first, last) in zip(self.parts, itertools.pairwise(bounds), strict=True):
            own, slot = tuple(x[first:last] for x in inputs), part.slot
            if part.tokens == 1:
                y, behind = recurrence.step(own, tuple(x[slot : slot + 1] for x in held))
                behind = tuple(x[0] for x in behind)
            else:
                y, behind = recurrence.whole(own, (0, part.tokens), tuple(x[slot] for x in held))
            for x, new in zip(held, behind, strict=True):
                x[slot] = new
            outputs.append(y)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def keep(self, left: Tensors) -> None:
        raise AssertionError("a step of generation asks what its tokens give")
