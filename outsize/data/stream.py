"""Batches in order: training batches as a function of (seed, step), read ahead by a thread, with a
cursor that goes on exactly; validation batches in one fixed order.

Samples are rows, numbered over the whole run: sample k is row k mod R of epoch k // R, where R is
the rows of an epoch. Step t has the samples t * rows .. (t + 1) * rows - 1, so sample k is the
same row for any batch size and any number of data-parallel readers. In a mixture each data path has
rows of its own; which path a sample is of depends on seed and sample too (outsize/data/mixture.py).
A run that goes on with other
rows a step, or other data, counts from the step and sample at which it does.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from outsize import typed
from outsize.data.batch import IGNORE, Batch, Span
from outsize.data.dataset import Dataset
from outsize.data.mixture import Mixture
from outsize.data.packing import Layout, Row, layout
from outsize.data.whole import Whole, in_pieces, pack
from outsize.errors import OutsizeError, counted
from outsize.plan.spread import share

AHEAD = 2  # batches that are made before they are asked for
_LAYOUTS_KEPT = 2  # a step may lie across two epochs


@dataclass(frozen=True)
class Cursor:
    """Where a run is in its data: `sample` rows have been read. As JSON in a checkpoint."""

    sample: int
    epoch: int  # of the next sample; follows from the rest, for people
    seed: int
    sequence: int
    data: str  # fingerprint of the dataset

    def to_json(self) -> dict[str, int | str]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: Any) -> Cursor:
        """Raises OutsizeError when `found` is not what `to_json` gave."""
        made: Cursor = typed.read(cls, found, "data cursor")
        return made


class TrainStream:
    """The training batches of a run: `rows` rows of `sequence` tokens a step. virtual: tokens of
    them that stand before each document, which is then packed whole, or as pieces that are."""

    def __init__(
        self, data: Dataset, seed: int, rows: int, sequence: int, virtual: int = 0
    ) -> None:
        """Raises OutsizeError when the data does not fill one row."""
        if rows < 1 or sequence < 1:
            raise OutsizeError(f"rows {rows} of {sequence} tokens: expected at least 1 of 1")
        if not data.shares:
            data = _behind(data, sequence, virtual)
        self.data, self.seed, self.rows, self.sequence = data, seed, rows, sequence
        self._mixture = Mixture(data.shares, seed) if data.shares else None
        self._parts: list[TrainStream] = [
            _part(number, part, (seed, rows, sequence, virtual))
            for number, part in enumerate(_parts(data))
        ]
        whole = data.whole and not self._parts
        self._whole = pack(data, seed, sequence, virtual) if whole else None
        self.rows_per_epoch: int = sum(part.rows_per_epoch for part in self._parts) or (
            data.tokens // sequence if self._whole is None else len(self._whole.documents)
        )
        if not self.rows_per_epoch:
            raise OutsizeError(
                f"training data has {counted(data.tokens, 'token')}, less than one row of"
                f" {sequence}: "
                f"give more data or set the sequence length to at most {data.tokens}"
            )
        self._layouts: dict[int, Layout | Whole] = {}
        self._lock = threading.Lock()
        self._from = (0, 0)  # a step, and the first of its samples

    def batch(self, step: int, own: Span | None = None) -> Batch:
        """The batch of a step (0, 1, ...); own: of its rows, the first and the end of those that
        are wanted."""
        start, stop = own or (0, self.rows)
        first = self.sample(step)
        return _collate([self.row(sample) for sample in range(first + start, first + stop)])

    def sample(self, step: int) -> int:
        """The first sample of a step."""
        then, sample = self._from
        return sample + (step - then) * self.rows

    def row(self, sample: int) -> Row:
        """Row number `sample` of the run."""
        if self._mixture is not None:
            part, sample = self._mixture.place(sample)
            return self._parts[part].row(sample)
        epoch, index = divmod(sample, self.rows_per_epoch)
        order = self._layout(epoch)
        return order.read(self.data, int(order.rows[index]), self.sequence)

    def cursor(self, step: int) -> Cursor:
        """The cursor after `step` steps (before batch number `step`)."""
        sample = self.sample(step)
        return Cursor(
            sample, sample // self.rows_per_epoch, self.seed, self.sequence, self.data.fingerprint
        )

    def resume(self, cursor: Cursor, step: int, other: bool = False) -> None:
        """Go on at `step` with the row that a cursor says, however many rows a step had before.
        other: the run says that its data are others from here on, which then begin at their first
        row. OutsizeError where going on would not read the rows that come next."""
        self._same("seed", cursor.seed, self.seed, "set it back")
        self._same("sequence length", cursor.sequence, self.sequence, "set it back")
        if not other:
            self._same("training data", cursor.data, self.data.fingerprint, "bring back the data")
        self._from = (step, self.goes_on(cursor))

    def goes_on(self, cursor: Cursor) -> int:
        """The row that comes next behind a cursor; the first one where that is of other data."""
        return cursor.sample if cursor.data == self.data.fingerprint else 0

    @contextmanager
    def prefetch(
        self, step: int = 0, stop: int | None = None, own: Span | None = None
    ) -> Iterator[Iterator[Batch]]:
        """Batches `step` .. stop - 1 (endless for None), at most AHEAD made ahead by a thread,
        which ends with this context, wherever it is. An error in it is raised where the batch is
        taken. own: as for `batch`."""
        steps = itertools.count(step) if stop is None else iter(range(step, stop))
        pool = ThreadPoolExecutor(1, "outsize-data")
        ahead = deque(pool.submit(self.batch, at, own) for at in itertools.islice(steps, AHEAD))

        def taken() -> Generator[Batch]:
            while ahead:
                found = ahead.popleft().result()
                ahead.extend(pool.submit(self.batch, at, own) for at in itertools.islice(steps, 1))
                yield found

        batches = taken()
        try:
            yield batches
        finally:
            batches.close()
            pool.shutdown(wait=True, cancel_futures=True)

    def _layout(self, epoch: int) -> Layout | Whole:
        with self._lock:
            if epoch not in self._layouts:
                while len(self._layouts) >= _LAYOUTS_KEPT:
                    self._layouts.pop(next(iter(self._layouts)))
                self._layouts[epoch] = (
                    layout(self.data, self.seed, epoch, self.sequence)
                    if self._whole is None
                    else self._whole.of(self.seed, epoch)
                )
            return self._layouts[epoch]

    @staticmethod
    def _same(what: str, then: object, now: object, remedy: str) -> None:
        if then != now:
            raise OutsizeError(
                f"{what} is {now}, the checkpoint was trained with {then}: {remedy}, "
                "or start a new run"
            )


class ValidationStream:
    """Validation batches of at most `rows` rows, the same ones for every run over the same data,
    whatever its seed. The whole set, or its first `max_tokens` tokens rounded up to whole rows;
    the documents are shuffled once, so that a part is a fair sample.

    `tokens` is the count of targets in all batches, `bytes` the UTF-8 bytes they stand for, by
    their weights.
    """

    def __init__(
        self,
        data: Dataset,
        rows: int,
        sequence: int,
        max_tokens: int | None = None,
        virtual: int = 0,
    ) -> None:
        data = _behind(data, sequence, virtual)
        self.data, self.rows, self.sequence = data, rows, sequence
        wanted = data.tokens if max_tokens is None else min(max_tokens, data.tokens)
        self._count = -(-wanted // sequence)
        self._layout: Layout | Whole
        if data.whole:
            self._layout = packed = pack(data, 0, sequence, virtual)
            every = len(packed.documents)
            self._count = every if wanted == data.tokens else min(every, self._count)
            read = [self._row(row) for row in range(self._count)]
            self.tokens = sum(int((row.targets_S != IGNORE).sum()) for row in read)
            self.bytes = sum(row.bytes for row in read)
            return
        self._layout = layout(data, 0, 0, sequence)
        self.tokens = min(self._count * sequence, data.tokens)
        self.bytes = float(data.bytes)
        if self.tokens < data.tokens:
            self.bytes = sum(self._row(row).bytes for row in range(self._count))

    def __len__(self) -> int:
        return -(-self._count // self.rows)

    def __iter__(self) -> Iterator[Batch]:
        return (self.batch(index) for index in range(len(self)))

    def batch(self, index: int, place: int = 0, workers: int = 1) -> Batch:
        """Batch number `index`; the last one may have fewer rows. place, workers: of several that
        share it, the rows of one: a row without targets where there are not enough."""
        first = index * self.rows
        last = min(first + self.rows, self._count)
        start, stop = share(last - first, workers, place)
        if start < stop:
            return _collate([self._row(row) for row in range(first + start, first + stop)])
        spare = _collate([self._row(first)])
        return replace(spare, targets_BS=torch.full_like(spare.targets_BS, IGNORE))

    def bits_per_byte(self, nats: float) -> float:
        """Bits per byte of text, from the loss summed over all targets, in nats."""
        return nats / (np.log(2.0) * self.bytes) if self.bytes else float("nan")

    def _row(self, row: int) -> Row:
        return self._layout.read(self.data, row, self.sequence)


def _parts(data: Dataset) -> Iterator[Dataset]:
    return data.parts() if data.shares else iter(())


def _behind(data: Dataset, sequence: int, virtual: int) -> Dataset:
    """Documents before which virtual tokens stand. OutsizeError where rows have no room for more
    than these."""
    if virtual >= sequence:
        raise OutsizeError(
            f"train.sequence is {sequence}, and {counted(virtual, 'virtual token')} of the adapter"
            f" stand before every document; expected {virtual + 1} or more, or fewer of them"
        )
    return in_pieces(data, sequence - virtual) if virtual and not data.whole else data


def _part(number: int, data: Dataset, how: tuple[int, int, int, int]) -> TrainStream:
    """The rows of one data path of a mixture. how: as of TrainStream."""
    try:
        return TrainStream(data, *how)
    except OutsizeError as error:
        raise OutsizeError(f"number {number + 1} of data.path: {error}") from None


def _collate(rows: list[Row]) -> Batch:
    weights = [row.weights_S for row in rows if row.weights_S is not None]
    return Batch(
        ids_BS=torch.from_numpy(np.stack([row.ids_S for row in rows])),
        targets_BS=torch.from_numpy(np.stack([row.targets_S for row in rows])),
        bounds=tuple(row.bounds for row in rows),
        weights_BS=torch.from_numpy(np.stack(weights)) if weights else None,
    )
