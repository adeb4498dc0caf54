"""Magnitude pruning of a model's directory: the smallest weights of each matrix become zeros.

Han et al., "Learning both Weights and Connections for Efficient Neural Networks", 2015; the same
share of every matrix: Zimmer et al., "PERP", 2023. N of every M weights that follow each other in a
row stay: Mishra et al., "Accelerating Sparse Deep Neural Networks", 2021. Of equal magnitudes those
that come first go.

Pruned are the matrices of the blocks: those of Linears, and of each expert. Routers, norms, biases,
embeddings and the head are written as they are. One stored tensor is in memory at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outsize.checkpoint.contents import WEIGHTS, merged, write_groups
from outsize.checkpoint.hub import MAX_SHARD_BYTES, TOKENS, Described, check_tied_head
from outsize.checkpoint.shards import SUMS, sums_json
from outsize.checkpoint.writing import write_json
from outsize.errors import OutsizeError
from outsize.models.declared import declarations
from outsize.models.linear import linears

_ROWS = 1 << 20  # weights whose order in their groups is known at once


@dataclass(frozen=True)
class Pruning:
    """How much of a matrix becomes zeros: a share of it or, where of is not 0, all but `stay` of
    every `of` weights of a row."""

    share: float = 0.0
    stay: int = 0
    of: int = 0

    def check(self, name: str, d_in: int) -> None:
        """OutsizeError where groups do not divide the rows of a matrix."""
        if self.of and d_in % self.of:
            raise OutsizeError(
                f"--prune {self.stay}:{self.of}: groups of {self.of} do not divide the {d_in}"
                f" inputs of {name}; choose other groups, or a share"
            )

    @torch.no_grad()
    def __call__(self, weight: Tensor) -> None:
        """Zero the smallest of a matrix (d_out, d_in), in its place."""
        if self.of:
            for rows in weight.split(max(1, _ROWS // weight.shape[1])):
                _zero_in_groups(rows, self.stay, self.of)
        else:
            _zero(weight, round(self.share * weight.numel()))


def parse(text: str) -> Pruning:
    """What --prune says: 0.5, or 2:4. OutsizeError for what is neither."""
    stay, colon, of = text.partition(":")
    try:
        if colon and 0 < int(stay) < int(of):
            return Pruning(stay=int(stay), of=int(of))
        if not colon and 0 < float(text) < 1:
            return Pruning(share=float(text))
    except ValueError:
        pass
    raise OutsizeError(
        f"--prune {text}: expected a share of each matrix above 0 and below 1, as 0.5, or N:M with"
        " N below M, as 2:4 where 2 of every 4 stay"
    )


def _zero(weight: Tensor, count: int) -> None:
    """Zero the `count` smallest of a matrix."""
    if count == 0:
        return
    wide = torch.promote_types(weight.dtype, torch.float32)
    size = weight.abs().to(wide).flatten().numpy()
    bound = np.partition(size, count - 1)[count - 1]
    out = size < bound
    ties = np.flatnonzero(size == bound)
    out[ties[: count - np.count_nonzero(out)]] = True
    weight.masked_fill_(torch.from_numpy(out).view_as(weight), 0)


def _zero_in_groups(rows: Tensor, stay: int, of: int) -> None:
    size = rows.abs().unflatten(1, (-1, of))
    smallest = size.argsort(dim=2, stable=True)[..., : of - stay]
    out = torch.zeros_like(size, dtype=torch.bool).scatter_(2, smallest, True)
    rows.masked_fill_(out.flatten(1), 0)


@dataclass
class Count:
    """Of the matrices that were pruned."""

    zeros: int = 0
    weights: int = 0


def write(found: Described, pruning: Pruning, count: Count, directory: Path) -> None:
    """The files of a directory's weights, pruned, with their checksums; counts in `count`.
    OutsizeError as of Pruning.check before anything is written, and as of loading."""
    model, matrices = found.model, _matrices(found)
    values, dtypes, fill = dict(model.named_parameters()), found.dtypes(None), found.fill(None)
    for name in filter(matrices.__contains__, values):
        pruning.check(name, values[name].shape[-1])

    def like(name: str) -> Tensor:
        return torch.empty(values[name].shape, dtype=dtypes[name], device="meta")

    def read(name: str) -> Tensor:
        x = fill(name, values[name])
        if name in matrices:
            for matrix in x if x.dim() == 3 else (x,):
                pruning(matrix)
            count.zeros += x.numel() - int(x.count_nonzero())
            count.weights += x.numel()
        return x

    check_tied_head(found.shards, model.config, lambda: read(TOKENS))
    stored = merged(found.stored, like, read)
    files = write_groups(directory, ((WEIGHTS, *one) for one in stored), MAX_SHARD_BYTES)
    write_json(directory / SUMS, sums_json(files))


def _matrices(found: Described) -> set[str]:
    """Names of the weights (d_out, d_in), or of experts (count, d_out, d_in), that are pruned."""
    own = {f"{name}.weight" for name, _ in linears(found.model)}
    return own | {name for name, one in declarations(found.model) if one.stack == "experts"}
