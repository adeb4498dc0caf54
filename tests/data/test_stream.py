"""Streams: batches as a function of the step, cursors, reading ahead, validation."""

from __future__ import annotations

import json
import math
import random
import threading
from collections import Counter

import pytest
import torch
from datasets import dataset_of

from outsize.data import (
    Batch,
    ByteTokenizer,
    Cursor,
    Dataset,
    TrainStream,
    ValidationStream,
)
from outsize.data.packing import Row
from outsize.errors import OutsizeError

S = 16


def text_data(count: int = 25, seed: int = 3) -> tuple[Dataset, list[str]]:
    draw = random.Random(seed)
    texts = ["".join(draw.choices("abcdé€\n", k=draw.randint(1, 50))) for _ in range(count)]
    tokenizer = ByteTokenizer()
    measured = [tokenizer.encode_placed(text) for text in texts]
    ids = [one.ids.tolist() for one in measured]
    widths = [one.widths.tolist() for one in measured]
    return dataset_of(ids, tokenizer.eos, widths=widths), texts


def same(left: Batch, right: Batch) -> bool:
    return (
        torch.equal(left.ids_BS, right.ids_BS)
        and torch.equal(left.targets_BS, right.targets_BS)
        and left.bounds == right.bounds
    )


def stream(rows: int = 4, seed: int = 0) -> TrainStream:
    return TrainStream(text_data()[0], seed, rows, S)


