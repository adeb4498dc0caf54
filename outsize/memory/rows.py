"""Rows of one size in a file, read a few at a time at random and past the page cache.

A Store reads blocks of a mebibyte; what is asked for here is a few kilobytes out of many places, as
row-column bundles are (outsize/memory/neurons.py). Rows that lie next to each other are read at
once, and several threads keep the disk busy. The file has no name: it is gone with its descriptor.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.hardware.disk import open_direct, preallocate, read_all, write_all
from outsize.memory.store import ALIGN, pool

THREADS = 4  # 4 KiB at random, this machine: 50k reads/s with 1, 87k with 4, 98k with 16

Run = tuple[int, int, int]  # first row of the file, first row of the buffer, how many


class RowFile:
    """`count` rows of `nbytes` bytes, each padded to a multiple of ALIGN, under `folder`.

    A row's checksum is the 64-bit sum of its words: a change of any one word is seen. Several
    reads may run at the same time, each into a buffer of its own.
    """

    def __init__(self, folder: Path, count: int, nbytes: int, threads: int = THREADS) -> None:
        self.count, self.stride = count, -(-nbytes // ALIGN) * ALIGN
        self.bytes_read = 0
        self._folder = folder
        self._sums = np.zeros(count, np.uint64)
        self._handle, self._direct = _opened(folder, count * self.stride)
        self._open = True
        self._threads, self._workers = threads, ThreadPoolExecutor(threads, "rows")

    def buffer(self, rows: int) -> Tensor:
        """(rows, stride) uint8, zero, aligned as `read` and `write` ask."""
        return pool(rows * self.stride).view(rows, self.stride)

    def write(self, first: int, data: Tensor) -> None:
        """Rows from `first` on; data is some of a `buffer`. OutsizeError where the disk fails."""
        self._sums[first : first + len(data)] = _sums(data.numpy())
        self._move(write_all, (first, 0, len(data)), data.numpy())

    def read(self, ids: Tensor, out: Tensor) -> None:
        """Row ids[i] (int64, ascending) to out[i]; out is some of a `buffer`.

        Raises OutsizeError where the disk fails or a row is not what was written.
        """
        wanted, into = ids.numpy(), out.numpy()
        shares = _shares(wanted, self._threads)
        list(self._workers.map(lambda runs: self._read(runs, into), shares))
        self.bytes_read += out.nbytes

    def close(self) -> None:
        """Let the file go."""
        self._workers.shutdown()
        if self._open:
            os.close(self._handle)
        self._open = False

    def _read(self, runs: Sequence[Run], out: NDArray[Any]) -> None:
        for run in runs:
            first, at, rows = run
            self._move(read_all, run, out)
            wrong = _sums(out[at : at + rows]) != self._sums[first : first + rows]
            if wrong.any():
                raise OutsizeError(
                    f"row {first + int(wrong.argmax())} of the file in {self._folder} is not what "
                    "was written; the disk or another process changed it: load the model again"
                )

    def _move(self, call: Callable[..., None], run: Run, data: NDArray[Any]) -> None:
        first, at, rows = run
        view = memoryview(data[at : at + rows].reshape(-1).data)
        try:
            call(self._handle, view, first * self.stride, self._direct)
        except OSError as error:
            raise OutsizeError(
                f"rows of a model in {self._folder} cannot be moved ({error.strerror}); name a "
                f"folder on a disk that works, with {self.count * self.stride:,} bytes free"
            ) from None


def runs(ids: NDArray[Any]) -> Iterator[Run]:
    """Ascending rows as runs of neighbours."""
    cuts = np.flatnonzero(np.diff(ids) != 1) + 1
    starts = [0, *cuts.tolist()]
    for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
        if stop > start:
            yield int(ids[start]), start, stop - start


def _shares(ids: NDArray[Any], threads: int) -> list[list[Run]]:
    """The runs, cut into as many shares as there are threads, alike in rows."""
    edges = np.linspace(0, len(ids), threads + 1).astype(np.int64)
    shares = []
    for start, stop in itertools.pairwise(edges.tolist()):
        if stop > start:
            share = runs(ids[start:stop])
            shares.append([(first, start + at, rows) for first, at, rows in share])
    return shares


def _sums(rows: NDArray[Any]) -> NDArray[Any]:
    sums: NDArray[Any] = rows.view(np.uint64).sum(axis=1, dtype=np.uint64)
    return sums


def _opened(folder: Path, nbytes: int) -> tuple[int, bool]:
    """A file without a name and with its space taken, and whether it is direct."""
    try:
        handle, direct = open_direct(folder)
        try:
            preallocate(handle, 0, max(nbytes, 1))
        except OSError:
            os.close(handle)
            raise
    except OSError as error:
        raise OutsizeError(
            f"{folder}: cannot hold {nbytes:,} bytes of a model's rows ({error.strerror}); name a "
            "folder on a disk with that much free"
        ) from None
    return handle, direct
