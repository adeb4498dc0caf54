"""Several data paths in shares, and an evaluation set of one's own."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from outsize.data import DataConfig, TrainStream, ValidationStream, open_data
from outsize.data.mixture import BLOCK, Mixture
from outsize.errors import OutsizeError

SHARES = (5.0, 1.0, 0.001, 2.0)


def test_every_sample_has_its_part_and_the_next_row_of_it():
    """Against counting one by one; each block's shares are exact but for two rows."""
    mixture, counts = Mixture(SHARES, 3), Counter()
    drawn = []
    for sample in range(3 * BLOCK):
        part, index = mixture.place(sample)
        assert index == counts[part]
        counts[part] += 1
        drawn.append(part)
    for block in range(3):
        found = np.bincount(drawn[block * BLOCK : (block + 1) * BLOCK], minlength=4)
        assert np.abs(found - np.array(SHARES) / sum(SHARES) * BLOCK).max() < 2
    again = Mixture(tuple(3 * share for share in SHARES), 3)  # any unit, any order of asking
    for sample in (3 * BLOCK - 1, 7, BLOCK, 2 * BLOCK + 5):
        assert again.place(sample)[0] == drawn[sample]
    assert [Mixture(SHARES, 4).place(i)[0] for i in range(BLOCK)] != drawn[:BLOCK]
    far = Mixture(SHARES, 3)
    before = sum(far.place(100 * BLOCK + i)[0] == 0 for i in range(BLOCK))
    first, last = (Mixture(SHARES, 3)._drawn(100 + i)[1] for i in (0, 1))
    parts = Mixture(SHARES, 3)._drawn(101)[0]
    zero = Mixture(SHARES, 3)._drawn(100)[0] == 0
    assert last[parts == 0][0] == first[zero][0] + before
    assert abs(int(first[zero][0]) - 100 * BLOCK * SHARES[0] / sum(SHARES)) < 100


def test_shares_that_divide_no_block_are_exact_on_average():
    """Blocks have a row more or less of a part, as they are drawn."""
    mixture = Mixture((1.0, 2.0), 5)
    ends = mixture._ends(400)[:, 0]
    assert set(ends.tolist()) == {341.0, 342.0}
    assert abs(float(ends.sum()) - 400 * BLOCK / 3) < 40
    assert (ends != Mixture((1.0, 2.0), 6)._ends(400)[:, 0]).any(), "they follow from the seed"


def write(home, name, count, letter):
    lines = [json.dumps({"text": f"{letter}{i} " * (3 + i % 5)}) for i in range(count)]
    (home / name).write_text("\n".join(lines))
    return str(home / name)


def opened(home, path, **more):
    own = {"validation": 0.0, **more}
    return open_data(DataConfig(path=path, cache=str(home / "cache"), **own))


def test_rows_of_a_mixture_are_those_of_its_paths_alone(tmp_path):
    paths = [write(tmp_path, f"{c}.jsonl", n, c) for c, n in (("a", 40), ("b", 9), ("c", 25))]
    shares = dict(zip(paths, (3, 1, 2), strict=True))
    mixed = TrainStream(opened(tmp_path, shares).train, 5, 4, 32)
    alone = [TrainStream(opened(tmp_path, path).train, 5, 4, 32) for path in paths]
    letters, counts = [ord(c) for c in "abc"], Counter()
    assert mixed.rows_per_epoch == sum(one.rows_per_epoch for one in alone)
    for sample in range(300):
        row = mixed.row(sample)
        (part,) = (i for i, letter in enumerate(letters) if letter in row.targets_S)
        wanted = alone[part].row(counts[part])
        assert (row.ids_S == wanted.ids_S).all() and row.bounds == wanted.bounds
        counts[part] += 1
    assert [counts[i] for i in range(3)] == pytest.approx([150, 50, 100], abs=30)
    assert counts[1] > alone[1].rows_per_epoch, "the small one has begun again"


