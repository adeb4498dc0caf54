"""Rotary position embedding (Su et al., RoFormer, 2021) and its ways to longer contexts.

linear: Chen et al., "Extending context window via positional interpolation", 2023;
dynamic: NTK-aware base, growing with the document; yarn: Peng et al., 2023; longrope: Ding et
al., 2024; llama3: Llama 3.1, 2024. Two of them (dynamic, longrope) depend on the length of the
document, which here is each document's own: what it is packed with changes nothing.

T tokens, H heads, K head size, P pairs of rotated features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from outsize.kernels.rope import turn
from outsize.models.config import Rope

_BY_LENGTH = ("dynamic", "longrope")


def regimes(ropes: Iterable[Rope]) -> Callable[[int], int] | None:
    """What tells by their length documents apart whose tokens are turned otherwise, never less for
    a longer one; None where no length matters."""
    own = [rope for rope in ropes if rope.kind in _BY_LENGTH]

    def regime(length: int) -> int:
        passed = [rope.kind for rope in own if length > rope.trained]
        return len(own) + length if "dynamic" in passed else len(passed)

    return regime if own else None


def frequencies(rope: Rope, length: int, device: torch.device) -> Tensor:
    """Radians per position of each pair, float64 (P), for a document of `length` tokens."""
    exponent_P = torch.arange(0, rope.dim, 2, device=device, dtype=torch.float64) / rope.dim
    plain_P = torch.pow(rope.theta, -exponent_P)
    match rope.kind:
        case "default":
            return plain_P
        case "linear":
            return plain_P / rope.factor
        case "dynamic":
            grown = rope.factor * max(length, rope.trained) / rope.trained - (rope.factor - 1)
            base = rope.theta * grown ** (rope.dim / (rope.dim - 2))
            return torch.pow(base, -exponent_P)
        case "yarn":
            kept_P = _yarn_kept(rope, device)
            return plain_P * kept_P + plain_P / rope.factor * (1 - kept_P)
        case "longrope":
            factors = rope.long_factors if length > rope.trained else rope.short_factors
            return plain_P / torch.tensor(factors, device=device, dtype=torch.float64)
        case "llama3":
            turns_P = rope.trained * plain_P / (2 * math.pi)
            kept_P = ((turns_P - rope.low) / (rope.high - rope.low)).clamp(0, 1)
            return plain_P * kept_P + plain_P / rope.factor * (1 - kept_P)


def _yarn_kept(rope: Rope, device: torch.device) -> Tensor:
    """1 for pairs that turn fast enough to be left alone, 0 for interpolated ones, ramp between."""

    def pair_of(turns: float) -> float:
        per_position = rope.trained / (turns * 2 * math.pi)
        return rope.dim * math.log(per_position) / (2 * math.log(rope.theta))

    start, stop = pair_of(rope.fast), pair_of(rope.slow)
    if rope.truncate:
        start, stop = math.floor(start), math.ceil(stop)
    start, stop = max(start, 0), min(stop, rope.dim - 1)
    stop = stop + 0.001 if stop == start else stop  # as the paper's code, against division by zero
    pairs_P = torch.arange(rope.dim // 2, device=device, dtype=torch.float64)
    return 1 - ((pairs_P - start) / (stop - start)).clamp(0, 1)


def _runs(rope: Rope, bounds: tuple[int, ...], lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(tokens, document length) for stretches of tokens that share their frequencies."""
    if rope.kind not in _BY_LENGTH:
        return [(bounds[-1], 0)]
    runs: list[tuple[int, int]] = []
    for (start, stop), length in zip(pairwise(bounds), lengths, strict=True):
        length = max(length, rope.trained)  # all short documents are alike
        if runs and runs[-1][1] == length:
            runs[-1] = (runs[-1][0] + stop - start, length)
        else:
            runs.append((stop - start, length))
    return runs


def tables(
    rope: Rope,
    positions_T: Tensor,
    bounds: tuple[int, ...],
    lengths: Sequence[int],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines (T, P) in `dtype`, float32 for half precisions.

    Angles are taken in float64: float32 loses three digits at position 10,000.
    """
    device = positions_T.device
    parts = [
        frequencies(rope, length, device).expand(tokens, -1)
        for tokens, length in _runs(rope, bounds, lengths)
    ]
    frequency_TP = parts[0] if len(parts) == 1 else torch.cat(parts)
    angle_TP = positions_T.to(torch.float64).unsqueeze(1) * frequency_TP
    wide = dtype if dtype == torch.float64 else torch.float32
    cos_TP, sin_TP = angle_TP.cos(), angle_TP.sin()
    if rope.amplitude != 1.0:
        cos_TP, sin_TP = cos_TP * rope.amplitude, sin_TP * rope.amplitude
    return cos_TP.to(wide), sin_TP.to(wide)


def rotate(x_THK: Tensor, table: tuple[Tensor, Tensor], interleaved: bool = False) -> Tensor:
    """x_THK with its first 2P features turned by their positions; dtype as x."""
    return turn(x_THK, *table, interleaved)
