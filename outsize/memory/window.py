"""A window of active neurons (Alizadeh et al., "LLM in a flash", 2023): the last tokens' stay.

The neurons that a token needs are for the most part those that the tokens before it needed. One
buffer, allocated once, holds the bundles of the neurons that were active in the last `span` tokens;
a token reads only those that are new. What leaves is overwritten by the last rows, so that the held
bundles stay one matrix, with which the layer multiplies.

T tokens, F neurons, W held.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.memory.rows import RowFile


@dataclass
class Count:
    """What a window did: neurons that were asked for, those of them that were there, bytes read."""

    tokens: int = 0
    wanted: int = 0
    hits: int = 0
    bytes_read: int = 0


class Window:
    """The bundles of one layer: rows [base, base + neurons) of `file`, `capacity` of them held."""

    def __init__(self, file: RowFile, base: int, neurons: int, capacity: int, span: int) -> None:
        self.count = Count()
        self.capacity, self.span = capacity, span
        self._file, self._base = file, base
        self._rows = file.buffer(capacity)
        self._ids = torch.zeros(capacity, dtype=torch.int64)
        self._held = 0  # the first so many rows are in use
        self._inside_F = torch.zeros(neurons, dtype=torch.bool)
        self._last_F = torch.full((neurons,), -span, dtype=torch.int64)  # token that used it last

    def hold(self, active_TF: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(ids_W, rows) in turn, each neuron in at most one, together at least all active ones.

        One turn where they fit the buffer. Those that are not active may be among them. The rows
        (W, bytes) are valid until the next turn.
        """
        needed_F = active_TF.any(0)
        self._stamp(active_TF)
        wanted, there = int(needed_F.sum()), int((needed_F & self._inside_F).sum())
        self.count.wanted += wanted
        self.count.hits += there
        if wanted <= self.capacity:
            self._bring(needed_F)
            yield self._view()
            return
        yield from self._stream(needed_F)

    def _stamp(self, active_TF: Tensor) -> None:
        """Note for each neuron the last token that it was active for."""
        tokens, start = len(active_TF), self.count.tokens
        when_T = torch.arange(start, start + tokens)
        used_F = torch.where(active_TF, when_T[:, None], -self.span).amax(0)
        torch.maximum(self._last_F, used_F, out=self._last_F)
        self.count.tokens += tokens

    def _bring(self, needed_F: Tensor) -> None:
        missing = (needed_F & ~self._inside_F).nonzero().flatten()
        self._drop(needed_F, len(missing))
        start, stop = self._held, self._held + len(missing)
        self._file.read(missing + self._base, self._rows[start:stop])
        self._ids[start:stop] = missing
        self._inside_F[missing] = True
        self._held = stop
        self.count.bytes_read += self._rows[start:stop].nbytes

    def _drop(self, needed_F: Tensor, room: int) -> None:
        """Let go what the last `span` tokens did not use, and the oldest until there is room."""
        ids_W = self._ids[: self._held]
        last_W = self._last_F[ids_W]
        gone_W = last_W < self.count.tokens - self.span
        gone_W &= ~needed_F[ids_W]
        over = self._held - int(gone_W.sum()) + room - self.capacity
        if over > 0:
            never = self.count.tokens + 1
            blocked_W = gone_W | needed_F[ids_W]
            gone_W[torch.where(blocked_W, never, last_W).argsort()[:over]] = True
        self._inside_F[ids_W[gone_W]] = False
        kept = self._held - int(gone_W.sum())
        holes, movers = gone_W[:kept].nonzero().flatten(), (~gone_W[kept:]).nonzero().flatten()
        self._rows[holes] = self._rows[movers + kept]
        self._ids[holes] = self._ids[movers + kept]
        self._held = kept

    def _stream(self, needed_F: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """More neurons than the buffer holds, as a long prompt has: what is held, then the rest
        through the buffer."""
        rest_F = needed_F & ~self._inside_F
        yield self._view()
        for ids in rest_F.nonzero().flatten().split(self.capacity):
            self._inside_F.zero_()
            self._held = 0
            part_F = torch.zeros_like(needed_F)
            part_F[ids] = True
            self._bring(part_F)
            yield self._view()

    def _view(self) -> tuple[Tensor, Tensor]:
        return self._ids[: self._held], self._rows[: self._held]