def test_a_mixture_is_gone_on_with_and_other_shares_are_other_data(tmp_path):
    paths = [write(tmp_path, f"{c}.jsonl", 20, c) for c in "ab"]
    data = opened(tmp_path, dict.fromkeys(paths, 1)).train
    stream = TrainStream(data, 1, 4, 32)
    other = TrainStream(data, 1, 2, 32)  # of half the rows a step
    other.resume(stream.cursor(7), 14)
    whole = stream.batch(7)
    for step, half in ((14, slice(0, 2)), (15, slice(2, 4))):
        assert (other.batch(step).ids_BS == whole.ids_BS[half]).all()
    same = opened(tmp_path, {paths[0]: 0.5, paths[1]: 0.5}).train
    assert same.fingerprint == data.fingerprint
    more = TrainStream(opened(tmp_path, {paths[0]: 2, paths[1]: 1}).train, 1, 4, 32)
    with pytest.raises(OutsizeError, match="bring back the data"):
        more.resume(stream.cursor(7), 7)


@pytest.mark.parametrize("share", [0, -1, float("nan"), float("inf")])
def test_a_share_is_a_number_above_0(share):
    with pytest.raises(OutsizeError, match=r"data\.path gives b the share .* above 0"):
        DataConfig(path={"a": 1, "b": share})


def test_a_path_without_documents_or_with_less_than_a_row_is_named(tmp_path):
    first, second = (write(tmp_path, f"{c}.jsonl", 9, "a") for c in "ab")  # the same texts
    with pytest.raises(OutsizeError, match=r"data path \S*b\.jsonl has no document to train on"):
        opened(tmp_path, {first: 1, second: 1})
    short = write(tmp_path, "c.jsonl", 1, "c")
    data = opened(tmp_path, {first: 1, short: 1}).train
    with pytest.raises(OutsizeError, match=r"number 2 of data\.path: training data has 10 tokens"):
        TrainStream(data, 0, 1, 32)


@pytest.mark.parametrize("suffix", ["jsonl", "txt"])
def test_an_evaluation_set_of_ones_own_is_all_that_is_validated_on(tmp_path, suffix):
    paths = [write(tmp_path, f"{c}.{suffix}", 12, c) for c in "ab"]
    data = opened(tmp_path, paths[0], evaluation=(paths[1],), validation=0.4)
    train, held = (bytes(i for i in d.tokens_N if i < 256) for d in (data.train, data.validation))
    assert b"a11" in train and b"b" not in train and b"b11" in held and b"a" not in held
    for path, found in zip(paths, (data.train, data.validation), strict=True):
        alone = opened(tmp_path, path).train
        assert (found.tokens_N == alone.tokens_N).all() and (found.ends == alone.ends).all()
    stream = ValidationStream(data.validation, 2, 32)
    text = sum(len(line.encode()) for line in texts(paths[1]))
    assert stream.bytes == text and stream.bits_per_byte(text * np.log(2.0)) == pytest.approx(1)


def texts(path):
    lines = Path(path).read_text()
    return [json.loads(x)["text"] for x in lines.split("\n")] if path.endswith("l") else [lines]


def test_an_evaluation_set_without_documents_is_refused(tmp_path):
    path, empty = write(tmp_path, "a.jsonl", 9, "a"), tmp_path / "b.jsonl"
    empty.write_text("")
    with pytest.raises(OutsizeError, match=r"data in \S*b\.jsonl is empty"):
        opened(tmp_path, path, evaluation=(str(empty),))


def test_parts_are_cut_at_documents(tmp_path):
    paths = [write(tmp_path, f"{c}.jsonl", n, c) for c, n in (("a", 3), ("b", 5))]
    data = opened(tmp_path, tuple(paths)).train
    assert data.counts == (3, 5) and not data.shares
    said = [bytes(one.tokens_N[one.tokens_N < 256].astype(np.uint8)) for one in data.parts()]
    assert said[0] + said[1] == bytes(data.tokens_N[data.tokens_N < 256].astype(np.uint8))
    assert b"b" not in said[0] and b"a" not in said[1]
    for part, (first, last) in zip(data.parts(), itertools.pairwise((0, 3, 8)), strict=True):
        assert (part.lengths == data.lengths[first:last]).all()
