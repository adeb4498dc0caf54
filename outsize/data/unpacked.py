"""Files as bytes, those that are compressed (gzip, Zstandard) unpacked while they are read."""

from __future__ import annotations

import errno
import gzip
import importlib
import io
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Literal

from outsize.errors import OutsizeError

Packed = Literal["", "gz", "zst"]
PACKED: Mapping[str, Packed] = MappingProxyType({".gz": "gz", ".zst": "zst"})
_NAMES = {"gz": "gzip", "zst": "Zstandard"}


@contextmanager
def opened(
    path: Path, packed: Packed = "", told: Callable[[int], None] = lambda count: None
) -> Iterator[BinaryIO]:
    """A file to read. told: called with the bytes that were read from disk, as they are.

    OSError where it cannot be read, or is not what its suffix says; OutsizeError where the package
    for it is missing."""
    with ExitStack() as stack:
        raw = stack.enter_context(path.open("rb", buffering=0))
        below = io.BufferedReader(_Reading(raw, told))
        if not packed:
            yield below
            return
        inner, broken = _unpacking(path, packed, below)
        yield io.BufferedReader(_Reading(inner, lambda count: None, broken, _NAMES[packed]))


def _unpacking(
    path: Path, packed: Packed, below: BinaryIO
) -> tuple[Any, tuple[type[Exception], ...]]:
    """What reads the content, and what it raises for a file that is damaged."""
    if packed == "gz":
        return gzip.GzipFile(fileobj=below), (gzip.BadGzipFile, EOFError, zlib.error)
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError:
        raise OutsizeError(
            f"data file {path} is compressed with Zstandard, which needs the package zstandard:"
            " pip install 'outsize[data]'"
        ) from None
    return _Frames(below, zstandard), (zstandard.ZstdError,)


class _Frames:
    """Frames of Zstandard, one after another: the package's own reader takes the end of a file for
    the end of a frame that is cut off there."""

    def __init__(self, below: BinaryIO, zstandard: Any) -> None:
        self._below, self._package = below, zstandard
        self._frame: Any = None  # None between frames
        self._left = b""

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            raw = self._below.read(io.DEFAULT_BUFFER_SIZE)
            if not raw:
                if self._frame is not None:
                    raise self._package.ZstdError("the file ends inside a frame")
                return 0
            while raw:
                if self._frame is None:
                    self._frame = self._package.ZstdDecompressor().decompressobj()
                self._left += self._frame.decompress(raw)
                raw = self._frame.unused_data if self._frame.eof else b""
                if self._frame.eof:
                    self._frame = None
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count


class _Reading(io.RawIOBase):
    """Another reader, whose faults are OSErrors with a reason, and whose bytes are told."""

    def __init__(
        self,
        inner: Any,
        told: Callable[[int], None],
        broken: tuple[type[Exception], ...] = (),
        what: str = "",
    ) -> None:
        self._inner, self._told, self._broken, self._what = inner, told, broken, what

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            count: int = self._inner.readinto(buffer) or 0
        except self._broken as error:
            raise OSError(errno.EIO, f"not readable as {self._what}: {error}") from None
        self._told(count)
        return count
