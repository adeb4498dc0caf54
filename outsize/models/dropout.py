"""Dropout whose mask is a function of (seed, step, name, token of the step, feature) and of nothing
else: microbatches, meshes and recomputing all see the mask of the plain run.

Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting", 2014.
T tokens here, D features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outsize import accelerator
from outsize.errors import OutsizeError
from outsize.models.random import bits
from outsize.torch_private import FakeTensor

_LEVELS = 1 << 16  # 16 random bits an element: a rate is a multiple of 1 / 65536
_PER_WORD = 4  # elements that one 64-bit word serves
_PIECE = 1 << 18  # elements whose masks exist at once


@dataclass(frozen=True)
class Noise:
    """rate: part of the elements that become zero; the others are divided by the part that is
    left. step: of training. first: index of the first token here among all tokens of the step, over
    all workers: row * tokens of a row + place in the row. spans: stretches of tokens, counted from
    `first`, where those that are here do not all follow one another."""

    rate: float
    seed: int
    step: int
    first: int = 0
    spans: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise OutsizeError(f"dropout is {self.rate}; expected 0 or more, and less than 1")

    def at(self, start: int) -> Noise:
        """The same for tokens that begin `start` further on."""
        if not self.spans:
            return replace(self, first=self.first + start)
        left = []
        for first, last in self.spans:
            if start < last - first:
                left.append((first + start, last))
            start = max(0, start - (last - first))
        return replace(self, spans=tuple(left))

    def _stretches(self, tokens: int) -> Iterator[tuple[int, int, int]]:
        """(token here, end of tokens here, index in the step of the first) of so many tokens."""
        at = 0
        for first, last in self.spans or ((0, tokens),):
            count = min(last - first, tokens - at)
            yield at, at + count, self.first + first
            at += count

    def __call__(self, x_TD: Tensor, name: str) -> Tensor:
        """x_TD with dropout. name: of the place in the model."""
        if not self._dropped:
            return x_TD
        y_TD: Tensor = _Dropout.apply(x_TD, self, name)  # type: ignore[no-untyped-call]
        return y_TD

    @property
    def _dropped(self) -> int:
        """Of so many levels."""
        return min(_LEVELS - 1, round(self.rate * _LEVELS))

    def masks(self, tokens: int, features: int, name: str) -> Iterator[tuple[slice, Tensor]]:
        """What stays, (tokens, features) booleans, some tokens at a time."""
        words, key = -(-features // _PER_WORD), f"dropout {self.step} {name}"
        rows = max(1, _PIECE // features)
        pieces = (
            (slice(at, min(at + rows, stop)), index + at - start)
            for start, stop, index in self._stretches(tokens)
            for at in range(start, stop, rows)
        )
        for here, index in pieces:
            first, last = index * words, (index + here.stop - here.start) * words
            drawn = bits(self.seed, key, first, last).astype("<u8", copy=False).view("<u2")
            kept = drawn.reshape(-1, words * _PER_WORD)[:, :features] >= np.uint16(self._dropped)
            yield here, torch.from_numpy(kept)

    def apply(self, x_TD: Tensor, name: str) -> Tensor:
        """The same without a gradient: the map is linear, and its own transpose."""
        scale = _LEVELS / (_LEVELS - self._dropped)
        if isinstance(x_TD, FakeTensor) or x_TD.is_meta:
            return x_TD * scale
        out_TD = torch.empty_like(x_TD)
        tokens, features = x_TD.shape
        for here, kept in self.masks(tokens, features, name):
            torch.mul(x_TD[here], accelerator.sent(kept, x_TD.device), out=out_TD[here])
            out_TD[here] *= scale
        return out_TD


class _Dropout(torch.autograd.Function):
    """Keeps nothing: the backward draws the mask again."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, noise: Noise, name: str) -> Tensor:
        ctx.facts = (noise, name)
        return noise.apply(x_TD, name)

    @staticmethod
    def backward(ctx: Any, gy_TD: Tensor) -> tuple[Tensor, None, None]:
        noise, name = ctx.facts
        return noise.apply(gy_TD, name), None, None
