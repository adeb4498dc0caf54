"""What the keys of a run mean, written out once more for the plain loop that replays it: order and
packing of data, learning rate, loss, dropout, clip. Nothing here asks what training asks.

T tokens of an epoch, S tokens of a row.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from outsize.data import IGNORE, Batch, Data, TrainStream
from outsize.data.dataset import Dataset
from outsize.kernels.entropy import LossOptions
from outsize.models.dropout import Noise
from outsize.optim import AdamW, Optimizer
from outsize.train.config import RunConfig
from outsize.train.recipe import virtual_of
from outsize.train.resolve import optimizer_of

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Read:
    """A run's values and its data. epochs: those that were laid out."""

    config: RunConfig
    data: Data
    epochs: dict[tuple[str, int, int, int], Epoch] = field(default_factory=dict)

    @property
    def sequence(self) -> int:
        assert self.config.train.sequence is not None
        return self.config.train.sequence

    @property
    def rows(self) -> int:
        """Of a step."""
        assert self.config.train.batch_tokens is not None
        return self.config.train.batch_tokens // self.sequence

    @property
    def options(self) -> LossOptions:
        return LossOptions(self.config.train.label_smoothing, self.config.train.z_loss)

    @property
    def optimizer(self) -> Optimizer:
        """AdamW, from its keys; others as training makes them."""
        own = self.config.optimizer
        if own.name == "adamw":
            return AdamW(own.lr or 0.0, own.betas, 1e-8, own.weight_decay)
        return optimizer_of(self.config)

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        own, steps = self.config.learning_rate, self.config.train.steps
        assert steps is not None and own.warmup is not None
        top, low = self.config.optimizer.lr or 0.0, own.final
        if step < own.warmup:
            return top * (step + 1) / own.warmup
        begin = own.warmup
        if own.shape == "wsd":
            begin = max(begin, round(steps * (1 - own.decay)))
        part = min(1.0, max(0, step - begin) / max(1, steps - begin))
        match own.shape:
            case "constant":
                return top
            case "cosine":
                return top * (low + (1 - low) * (1 + math.cos(math.pi * part)) / 2)
        return top * (1 + (low - 1) * part)

    def batch(self, step: int) -> Batch:
        """All rows of a step."""
        keys, data = self.config.train, self.data.train
        noise = Noise(keys.dropout, keys.seed, step) if keys.dropout else None
        before = virtual_of(self.config)
        if data.whole or before:  # packed whole: rows as they are said
            made = TrainStream(data, keys.seed, self.rows, self.sequence, before).batch(step)
            return Batch(made.ids_BS, made.targets_BS, made.bounds, noise, made.weights_BS)
        samples = range(step * self.rows, (step + 1) * self.rows)
        if not data.shares:
            return _batch([self._row(data, sample) for sample in samples], noise)
        parts = list(data.parts())
        placed = [_mixed(data.shares, keys.seed, sample) for sample in samples]
        return _batch([self._row(parts[part], sample, part) for part, sample in placed], noise)

    def _row(self, data: Dataset, sample: int, part: int = 0) -> Row:
        """Row number `sample` of a data path, counted from 0."""
        seed, count = self.config.train.seed, data.tokens // self.sequence
        epoch = self._epoch(data, seed, sample // count, part)
        row = _permuted("rows", seed, sample // count, count)[sample % count]
        return epoch.row(int(row), self.sequence)

    def held_out(self) -> Batch | None:
        """All rows of an evaluation; None where there are none, or a source packs them itself."""
        data, most = self.data.validation, self.config.train.evaluate_tokens
        if data.whole or virtual_of(self.config) or not data.tokens:
            return None
        wanted = data.tokens if most is None else min(most, data.tokens)
        epoch, rows = self._epoch(data, 0, 0), -(-wanted // self.sequence)
        return _batch([epoch.row(row, self.sequence) for row in range(rows)], None)

    def _epoch(self, data: Dataset, seed: int, epoch: int, part: int = 0) -> Epoch:
        key = (data.fingerprint, seed, epoch, part)
        if key not in self.epochs:
            order = _permuted("documents", seed, epoch, data.documents)
            starts = np.append(0, data.ends[:-1])
            said = [data.tokens_N[starts[d] : data.ends[d]].astype(np.int64) for d in order]
            read = [np.append(data.start, tokens[:-1]) for tokens in said]
            document = [np.full(len(tokens), place) for place, tokens in enumerate(said)]
            read_T, said_T, document_T = map(np.concatenate, (read, said, document))
            self.epochs[key] = Epoch(read_T, said_T, document_T, data.start)
        return self.epochs[key]


Row = tuple[Numbers, Numbers, tuple[int, ...]]  # ids, targets, bounds of documents


@dataclass(frozen=True)
class Epoch:
    """All documents, end to end. document: which one each token is of."""

    ids_T: Numbers
    targets_T: Numbers
    document_T: Numbers
    start: int

    def row(self, row: int, sequence: int) -> Row:
        """Tokens row * S to (row + 1) * S, filled up with a document of start tokens."""
        here = slice(row * sequence, (row + 1) * sequence)
        lack = sequence - len(self.ids_T[here])
        ids_S = np.append(self.ids_T[here], [self.start] * lack)
        targets_S = np.append(self.targets_T[here], [IGNORE] * lack)
        document_S = np.append(self.document_T[here], [-1] * lack)
        inner = (np.flatnonzero(np.diff(document_S)) + 1).tolist()
        return ids_S.astype(np.int64), targets_S.astype(np.int64), (0, *inner, sequence)


def _permuted(purpose: str, seed: int, epoch: int, count: int) -> Numbers:
    """0 to count - 1 in the order of raw Philox words, keyed by what they are for."""
    key = hashlib.blake2b(f"{purpose}/{seed}/{epoch}".encode(), digest_size=16).digest()
    words = np.random.Philox(key=np.frombuffer(key, dtype="<u8")).random_raw(count)
    return np.argsort(words, kind="stable").astype(np.int64)


def _mixed(shares: tuple[float, ...], seed: int, sample: int) -> tuple[int, int]:
    """The data path of a sample, and how many samples before it are of that path. In blocks of
    1,024 a path has the places from its border to the next one's: shares laid end to end, less an
    offset that is drawn for each block."""
    block, at = divmod(sample, 1024)
    key = hashlib.blake2b(f"mixture/{seed}".encode(), digest_size=16).digest()
    words = np.random.Philox(key=np.frombuffer(key, dtype="<u8")).random_raw(block + 1)
    borders = np.cumsum(np.array(shares) / sum(shares))[:-1] * 1024
    ends = [[0, *np.ceil(borders - (int(w) >> 11) / 2**53).clip(0), 1024] for w in words]
    order = _permuted("mixture", seed, block, 1024)
    paths = (order[:, None] >= np.array(ends[block][1:-1])).sum(1)
    path = int(paths[at])
    before = sum(int(each[path + 1] - each[path]) for each in ends[:block])
    return path, before + int((paths[:at] == path).sum())


def _batch(rows: list[Row], noise: Noise | None) -> Batch:
    ids, targets, bounds = zip(*rows, strict=True)
    ids_BS, targets_BS = (torch.from_numpy(np.stack(x)) for x in (ids, targets))
    return Batch(ids_BS, targets_BS, tuple(bounds), noise)
