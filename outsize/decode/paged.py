"""What earlier tokens left, in pages, kept at the `Attend` and `Carry` seams: model code knows
nothing of it.

A step feeds new tokens of any of the sequences, prompts and single tokens alike, laid flat. The
buffers of a layer are one pool, and a sequence has pages of it that lie anywhere. A layer of
attention stores the keys and values it is given behind those of earlier steps and attends the new
queries to all of them; a recurrent layer goes on from the state of each sequence and leaves the new
one in its place. In float32 and bfloat16 on a CPU tokens are attended each alone
(outsize/kernels/pages.py), or those of a prompt in the tiles of training, which gives the same
bits. On a device they are attended by tables that lie there (outsize/kernels/paged.py), and prompts
by PyTorch's kernels, over pages that are gathered first.

P pages of `size` tokens, N slots, T tokens of a step, C of them handled at once, L tokens they can
see, H query heads, G key-value heads, R = H / G, K head size, W value size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from outsize import accelerator
from outsize.hardware.host import ask_huge
from outsize.kernels import attention as tiles
from outsize.kernels import paged
from outsize.kernels import pages as kernel
from outsize.memory.ledger import in_grains
from outsize.models.attention import LocalAttend
from outsize.models.norm import upcast
from outsize.models.seams import AttendSpec, Mixer, Recurrence, StateSpec, Tensors
from outsize.torch_private import FakeTensor

PAGE = 16  # tokens: fewer would be longer tables, more would share less
_CHUNK = 256  # queries whose scores or mask exist at once


def pages_of(tokens: int, size: int = PAGE) -> int:
    """How many have room for so many tokens."""
    return -(-tokens // size)


def state_bytes(mixer: Mixer, dtype: torch.dtype, tokens: int, grain: int = 1) -> int:
    """What a layer's pages and state take of one sequence with room for so many tokens. grain:
    bytes of which each buffer takes whole multiples."""
    room = pages_of(tokens) * PAGE
    return sum(in_grains(one.bytes(room), grain) for one in mixer.states(dtype))


class Part(NamedTuple):
    """A sequence's tokens in a step. pages: with room for all of them, a range where they lie one
    behind another; start: tokens before; tokens: of this step; ahead: that are known to follow in
    later ones, by which it is turned too; slot: of its states."""

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
    def exact(self) -> bool:
        """Whether pages hold what they are given."""
        return self._form is kernel.FORMS[kernel.AS_STORED]

    @property
    def tensors(self) -> list[Tensor]:
        """Of the layers that have been used."""
        pools = (pool for some in self._layers.values() for pool in some if pool.size == pool.row)
        states = (x for some in self._states.values() for x in some)
        return [*(x for pool in pools for x in pool.tensors), *states]

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for x in self.tensors)

    def clear(self, slot: int) -> None:
        """A sequence begins there."""
        for states in self._states.values():
            for state in states:
                state[slot] = 0

    def layer(
        self, index: int, k_TGK: Tensor, v_TGW: Tensor, shared: bool = False
    ) -> tuple[kernel.Pool, kernel.Pool]:
        """Pages for such keys and values. shared: as of AttendSpec."""
        if index not in self._layers:
            keys = self._pool(k_TGK)
            values = keys.first(v_TGW.shape[2]) if shared else self._pool(v_TGW)
            self._layers[index] = keys, values
        return self._layers[index]

    def put(
        self, where_T: Tensor, k_TGK: Tensor, v_TGW: Tensor, spec: AttendSpec
    ) -> tuple[kernel.Pool, kernel.Pool]:
        """Hold what new tokens leave in a layer at places among those of all its pages."""
        keys, values = self.layer(spec.layer, k_TGK, v_TGW, spec.shared)
        keys.put(where_T, k_TGK)
        if not spec.shared:
            values.put(where_T, v_TGW)
        return keys, values

    def _pool(self, like: Tensor) -> kernel.Pool:
        pool = kernel.Pool(self._form, self.pages, self.size, like)
        for x in pool.tensors:
            if x.device.type == "cpu" and not isinstance(x, FakeTensor):
                ask_huge(x.data_ptr(), x.nbytes)
        return pool

    def hold(self, pages: Mapping[int, int]) -> None:
        """By the place of a request, the pages that have memory from now on
        (outsize/decode/caches.py); here all have it for good."""

    def states(self, layer: int, declared: tuple[StateSpec, ...], device: torch.device) -> Tensors:
        if layer not in self._states:
            self._states[layer] = tuple(
                torch.zeros((self.slots, *one.shape), dtype=one.dtype, device=device)
                for one in declared
            )
        return self._states[layer]


@dataclass(frozen=True)
class PagedPast:
    """A step of some sequences, each of which comes once. For inference only."""

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

    @property
    def longest(self) -> int:
        """Tokens that one of the new ones sees at most."""
        return max(part.stop for part in self.parts)

    @property
    def places(self) -> list[int]:
        """Of each new token, its place among those of all pages."""
        size = self.cache.size
        return [
            part.pages[place // size] * size + place % size
            for part in self.parts
            for place in range(part.start, part.stop)
        ]

    @cached_property
    def where(self) -> Tensor:
        """The same, int64 on the host."""
        return torch.tensor(self.places)

    @property
    def tables(self) -> tuple[list[Sequence[int]], list[int]]:
        """Of each new token, the pages of its sequence and its place there."""
        return [part.pages for part in self.parts for _ in range(part.tokens)], self._positions

    @cached_property
    def _runs(self) -> list[tuple[slice, Part | kernel.Seen]]:
        """What is attended at once: a slice of a prompt, whose keys and values lie one behind
        another, or parts whose tokens are attended each alone."""
        found, spans = list[tuple[slice, Part | kernel.Seen]](), self.spans()
        for apart, some in itertools.groupby(spans, lambda one: _in_tiles(self.cache, one[0])):
            here = list(some)
            if apart:
                found += ((slice(*span), part) for part, span in here)
            else:
                rows = slice(here[0][1][0], here[-1][1][1])
                found.append((rows, self._seen([part for part, _ in here], rows)))
        return found

    @property
    def tiled(self) -> bool:
        """Whether a slice of a prompt is attended as training would."""
        return any(isinstance(one, Part) for _, one in self._runs)

    @cached_property
    def seen(self) -> kernel.Seen:
        """What each token sees."""
        return self._seen(self.parts, slice(0, self.bounds[-1]))

    def _seen(self, parts: Sequence[Part], rows: slice) -> kernel.Seen:
        tables, begins = list[int](), list[int]()
        for part in parts:
            begins += [len(tables)] * part.tokens
            tables += part.pages
        return kernel.Seen(*map(kernel.numbers, (tables, begins, self._positions[rows])))

    def spans(self) -> Iterator[tuple[Part, tuple[int, int]]]:
        return zip(self.parts, itertools.pairwise(self.bounds), strict=True)

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
        where = accelerator.sent(self.where, k_TGK.device)
        keys, values = self.cache.put(where, k_TGK, v_TGW, spec)
        tiled, q_THK = tiles.fits(q_THK, k_TGK, v_TGW), q_THK.contiguous()
        served = kernel.fits(q_THK, keys)
        whole = self.cache.exact and not any(part.start for part in self.parts)
        if whole and (tiled or not served):
            return LocalAttend()(q_THK, k_TGK, v_TGW, bounds, spec)  # as training does
        if not served:
            outputs = _on_device(self, q_THK, keys, values, spec)
        else:
            facts, outputs = (spec.scale, spec.window, spec.softcap), []
            every = slice(0, self.bounds[-1])  # heads may be too large for tiles
            for rows, seen in self._runs if tiled else [(every, self.seen)]:
                if isinstance(seen, kernel.Seen):
                    outputs.append(kernel.attend(q_THK[rows], keys, values, seen, *facts))
                    continue
                k_LGK, v_LGW = k_TGK[rows], v_TGW[rows]
                if seen.start:
                    k_LGK, v_LGW = self.gathered(seen, keys, values)
                behind = replace(spec, first_query=seen.start)
                outputs.append(LocalAttend()(q_THK[rows], k_LGK, v_LGW, (0, seen.stop), behind))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    @cached_property
    def sent(self) -> dict[tuple[int, int, torch.device], paged.Sights]:
        """What tokens see, once for all layers of a step."""
        return {}

    def gathered(self, part: Part, keys: kernel.Pool, values: kernel.Pool) -> tuple[Tensor, Tensor]:
        """k_LGK, v_LGW of all tokens of a sequence."""
        pages: Tensor | slice
        if isinstance(part.pages, range):
            pages = slice(part.pages.start, part.pages.stop)
        else:
            pages = accelerator.sent(torch.tensor(list(part.pages)), keys.data.device)
        k_LGK, v_LGW = (x.get(pages).flatten(0, 1)[: part.stop] for x in (keys, values))
        return k_LGK, v_LGW

    def cut(self, middle: int) -> tuple[PagedPast, PagedPast]:
        return self._stretch(0, middle), self._stretch(middle, self.bounds[-1])

    def _stretch(self, first: int, last: int) -> PagedPast:
        """A step of some of the tokens, when those before them have gone through a layer."""
        found = list[Part]()
        for part, (start, stop) in self.spans():
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
        for part, (first, last) in self.spans():
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


def _in_tiles(cache: PagedCache, part: Part) -> bool:
    """Whether a slice of a prompt is attended as training would."""
    lies = not part.start or isinstance(part.pages, range)
    return cache.exact and part.tokens >= tiles.BLOCK and lies


def _on_device(
    past: PagedPast, q_THK: Tensor, keys: kernel.Pool, values: kernel.Pool, spec: AttendSpec
) -> list[Tensor]:
    """o_CHW of some tokens after others: each alone, where the device can and they are few."""
    outputs, together = list[Tensor](), paged.served(q_THK, keys)
    for few, some in itertools.groupby(past.spans(), lambda one: one[0].tokens < tiles.BLOCK):
        here = list(some)
        if few and together:
            rows = slice(here[0][1][0], here[-1][1][1])
            seen, facts = _sights(past, rows, q_THK.device), (spec.scale, spec.window, spec.softcap)
            outputs.append(paged.attend(q_THK[rows], keys, values, seen, *facts))
            continue
        outputs += (
            attend_tail(q_THK[first:last], *past.gathered(part, keys, values), spec)
            for part, (first, last) in here
        )
    return outputs


def _sights(past: PagedPast, rows: slice, device: torch.device) -> paged.Sights:
    """What these tokens see."""
    key = rows.start, rows.stop, device
    if key not in past.sent:
        tables, positions = past.tables[0][rows], past.tables[1][rows]
        width = pages_of(max(positions) + 1, past.cache.size)
        flat = torch.tensor(paged.flat(tables, positions, width), dtype=torch.int32)
        past.sent[key] = paged.sights(accelerator.sent(flat, device), width)
    return past.sent[key]


def attend_tail(q_CHK: Tensor, k_LGK: Tensor, v_LGW: Tensor, spec: AttendSpec) -> Tensor:
    """o_CHW of queries that belong to the last C of the L tokens of one sequence."""
    count, total = q_CHK.shape[0], k_LGK.shape[0]
    k_GLK, v_GLW = k_LGK.transpose(0, 1), v_LGW.transpose(0, 1)
    outputs = []
    for first in range(0, count, _CHUNK):
        stop = min(first + _CHUNK, count)
        start, end = total - count + first, total - count + stop  # positions of the chunk's queries
        low = 0 if spec.window is None else max(0, start - spec.window + 1)
        k, v = k_GLK[:, low:end], v_GLW[:, low:end]
        outputs.append(_attend_chunk(q_CHK[first:stop], k, v, spec))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_chunk(q_CHK: Tensor, k_GLK: Tensor, v_GLW: Tensor, spec: AttendSpec) -> Tensor:
    """The queries that share a key-value head are laid one after another as if of one head, so that
    keys and values need not be repeated: (G, R C, K) against (G, L, K)."""
    count, groups = q_CHK.shape[0], k_GLK.shape[0]
    q_GXK = q_CHK.unflatten(1, (groups, -1)).permute(1, 2, 0, 3).flatten(1, 2)
    seen_XL = None
    if count > 1:  # a single query sees every key it was given
        seen_XL = _seen(count, k_GLK.shape[1], spec.window, q_CHK.device)
        seen_XL = seen_XL.repeat(q_GXK.shape[1] // count, 1)
    if spec.softcap is None:
        o_GXW = F.scaled_dot_product_attention(
            q_GXK[None], k_GLK[None], v_GLW[None], seen_XL, scale=spec.scale
        )[0]
    else:
        scores_GXL: Tensor = upcast(q_GXK @ k_GLK.mT) * (spec.scale / spec.softcap)
        scores_GXL = scores_GXL.tanh_() * spec.softcap
        if seen_XL is not None:
            scores_GXL.masked_fill_(~seen_XL, -math.inf)
        o_GXW = scores_GXL.softmax(-1).to(v_GLW.dtype) @ v_GLW
    o_CHW: Tensor = o_GXW.unflatten(1, (-1, count)).permute(2, 0, 1, 3).flatten(1, 2)
    return o_CHW


def _seen(count: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """(C, L) bool: what the last `count` of `keys` tokens see of them."""
    query_C1 = torch.arange(keys - count, keys, device=device).unsqueeze(1)
    key_L = torch.arange(keys, device=device)
    seen_CL = key_L <= query_C1
    return seen_CL if window is None else seen_CL & (key_L > query_C1 - window)
