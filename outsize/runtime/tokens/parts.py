"""The parameters of each stage of a streamed model, and where they lie in the files.

Most are read where they are: a stored tensor, or runs of rows of several (fused and stacked ones).
Which, is found by sending the numbers of their rows through the conversion that a family declares.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from outsize.checkpoint.files import Entry
from outsize.checkpoint.hub import TOKENS, Described
from outsize.memory.stored import Copy
from outsize.models.build import rest, segments
from outsize.models.cuts import NO_CUTS, Cut, Span
from outsize.models.names import Stored

LINE = 64  # bytes: parameters begin where PyTorch's own would, so that kernels do the same
_PROBE = 2  # columns of a probe: how rows are laid out is what is asked


@dataclass(frozen=True)
class Mine:
    """What a worker has of a model. cuts: how parameters lie here, by name; of others everything.
    here: by segment whether it is this worker's; empty: all are."""

    cuts: Mapping[str, Cut] = field(default_factory=lambda: NO_CUTS)
    here: tuple[bool, ...] = ()

    def has(self, segment: int) -> bool:
        return not self.here or self.here[segment]

    def cut(self, name: str, shape: Sequence[int]) -> Cut:
        """Of a parameter of such a shape."""
        return self.cuts.get(name, Cut(tuple(shape)))


ALL = Mine()


@dataclass(frozen=True)
class Part:
    """One parameter in its stage's room: bytes [offset, offset + bytes). shape: of what is here;
    cut: what of the whole that is. copies: where it lies in the files, relative to the room; none:
    it is converted."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    copies: tuple[Copy, ...]
    cut: Cut

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def of(self, room: Tensor) -> Tensor:
        """Its view of the room, 1-D uint8."""
        return room[self.offset : self.offset + self.bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Stage:
    """The parameters that pass through the pool together."""

    parts: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        """Of its room."""
        return max((part.offset + part.bytes for part in self.parts), default=0)


@dataclass(frozen=True)
class Table:
    """The token embedding as it lies, for what looks up single rows. dtype: the stored one; span:
    the rows that this worker looks up."""

    path: Path
    start: int
    rows: int
    width: int
    dtype: torch.dtype
    target: torch.dtype
    span: Span

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    def copies(self, ids: Iterable[int]) -> tuple[Copy, ...]:
        """Rows of these ids, one behind another."""
        size = self.row_bytes
        return tuple(
            Copy(self.path, self.start + each * size, i * size, size) for i, each in enumerate(ids)
        )


def stages_of(found: Described, dtype: torch.dtype | None, mine: Mine = ALL) -> tuple[Stage, ...]:
    """What each of the model's segments has in the pool; those of other workers nothing. The
    prologue reads single rows of the token embedding: a tied one is the head's, another one is in
    no room."""
    named = [list(names) for _, names in segments(found.model)]
    named[0].remove(TOKENS)
    if found.model.config.tied:
        named[-1].append(TOKENS)
    shapes = {name: tuple(x.shape) for name, x in found.model.named_parameters()}
    cuts = {name: mine.cut(name, shape) for name, shape in shapes.items()}
    source = {ours: entry for entry in found.stored for ours in entry.ours}
    return tuple(
        Stage(_parts(found, names if mine.has(s) else (), cuts, source, dtype))
        for s, names in enumerate(named)
    )


def table_of(found: Described, dtype: torch.dtype | None, mine: Mine = ALL) -> Table:
    """The token embedding in the files."""
    (theirs,) = next(entry.theirs for entry in found.stored if TOKENS in entry.ours)
    path, entry = found.entry(theirs)
    rows, width = entry.shape
    cut = mine.cut(TOKENS, entry.shape)
    span = (0, rows) if cut.dim is None else cut.spans[0]
    target = rest(TOKENS, dtype or entry.dtype)
    return Table(path, entry.start, rows, width, entry.dtype, target, span)


def _parts(
    found: Described,
    names: Sequence[str],
    cuts: Mapping[str, Cut],
    source: Mapping[str, Stored],
    dtype: torch.dtype | None,
) -> tuple[Part, ...]:
    parts, offset = [], 0
    for name in names:
        entry, cut = source[name], cuts[name]
        held = rest(name, dtype or found.entry(entry.theirs[0])[1].dtype)
        copies = in_place(found, entry, name, cut, held, offset)
        parts.append(Part(name, cut.local, held, offset, copies, cut))
        assert not copies or sum(c.bytes for c in copies) == parts[-1].bytes, name
        offset += -(-parts[-1].bytes // LINE) * LINE
    return tuple(parts)


def in_place(
    found: Described,
    entry: Stored,
    name: str,
    cut: Cut,
    dtype: torch.dtype,
    offset: int,
) -> tuple[Copy, ...]:
    """Where what is here of a parameter lies in the files as it is; none where its rows are not
    rows there, and where rows are cut: pieces so short are read in one stretch after conversion."""
    spans, shape = [found.entry(theirs) for theirs in entry.theirs], cut.whole
    if any(x.dtype != dtype or not x.shape for _, x in spans):
        return ()
    if cut.dim is not None and len(shape) > 1 and cut.dim == len(shape) - 1:
        return ()
    probes, first = [], 0
    for _, x in spans:  # every row's number, in as many columns as tell rows from columns
        numbers = torch.arange(first, first + x.shape[0])
        probes.append(numbers if len(x.shape) == 1 else numbers[:, None].repeat(1, _PROBE))
        first += x.shape[0]
    try:
        ours = entry.split(tuple(probes))[entry.ours.index(name)]
    except RuntimeError:  # rows are asked for of what the files have as columns
        return ()
    if tuple(ours.shape) != (shape if len(shape) == 1 else (*shape[:-1], _PROBE)):
        return ()
    ours = cut.of(ours)
    rows = ours.reshape(-1) if len(shape) == 1 else ours.reshape(-1, _PROBE)
    if rows.dim() == 2 and not torch.equal(rows[:, 0], rows[:, 1]):
        return ()
    width = (1 if len(shape) == 1 else shape[-1]) * dtype.itemsize
    return tuple(_row_copies(spans, rows if rows.dim() == 1 else rows[:, 0], width, offset))


def _row_copies(
    spans: Sequence[tuple[Path, Entry]], rows: Tensor, width: int, offset: int
) -> Iterator[Copy]:
    """Rows by their numbers over all tensors, those that follow one another as one copy."""
    starts = [0, *accumulate(entry.shape[0] for _, entry in spans)]
    fresh = torch.isin(rows, torch.tensor(starts))
    fresh[1:] |= rows[1:] != rows[:-1] + 1
    fresh[:1] = True
    begins = fresh.nonzero().flatten().tolist()
    for begin, end in pairwise([*begins, len(rows)]):
        number = int(rows[begin])
        tensor = bisect_right(starts, number) - 1
        path, entry = spans[tensor]
        start = entry.start + (number - starts[tensor]) * width
        yield Copy(path, start, offset + begin * width, (end - begin) * width)
