"""A chunk of a sequence: what it attends to, and where gradients of keys and values add up.

T tokens of the sequences laid flat, C of a chunk, G key-value heads, K head size, W value size.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.models.layout import clip
from outsize.models.seams import AttendSpec


class KeyValues:
    """Keys and values of a layer for the whole sequences of a microbatch, and their gradients, in
    float32 at least, summed over chunks."""

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self.bounds = bounds
        self._values: tuple[Tensor, Tensor] | None = None
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

    held: KeyValues
    start: int
    stop: int
    spec: AttendSpec

    @property
    def bounds(self) -> tuple[int, ...]:
        """Of the documents inside the chunk, counted from its start."""
        return clip(self.held.bounds, self.start, self.stop)

    @property
    def past(self) -> int:
        """Tokens before the chunk that belong to the document it begins in."""
        bounds = self.held.bounds
        return self.start - bounds[bisect_right(bounds, self.start) - 1]

    def own_gradients(self) -> tuple[Tensor, Tensor]:
        """Of the chunk's keys and values: complete once its own queries are differentiated."""
        k_TGK, v_TGW = self.held.values
        gk_TGK, gv_TGW = self.held.gradients
        here = slice(self.start, self.stop)
        return gk_TGK[here].to(k_TGK.dtype), gv_TGW[here].to(v_TGW.dtype)
