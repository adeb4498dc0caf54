"""Batch: positions, microbatches and flat bounds, against plain Python."""

from __future__ import annotations

import pytest
import torch

from outsize.data import IGNORE, Batch

IDS = torch.arange(12).view(3, 4)
TARGETS = torch.tensor([[1, 2, IGNORE, 4], [5, 6, 7, 8], [IGNORE, IGNORE, 11, 12]])
BOUNDS = ((0, 3, 4), (0, 4), (0, 1, 2, 4))


@pytest.fixture
def batch() -> Batch:
    return Batch(IDS, TARGETS, BOUNDS)


def test_positions_restart_at_every_document(batch: Batch) -> None:
    assert batch.positions().tolist() == [[0, 1, 2, 0], [0, 1, 2, 3], [0, 0, 0, 1]]
    assert batch.positions().dtype == torch.int64


def test_count_leaves_ignored_targets_out(batch: Batch) -> None:
    assert batch.count() == 9


def test_flat_bounds_lay_the_rows_one_after_another(batch: Batch) -> None:
    assert batch.flat_bounds() == (0, 3, 4, 8, 9, 10, 12)


def test_rows_are_a_batch_of_their_own(batch: Batch) -> None:
    part = batch.rows(1, 3)
    assert part.ids_BS.tolist() == IDS[1:].tolist()
    assert part.targets_BS.tolist() == TARGETS[1:].tolist()
    assert part.flat_bounds() == (0, 4, 5, 6, 8)
    assert batch.rows(0, 1).count() + part.count() == batch.count()


def test_bounds_that_do_not_cover_a_row_are_a_bug() -> None:
    with pytest.raises(AssertionError):
        Batch(IDS, TARGETS, ((0, 3), (0, 4), (0, 4)))
