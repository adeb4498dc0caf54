"""What earlier tokens left, kept at the `Attend` and `Carry` seams: model code knows nothing of it.

A step feeds new tokens of any of the sequences, prompts and single tokens alike, laid flat. A layer
of attention stores the keys and values it is given behind those of earlier steps and attends the
new queries to all of them. A recurrent layer goes on from the state of each sequence and leaves the
new one in its place, the same bytes however long the sequence.

N sequences (slots), T new tokens laid flat, C new tokens handled at once, L tokens they can see,
H query heads, G key-value heads, R = H / G, K head size, W value size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from outsize import accelerator
from outsize.kernels import attention as kernel
from outsize.memory.ledger import in_grains
from outsize.models.attention import LocalAttend
from outsize.models.norm import upcast
from outsize.models.seams import AttendSpec, Mixer, Recurrence, StateSpec, Tensors

_CHUNK = 256  # queries whose scores or mask exist at once


def state_bytes(mixer: Mixer, dtype: torch.dtype, tokens: int, grain: int = 1) -> int:
    """What a layer's cache takes for one sequence with room for so many tokens. grain: bytes of
    which each buffer takes whole multiples."""
    return sum(in_grains(one.bytes(tokens), grain) for one in mixer.states(dtype))


class StateCache:
    """Room for `slots` sequences of `capacity` tokens, allocated when a layer first uses it.

    The buffers of keys and values have the dtype and device of those they are first given.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        self.capacity = capacity
        self.lengths = [0] * slots  # tokens of each sequence
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # (N, G, capacity, K), (..., W)
        self._states: dict[int, Tensors] = {}  # (N, ...) each

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for layer in self.layers for x in self.buffers(layer))

    @property
    def layers(self) -> tuple[int, ...]:
        """Those that have been used."""
        return (*self._layers, *self._states)

    def buffers(self, layer: int) -> Tensors:
        """Of a layer that has been used: k_NGLK, v_NGLW, or its recurrent states."""
        return self._layers[layer] if layer in self._layers else self._states[layer]

    def extend(
        self, slots: Sequence[int], counts: Sequence[int], ahead: Sequence[int] | None = None
    ) -> CachedPast:
        """Make room for `counts` new tokens of the sequences in `slots`: what that step meets.

        `ahead`: tokens of each that are known to follow in later steps, 0 by default.
        """
        assert len(set(slots)) == len(slots) == len(counts), "a sequence comes once in a step"
        starts = tuple(self.lengths[slot] for slot in slots)
        for slot, count in zip(slots, counts, strict=True):
            assert count > 0, "a step feeds at least one token of each of its sequences"
            self.lengths[slot] += count
            assert self.lengths[slot] <= self.capacity, f"slot {slot} is full: {self.capacity}"
        bounds = (0, *itertools.accumulate(counts))
        return CachedPast(self, tuple(slots), starts, bounds, tuple(ahead or [0] * len(slots)))

    def clear(self, slot: int) -> None:
        """Forget a sequence: its slot may take another."""
        self.lengths[slot] = 0
        for states in self._states.values():
            for state in states:
                state[slot] = 0

    def layer(self, index: int, k_TGK: Tensor, v_TGW: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers of a layer."""
        if index not in self._layers:
            self._layers[index] = (self._allocate(k_TGK), self._allocate(v_TGW))
        return self._layers[index]

    def states(self, layer: int, declared: tuple[StateSpec, ...], device: torch.device) -> Tensors:
        """The recurrent states of a layer, by slot; those of new sequences are zeros."""
        if layer not in self._states:
            slots = len(self.lengths)
            self._states[layer] = tuple(
                torch.zeros((slots, *one.shape), dtype=one.dtype, device=device) for one in declared
            )
        return self._states[layer]

    def _allocate(self, x_TGK: Tensor) -> Tensor:
        _, heads, size = x_TGK.shape
        return x_TGK.new_empty((len(self.lengths), heads, self.capacity, size))


@dataclass(frozen=True)
class CachedPast:
    """One step's Attend and Carry: sequence j of the flat batch is the cache's `slots[j]`, and
    `starts[j]` of its tokens came in earlier steps. For inference only."""

    cache: StateCache
    slots: tuple[int, ...]
    starts: tuple[int, ...]
    bounds: tuple[int, ...]
    ahead: tuple[int, ...]

    @property
    def stops(self) -> tuple[int, ...]:
        """Tokens of each sequence up to and with this step."""
        counts = (last - first for first, last in itertools.pairwise(self.bounds))
        return tuple(start + count for start, count in zip(self.starts, counts, strict=True))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence as far as they are known: what a rotary embedding that depends
        on the length goes by."""
        return tuple(stop + more for stop, more in zip(self.stops, self.ahead, strict=True))

    def positions(self, device: torch.device | None = None) -> Tensor:
        """(T,) int64: the position of each new token in its sequence."""
        spans = zip(self.starts, self.stops, strict=True)
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in spans])

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
        k_NGLK, v_NGLW = self.cache.layer(spec.layer, k_TGK, v_TGW)
        spans = zip(self.slots, self.starts, self.stops, itertools.pairwise(bounds), strict=True)
        outputs = []
        for slot, start, stop, (first, last) in spans:
            k_NGLK[slot, :, start:stop] = k_TGK[first:last].transpose(0, 1)
            v_NGLW[slot, :, start:stop] = v_TGW[first:last].transpose(0, 1)
            if any(self.starts):
                k_GLK, v_GLW = k_NGLK[slot, :, :stop], v_NGLW[slot, :, :stop]
                outputs.append(attend_tail(q_THK[first:last], k_GLK, v_GLW, spec))
        if not outputs:  # nothing came before: the very computation of training
            return LocalAttend()(q_THK, k_TGK, v_TGW, bounds, spec)
        return torch.cat(outputs)

    def cut(self, middle: int) -> tuple[CachedPast, CachedPast]:
        return self._stretch(0, middle), self._stretch(middle, self.bounds[-1])

    def _stretch(self, first: int, last: int) -> CachedPast:
        """A step of some of the tokens, when those before them have gone through a layer."""
        found, bounds = list[tuple[int, int, int]](), [0]
        for index, (start, stop) in enumerate(itertools.pairwise(self.bounds)):
            low, high = max(start, first), min(stop, last)
            if low < high:
                before = self.starts[index] + low - start
                found.append((self.slots[index], before, self.ahead[index] + stop - high))
                bounds.append(high - first)
        slots, starts, ahead = zip(*found, strict=True)
        return CachedPast(self.cache, slots, starts, tuple(bounds), ahead)

    def run(
        self,
        layer: int,
        states: tuple[StateSpec, ...],
        recurrence: Recurrence,
        inputs: Tensors,
        bounds: tuple[int, ...],
    ) -> Tensor:
        assert bounds == self.bounds, "a step's Carry serves the batch it was made for"
        held = self.cache.states(layer, states, inputs[0].device)
        slots = list(self.slots)
        if len(slots) == bounds[-1]:  # one token each
            slots_N = accelerator.sent(torch.tensor(slots), inputs[0].device)
            y, behind = recurrence.step(inputs, tuple(x[slots_N] for x in held))
            for x, new in zip(held, behind, strict=True):
                x[slots_N] = new
            return y
        outputs = []
        for slot, (first, last) in zip(slots, itertools.pairwise(bounds), strict=True):
            own = tuple(x[first:last] for x in inputs)
            y, behind = recurrence.whole(own, (0, last - first), tuple(x[slot] for x in held))
            for x, new in zip(held, behind, strict=True):
                x[slot] = new
            outputs.append(y)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def keep(self, left: Tensors) -> None:
        raise AssertionError("a step of generation asks what its tokens give")


def attend_tail(q_CHK: Tensor, k_GLK: Tensor, v_GLW: Tensor, spec: AttendSpec) -> Tensor:
    """o_CHW of queries that belong to the last C of the L tokens of one sequence."""
    count, total = q_CHK.shape[0], k_GLK.shape[1]
    if count >= kernel.BLOCK and spec.softcap is None and q_CHK.device.type == "cpu":
        k_LGK, v_LGW = k_GLK.transpose(0, 1), v_GLW.transpose(0, 1)
        if kernel.fits(q_CHK, k_LGK, v_LGW):  # in half the time of a mask
            behind = replace(spec, first_query=total - count)
            return LocalAttend()(q_CHK, k_LGK, v_LGW, (0, total), behind)
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
