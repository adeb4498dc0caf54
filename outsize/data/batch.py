"""A Batch: rows of packed documents with their next-token targets, as plain tensors.

Legend: B rows, S tokens of a row, T = B * S tokens of the rows laid flat.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.models.layout import clip

if TYPE_CHECKING:
    from outsize.models.dropout import Noise

IGNORE = -100  # the target that no loss counts; the value that PyTorch's cross-entropy ignores


Span = tuple[int, int]  # tokens [first, last) of a row


@dataclass(frozen=True)
class Batch:
    """One optimizer step, or part of one.

    ids_BS and targets_BS are int64; `bounds` holds, for every row, the cumulative offsets
    (0, ..., S) of the documents in it, which attention never crosses. A target is the next token
    of the same document, IGNORE where there is none. noise: dropout, if any; of a part of a step,
    with the first token's place in the whole step. weights_BS: float32, 0 or more, what each
    target's loss is times, None for 1 everywhere. columns: by name (B, S), what else a loss reads
    of each target.
    """

    ids_BS: Tensor
    targets_BS: Tensor
    bounds: tuple[tuple[int, ...], ...]
    noise: Noise | None = None
    weights_BS: Tensor | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows, tokens = self.ids_BS.shape
        assert self.targets_BS.shape == (rows, tokens) and len(self.bounds) == rows
        assert all(row[0] == 0 and row[-1] == tokens for row in self.bounds)
        assert self.weights_BS is None or self.weights_BS.dtype == torch.float32
        more = [x_BS for x_BS in (self.weights_BS, *self.columns.values()) if x_BS is not None]
        assert all(x_BS.shape == (rows, tokens) for x_BS in more)

    def positions(self) -> Tensor:
        """(B, S) int64: the position of every token inside its document (or piece of one)."""
        rows, tokens = self.ids_BS.shape
        ends = self.flat_bounds()
        inside = [torch.arange(stop - start) for start, stop in itertools.pairwise(ends)]
        return torch.cat(inside).view(rows, tokens).to(self.ids_BS.device)

    def count(self) -> int:
        """The number of targets that count: that are there and have a weight other than 0."""
        valid_BS = self.targets_BS != IGNORE
        if self.weights_BS is not None:
            valid_BS &= self.weights_BS != 0
        return int(valid_BS.sum())

    def weight(self) -> float:
        """The sum of the targets' weights, by which their losses are divided. OutsizeError
        for one that is negative or no number."""
        if self.weights_BS is None:
            return float(self.count())
        weights = self.weights_BS[self.targets_BS != IGNORE].double()
        wrong = weights[~((weights >= 0) & weights.isfinite())]
        if len(wrong):
            raise OutsizeError(
                f"batch: the weight of a target is {float(wrong[0])};"
                " expected a finite number, 0 or more"
            )
        return float(weights.sum())

    def changed(
        self,
        change: Callable[[Tensor], Tensor],
        bounds: tuple[tuple[int, ...], ...],
        noise: Noise | None = None,
    ) -> Batch:
        """Every tensor (B, S) changed alike, rows or tokens taken; bounds are the result's."""
        weights_BS = None if self.weights_BS is None else change(self.weights_BS)
        columns = {name: change(x_BS) for name, x_BS in self.columns.items()}
        ids_BS, targets_BS = change(self.ids_BS), change(self.targets_BS)
        return Batch(ids_BS, targets_BS, bounds, noise, weights_BS, columns)

    def rows(self, start: int, stop: int) -> Batch:
        """The microbatch of rows start .. stop - 1; the tensors are views."""
        here = slice(start, stop)
        noise = None if self.noise is None else self.noise.at(start * self.ids_BS.shape[1])
        return self.changed(lambda x_BS: x_BS[here], self.bounds[here], noise)

    def tokens(self, spans: Sequence[Span]) -> Batch:
        """Of every row the tokens of some stretches, in order; a document is cut where they are."""
        tokens = self.ids_BS.shape[1]
        if tuple(spans) == ((0, tokens),):
            return self
        own = (itertools.chain.from_iterable(_parts(row, spans)) for row in self.bounds)
        bounds = tuple((0, *itertools.accumulate(b - a for a, b in row)) for row in own)
        noise = self.noise
        if noise is not None:
            starts = range(0, len(self.bounds) * tokens, tokens)
            noise = replace(noise, spans=tuple((s + a, s + b) for s in starts for a, b in spans))
        return self.changed(lambda x_BS: taken(x_BS, spans), bounds, noise)

    def lengths(self, spans: Sequence[Span]) -> tuple[int, ...]:
        """Tokens of the documents that those of `tokens(spans)` are parts of."""
        found = list[int]()
        for row in self.bounds:
            for first, _ in itertools.chain.from_iterable(_parts(row, spans)):
                at = bisect_right(row, first)
                found.append(row[at] - row[at - 1])
        return tuple(found)

    def flat_bounds(self) -> tuple[int, ...]:
        """Cumulative document offsets (0, ..., T) for the rows laid flat, one after another."""
        tokens = self.ids_BS.shape[1]
        ends = (row * tokens + end for row, own in enumerate(self.bounds) for end in own[1:])
        return (0, *ends)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with its tensors on `device`."""
        return self.changed(lambda x_BS: x_BS.to(device), self.bounds, self.noise)


def taken(x_BS: Tensor, spans: Sequence[Span]) -> Tensor:
    """Of every row the tokens of some stretches."""
    if tuple(spans) == ((0, x_BS.shape[1]),):
        return x_BS
    return torch.cat([x_BS[:, first:last] for first, last in spans], 1)


def _parts(bounds: tuple[int, ...], spans: Sequence[Span]) -> Iterator[Iterator[Span]]:
    """By stretch of a row, the parts of its documents that lie there."""
    for first, last in spans:
        ends = [first + end for end in clip(bounds, first, last)]
        yield itertools.pairwise(ends)
