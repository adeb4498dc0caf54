"""Spill files: how one run of bytes lies in unnamed files of several folders.

Space is taken before it is used, so that a full disk is known before work starts; what the system
refuses becomes one line that names the tier, the folder, its reason and what to do.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from outsize.errors import OutsizeError
from outsize.hardware.disk import OPERATION, open_direct, preallocate

STRIPE = 4 * OPERATION  # of each directory in turn
_REMEDIES = {
    errno.ENOSPC: "free some space there, or name a folder on another disk",
    errno.EDQUOT: "raise the quota, or name a folder on another disk",
    errno.EFBIG: "raise the limit on file sizes (`ulimit -f`), or name more folders",
    errno.EROFS: "name a folder on a disk that can be written",
    errno.EACCES: "name a folder that this user may write to",
    errno.ENOENT: "make the folder, or name one that is there",
    errno.EIO: "the disk is failing: go on from the last checkpoint with a folder on another disk",
}


@dataclass(frozen=True)
class Piece:
    """bytes of one file from offset on."""

    file: int
    offset: int
    bytes: int


@dataclass(frozen=True)
class Stripes:
    """How one run of bytes lies in several files: STRIPE bytes of each in turn."""

    files: int

    def pieces(self, offset: int, nbytes: int) -> Iterator[Piece]:
        """Where bytes [offset, offset + nbytes) lie, in order. One file is never cut."""
        if self.files == 1:
            yield Piece(0, offset, nbytes)
            return
        while nbytes > 0:
            stripe, inside = divmod(offset, STRIPE)
            turn, file = divmod(stripe, self.files)
            length = min(nbytes, STRIPE - inside)
            yield Piece(file, turn * STRIPE + inside, length)
            offset, nbytes = offset + length, nbytes - length

    def share(self, total: int, file: int) -> int:
        """Bytes that a file holds of the first `total`."""
        rounds, rest = divmod(total, STRIPE * self.files)
        return rounds * STRIPE + min(max(rest - file * STRIPE, 0), STRIPE)


class SpillFile:
    """One unnamed file and the folder that it lies in."""

    def __init__(self, tier: str, folder: Path) -> None:
        self._tier, self.folder, self._size = tier, folder, 0
        try:
            self.handle, self.direct = open_direct(folder)
        except OSError as error:
            raise OutsizeError(refused(tier, "making a file in", folder, error)) from None

    def free(self) -> int:
        """Bytes that the file system would give this user."""
        found = os.fstatvfs(self.handle)
        return found.f_bavail * found.f_frsize

    def device(self) -> int:
        """The number of the file system."""
        return os.fstat(self.handle).st_dev

    def grow(self, size: int) -> None:
        """Take the space up to this size."""
        if size <= self._size:
            return
        free = self.free()
        try:
            preallocate(self.handle, self._size, size - self._size)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise OutsizeError(self.short(size - self._size, free)) from None
            raise OutsizeError(
                refused(self._tier, "growing a file in", self.folder, error)
            ) from None
        self._size = size

    def close(self) -> None:
        os.close(self.handle)

    def short(self, wanted: int, free: int) -> str:
        """What to say where there is less room than wanted."""
        return (
            f"tier {self._tier!r}: {wanted:,} bytes wanted under {self.folder}, {free:,} free,"
            f" {max(wanted - free, 1):,} missing; {_REMEDIES[errno.ENOSPC]}"
        )


def expect(files: Sequence[SpillFile], stripes: Stripes, capacity: int) -> None:
    """OutsizeError unless there is room for all shares now, those on one disk together."""
    for device in {file.device() for file in files}:
        shares = [
            (file, stripes.share(capacity, index))
            for index, file in enumerate(files)
            if file.device() == device
        ]
        wanted, free = sum(share for _, share in shares), shares[0][0].free()
        if free < wanted:
            raise OutsizeError(shares[0][0].short(wanted, free))


def refused(tier: str, doing: str, folder: Path, error: OSError) -> str:
    """The line for an error of the system, with its reason and a remedy."""
    remedy = _REMEDIES.get(error.errno or 0, "name a folder on another disk")
    return f"tier {tier!r}: {doing} {folder} failed ({error.strerror}); {remedy}"
