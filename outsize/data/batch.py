"""A Batch: rows of packed documents with their next-token targets, as plain tensors.

Legend: B rows, S tokens of a row, T = B * S tokens of the rows laid flat.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.models.dropout import Noise

IGNORE = -100  # the target that no loss counts; the value that PyTorch's cross-entropy ignores


@dataclass(frozen=True)
class Batch:
    """One optimizer step, or part of one.

    ids_BS and targets_BS are int64; `bounds` holds, for every row, the cumulative offsets
    (0, ..., S) of the documents in it, which attention never crosses. A target is the next token
    of the same document, IGNORE where there is none. noise: dropout, if any; of a part of a step,
    with the first token's place in the whole step.
    """

    ids_BS: Tensor
    targets_BS: Tensor
    bounds: tuple[tuple[int, ...], ...]
    noise: Noise | None = None

    def __post_init__(self) -> None:
        rows, tokens = self.ids_BS.shape
        assert self.targets_BS.shape == (rows, tokens) and len(self.bounds) == rows
        assert all(row[0] == 0 and row[-1] == tokens for row in self.bounds)

    def positions(self) -> Tensor:
        """(B, S) int64: the position of every token inside its document (or piece of one)."""
        rows, tokens = self.ids_BS.shape
        ends = self.flat_bounds()
        inside = [torch.arange(stop - start) for start, stop in itertools.pairwise(ends)]
        return torch.cat(inside).view(rows, tokens).to(self.ids_BS.device)

    def count(self) -> int:
        """The number of targets that count."""
        return int((self.targets_BS != IGNORE).sum())

    def rows(self, start: int, stop: int) -> Batch:
        """The microbatch of rows start .. stop - 1; the tensors are views."""
        here = slice(start, stop)
        noise = None if self.noise is None else self.noise.at(start * self.ids_BS.shape[1])
        return Batch(self.ids_BS[here], self.targets_BS[here], self.bounds[here], noise)

    def flat_bounds(self) -> tuple[int, ...]:
        """Cumulative document offsets (0, ..., T) for the rows laid flat, one after another."""
        tokens = self.ids_BS.shape[1]
        ends = (row * tokens + end for row, own in enumerate(self.bounds) for end in own[1:])
        return (0, *ends)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with its tensors on `device`."""
        return Batch(self.ids_BS.to(device), self.targets_BS.to(device), self.bounds, self.noise)
