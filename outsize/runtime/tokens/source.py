"""Reads the stages of a streamed model into their rooms.

Most parameters are read where they lie in the files (parts.py). Those that rest transposed or in
another dtype, and those that are smaller as bitmap images, are converted once into a spill file,
which vanishes with the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from outsize.checkpoint.hub import Described
from outsize.errors import OutsizeError
from outsize.hardware.disk import OPERATION
from outsize.memory import sparse
from outsize.memory.disk import DiskStore
from outsize.memory.store import Place, pool, rounded
from outsize.memory.stored import (
    STAGING,
    Buffers,
    Copy,
    Operation,
    StoredFiles,
    buffers_of,
    operations,
)
from outsize.models.names import Stored
from outsize.runtime.tokens.parts import ALL, Mine, Part, Stage, Table, stages_of, table_of

WORTH = 0.8  # of the dense bytes at most: an image costs a pass of unpacking
SHARE = 1 / 16  # of the weights' bytes, at most, for buffers to read files through
SPILL_BUFFERS = 2  # what is converted is read straight into its room, but for its end
_SMALL = 64 << 10  # bytes below which nothing is gained by an image


@dataclass(frozen=True)
class _Image:
    """A converted parameter in the spill file. packed: as a bitmap image (memory/sparse.py)."""

    place: Place
    packed: bool


@dataclass(frozen=True)
class Outline:
    """What a Source will be, while no file is open; but for bitmap images, which are smaller."""

    stages: tuple[Stage, ...]
    table: Table
    buffers: Buffers

    @property
    def bytes_held(self) -> int:
        converts = any(not part.copies for stage in self.stages for part in stage.parts)
        return self.buffers.total + SPILL_BUFFERS * OPERATION * converts

    def cost(self, stage: int) -> int:
        """Bytes that a fetch of a stage reads."""
        return sum(part.bytes for part in self.stages[stage].parts)


def outline(found: Described, dtype: torch.dtype | None, mine: Mine = ALL) -> Outline:
    """Of a model in files, or of what a worker has of it."""
    stages = stages_of(found, dtype, mine)
    buffers = buffers_of(int(SHARE * sum(stage.bytes for stage in stages)))
    return Outline(stages, table_of(found, dtype, mine), buffers)


class Source:
    """Reads stages of a model and rows of its token embedding.

    folder: where what must be converted goes. sparse: parameters of which WORTH at most is left
    as a bitmap image are kept as one. mine: what this worker has. pinned: its buffers are
    page-locked, for an accelerator. OutsizeError where the folder has not the room.
    """

    def __init__(
        self,
        found: Described,
        dtype: torch.dtype | None,
        folder: Path,
        sparse: bool = False,
        mine: Mine = ALL,
        pinned: bool = False,
    ) -> None:
        known = outline(found, dtype, mine)
        self.stages, self.table, self.tied = known.stages, known.table, found.model.config.tied
        paths = dict.fromkeys(found.entry(t)[0] for entry in found.stored for t in entry.theirs)
        self.files = StoredFiles(paths, known.buffers, pinned)
        self.pinned = pinned
        self.spill: DiskStore | None = None
        self._images: dict[str, _Image] = {}
        self._unpack: Tensor | None = None
        try:
            _check_tied(found, self.table)
            self._convert(found, dtype, folder, sparse)
        except BaseException:
            self.close()
            raise
        most = self.files.buffers.bytes
        self._operations: tuple[tuple[Operation, ...], ...] = tuple(
            operations((c for part in stage.parts for c in self._direct(part)), most)
            for stage in self.stages
        )

    @property
    def bytes_read(self) -> int:
        """Payload read of all files."""
        return self.files.bytes_read + (self.spill.bytes_read if self.spill else 0)

    @property
    def bytes_spilled(self) -> int:
        """Of converted parameters."""
        return sum(image.place.bytes for image in self._images.values())

    @property
    def bytes_held(self) -> int:
        """Of memory, to read through and to unpack images in."""
        spill = 0 if self.spill is None else self.spill.bytes_held
        unpack = 0 if self._unpack is None else self._unpack.nbytes
        return self.files.buffers.total + spill + unpack

    def cost(self, stage: int) -> int:
        """Bytes that a fetch of a stage reads."""
        return sum(
            self._images[part.name].place.bytes if part.name in self._images else part.bytes
            for part in self.stages[stage].parts
        )

    def read(self, stage: int, room: Tensor) -> None:
        """All parameters of a stage into its room (1-D uint8)."""
        self.files.read(self._operations[stage], room)
        for part in self.stages[stage].parts:
            if part.name in self._images:
                self._read_image(self._images[part.name], part.of(room))

    def rows(self, ids: Sequence[int]) -> Tensor:
        """Rows of the token embedding, (len(ids), width), in the model's dtype."""
        return _rows(self.files, self.table, ids).to(self.table.target)

    def close(self) -> None:
        """Let files and buffers go."""
        self.files.close()
        if self.spill is not None:
            self.spill.close()

    def _direct(self, part: Part) -> tuple[Copy, ...]:
        """What is read of a part where it lies."""
        return () if part.name in self._images else part.copies

    def _read_image(self, image: _Image, out: Tensor) -> None:
        assert self.spill is not None
        if not image.packed:
            self.spill.read(image.place, out)
            return
        assert self._unpack is not None
        packed = self._unpack[: image.place.bytes]
        self.spill.read(image.place, packed)
        if out.device.type == "cpu":
            sparse.unpack(packed, out.view(-1))
            return
        unpacked = torch.empty(out.numel(), dtype=out.dtype)
        sparse.unpack(packed, unpacked)
        out.copy_(unpacked.view(out.shape))

    def _convert(
        self, found: Described, dtype: torch.dtype | None, folder: Path, sparse_too: bool
    ) -> None:
        wanted = [p for stage in self.stages for p in stage.parts if sparse_too or not p.copies]
        if not wanted:
            return
        size = sum(rounded(part.bytes) for part in wanted)
        self.spill = DiskStore("converted", [folder], size, SPILL_BUFFERS, self.pinned)
        fill, meta = found.fill(dtype), dict(found.model.named_parameters())
        largest = 0
        for part in _grouped(wanted, found.stored):
            flat = part.cut.of(fill(part.name, meta[part.name]).detach()).flatten()
            large = sparse_too and part.bytes >= _SMALL
            packed = large and sparse.packed_bytes(flat) <= WORTH * part.bytes
            if part.copies and not packed:
                continue
            image = sparse.pack(flat) if packed else flat.contiguous().view(torch.uint8)
            place = self.spill.reserve(image.nbytes)
            self.spill.write(place, image)
            self._images[part.name] = _Image(place, packed)
            largest = max(largest, image.nbytes if packed else 0)
        self._unpack = pool(largest) if largest else None