def test_a_sample_is_the_same_row_for_any_batch_size() -> None:
    wanted = 120  # nearly two epochs
    assert wanted > stream().rows_per_epoch * 1.5
    by_size = {}
    for rows in (1, 3, 4, 20):
        batches = [stream(rows).batch(step) for step in range(wanted // rows)]
        by_size[rows] = [
            (batch.ids_BS[r].tolist(), batch.targets_BS[r].tolist(), batch.bounds[r])
            for batch in batches
            for r in range(rows)
        ]
    assert by_size[3] == by_size[1] and by_size[4] == by_size[1] and by_size[20] == by_size[1]
    assert len({str(row) for row in by_size[1]}) > 40


def test_the_second_epoch_has_the_same_tokens_in_another_order() -> None:
    made = stream()
    first, second = (
        [made.row(epoch * made.rows_per_epoch + index) for index in range(made.rows_per_epoch)]
        for epoch in (0, 1)
    )
    cuts = [{row.targets_S.tobytes() for row in rows} for rows in (first, second)]
    assert len(cuts[0] & cuts[1]) < made.rows_per_epoch / 2  # documents elsewhere, cut elsewhere
    counts = [
        Counter(t for row in rows for t in row.targets_S.tolist()) for rows in (first, second)
    ]
    assert (counts[0] - counts[1]).total() < S  # the tails differ, no more
    assert made.cursor(made.rows_per_epoch // made.rows + 1).epoch == 1


def test_batches_have_the_contract_s_types() -> None:
    batch = stream().batch(0)
    assert batch.ids_BS.shape == batch.targets_BS.shape == (4, S)
    assert batch.ids_BS.dtype == batch.targets_BS.dtype == torch.int64
    assert batch.count() == 4 * S  # no padding, and every place has a target


def test_the_order_is_the_seed_s() -> None:
    assert same(stream(seed=1).batch(2), stream(seed=1).batch(2))
    assert not same(stream(seed=1).batch(2), stream(seed=2).batch(2))


@pytest.mark.parametrize("step", [0, 1, 7, 30])
def test_going_on_from_a_cursor_gives_the_same_batches(step: int) -> None:
    whole = [stream().batch(number) for number in range(step + 5)]
    text = json.dumps(stream().cursor(step).to_json())
    other = stream()
    other.resume(Cursor.from_json(json.loads(text)), step)
    with other.prefetch(step, step + 5) as ahead:
        rest = list(ahead)
    assert len(rest) == 5
    assert all(same(a, b) for a, b in zip(rest, whole[step:], strict=True))


def test_a_cursor_goes_on_with_the_next_row_whatever_the_rows_of_a_step() -> None:
    plain, other = stream(rows=1), stream(rows=5)
    other.resume(stream(rows=6).cursor(2), 2)
    rows = [plain.batch(12 + index) for index in range(10)]
    ids = torch.cat([other.batch(2).ids_BS, other.batch(3).ids_BS])
    assert torch.equal(ids, torch.cat([row.ids_BS for row in rows]))
    again = stream(rows=3)
    again.resume(other.cursor(4), 4)
    wanted = torch.cat([plain.batch(25 + index).ids_BS for index in range(3)])
    assert other.cursor(4).sample == 22 and torch.equal(again.batch(5).ids_BS, wanted)


def test_other_data_begin_at_their_first_row_where_the_run_says_so() -> None:
    own, _ = text_data(seed=4)
    made, cursor = TrainStream(own, 0, 4, S), stream().cursor(3)
    made.resume(cursor, 3, other=True)
    assert same(made.batch(4), TrainStream(own, 0, 4, S).batch(1))
    kept = stream()
    kept.resume(cursor, 3, other=True)  # another name of the same data
    assert same(kept.batch(3), stream().batch(3))


def test_a_cursor_of_other_data_seed_or_sequence_is_refused() -> None:
    cursor = stream().cursor(3)
    other, _ = text_data(seed=4)
    with pytest.raises(OutsizeError, match="training data"):
        TrainStream(other, 0, 4, S).resume(cursor, 3)
    with pytest.raises(OutsizeError, match=r"seed is 1, .* with 0"):
        stream(seed=1).resume(cursor, 3)
    with pytest.raises(OutsizeError, match=r"sequence length is 8, .* with 16"):
        TrainStream(text_data()[0], 0, 4, 8).resume(cursor, 3)


@pytest.mark.parametrize(
    "broken", [None, {}, {"sample": 1}, {**stream().cursor(1).to_json(), "sample": "1"}]
)
def test_a_broken_cursor_is_refused(broken: object) -> None:
    with pytest.raises(OutsizeError, match="data cursor"):
        Cursor.from_json(broken)


def test_too_little_data_for_a_row_says_what_would_do() -> None:
    with pytest.raises(OutsizeError, match=r"5 tokens, less than one row of 16.* at most 5"):
        TrainStream(dataset_of([[1, 2, 3, 4]], eos=0), 0, 1, S)
    assert TrainStream(dataset_of([[1, 2, 3, 4]], eos=0), 0, 1, 5).batch(9).count() == 5


def readers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("outsize-data")}


def test_prefetch_ends_in_the_middle_without_a_thread_left() -> None:
    before = readers()
    with stream().prefetch(0) as ahead:
        first = next(ahead)
        assert len(readers() - before) == 1
    assert same(first, stream().batch(0))
    assert readers() <= before
    with pytest.raises(StopIteration):
        next(ahead)


def test_prefetch_hands_an_error_on(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = stream()
    true_row = broken.row

    def row(sample: int) -> object:
        if sample == 9:
            raise OSError("disk gone")
        return true_row(sample)

    monkeypatch.setattr(broken, "row", row)
    before = readers()
    with broken.prefetch() as ahead:
        assert same(next(ahead), stream().batch(0))
        next(ahead)
        with pytest.raises(OSError, match="disk gone"):
            next(ahead)
    assert readers() <= before


def test_validation_has_every_byte_once() -> None:
    data, texts = text_data()
    found = ValidationStream(data, rows=3, sequence=S)
    targets = [t for batch in found for t in batch.targets_BS.flatten().tolist() if t >= 0]
    assert len(targets) == found.tokens == data.tokens
    assert sorted(t for t in targets if t < 256) == sorted(b"".join(t.encode() for t in texts))
    assert found.bytes == sum(len(text.encode()) for text in texts)
    assert targets.count(256) == len(texts)
    assert sum(batch.count() for batch in found) == found.tokens


def test_part_of_the_validation_counts_its_own_bytes() -> None:
    data, _ = text_data()
    part = ValidationStream(data, rows=3, sequence=S, max_tokens=100)
    targets = torch.cat([batch.targets_BS.flatten() for batch in part])
    assert part.tokens == len(targets) == 112  # whole rows
    assert part.bytes == int((targets < 256).sum())
    whole = [b.targets_BS for b in ValidationStream(data, 1, S)]
    assert torch.equal(torch.cat(whole[:7]).flatten(), targets)
    assert len(part) == 3 and [len(b.bounds) for b in part] == [3, 3, 1]
    packed = ValidationStream(data, rows=3, sequence=S, max_tokens=100, virtual=1)
    assert sum(len(b.bounds) for b in packed) == 7
    assert packed.tokens == sum(int((b.targets_BS >= 0).sum()) for b in packed)


def test_bits_per_byte_of_a_uniform_model() -> None:
    found = ValidationStream(dataset_of([[65] * 31], 256, widths=[[1] * 31]), 1, S)
    assert found.bits_per_byte(31 * math.log(256)) == pytest.approx(8.0, abs=1e-12)


def test_no_validation_data_is_no_batches() -> None:
    empty = ValidationStream(dataset_of([], eos=0), rows=2, sequence=S)
    assert len(empty) == 0 and list(empty) == [] and math.isnan(empty.bits_per_byte(0.0))


def test_a_worker_reads_its_own_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made, whole = stream(rows=5), stream(rows=5).batch(2)
    read = list[int]()
    plain = TrainStream.row

    def counted(self: TrainStream, sample: int) -> Row:
        read.append(sample)
        return plain(self, sample)

    monkeypatch.setattr(TrainStream, "row", counted)
    assert same(made.batch(2, (3, 5)), whole.rows(3, 5))
    assert read == [13, 14]
    with made.prefetch(2, 3, own=(3, 5)) as batches:
        (only,) = batches
    assert same(only, whole.rows(3, 5)) and read == [13, 14] * 2


def test_validation_is_shared_out() -> None:
    """Every target once, and every worker has a row in every batch."""
    data, _ = text_data()
    held = ValidationStream(data, rows=4, sequence=S)
    assert held._count % 4  # the last batch has fewer rows than workers
    for index in range(len(held)):
        whole = held.batch(index)
        parts = [held.batch(index, place, 4) for place in range(4)]
        assert sum(part.count() for part in parts) == whole.count()
        shown = torch.cat([part.ids_BS for part in parts if part.count()])
        assert torch.equal(shown, whole.ids_BS)
        assert all(len(part.bounds) == 1 for part in parts)