def _grouped(parts: Iterable[Part], stored: Iterable[Stored]) -> list[Part]:
    """Those that rest in one tensor behind one another: it is read once for all of them."""
    turn = {name: i for i, entry in enumerate(stored) for name in entry.ours}
    return sorted(parts, key=lambda part: turn[part.name])


def _check_tied(found: Described, table: Table) -> None:
    """Files may hold a tied head beside the embedding; another one would be another model."""
    head = f"{found.model.config.names.outer['epilogue.head']}.weight"
    if not found.model.config.tied or head not in found.shards.where:
        return
    path, entry = found.shards.where[head].path, found.shards.entry(head)
    if entry.shape != (table.rows, table.width):
        raise OutsizeError(
            f"{path}: tensor {head!r} has shape {entry.shape}, expected {(table.rows, table.width)}"
        )
    other = replace(table, path=path, start=entry.start, dtype=entry.dtype, target=entry.dtype)
    files = StoredFiles({path, table.path})
    try:
        step = max(1, STAGING // table.row_bytes)
        for first in range(0, table.rows, step):
            ids = range(first, min(first + step, table.rows))
            if not torch.equal(_rows(files, other, ids), _rows(files, table, ids)):
                raise OutsizeError(
                    f"{path}: tensor {head!r} is not the token embedding, expected equal ones: set"
                    " tie_word_embeddings to false in config.json"
                )
    finally:
        files.close()


def _rows(files: StoredFiles, table: Table, ids: Sequence[int]) -> Tensor:
    """Rows of a table as they are stored."""
    raw = torch.empty(len(ids) * table.row_bytes, dtype=torch.uint8)
    files.read(operations(table.copies(ids), files.buffers.bytes), raw)
    return raw.view(table.dtype).view(len(ids), table.width)
