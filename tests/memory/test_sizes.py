"""Sizes as people write them."""

from __future__ import annotations

import pytest

from outsize.errors import OutsizeError
from outsize.memory import format_bytes, parse_bytes

READ = {
    "0": 0, "17": 17, "17B": 17, " 17 b ": 17,
    "1k": 1024, "1KiB": 1024, "1kb": 1000, "1KB": 1000,
    "512MiB": 512 * 1024**2, "512M": 512 * 1024**2, "500 MB": 500_000_000,
    "2GiB": 2 * 1024**3, "2G": 2 * 1024**3, "2GB": 2_000_000_000, "1.5GiB": 3 * 512 * 1024**2,
    "3TiB": 3 * 1024**4, "3tb": 3 * 10**12, "1PiB": 1024**5, "0.5k": 512,
}  # fmt: skip

SHOWN = {
    0: "0 B", 1: "1 B", 1023: "1023 B", 1024: "1.00 KiB", 1536: "1.50 KiB",
    1024**2: "1.00 MiB", 1024**3: "1.00 GiB", 5 * 1024**4: "5.00 TiB",
    2000 * 1024**4: "2000.00 TiB", -2048: "-2.00 KiB",
}  # fmt: skip


@pytest.mark.parametrize(("text", "count"), READ.items())
def test_what_is_understood(text, count):
    assert parse_bytes(text) == count


REFUSED = ["", "GiB", "2 GiBs", "-1", "1,5GiB", "1e9", "2..5M", "½G", "2GiB/s"]


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused_names_the_value_and_the_form(text):
    with pytest.raises(OutsizeError, match="write it as 512MiB or 2GiB") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


def test_a_batch_where_a_size_belongs_is_named_by_its_kind_alone():
    with pytest.raises(OutsizeError, match=r"^a memory size is text .* here a dict$"):
        parse_bytes({"ids": [1] * 1000})


def test_numbers_are_bytes():
    assert parse_bytes(12345) == 12345


@pytest.mark.parametrize(("count", "text"), SHOWN.items())
def test_what_is_shown(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize("count", [1024, 3 * 1024**2, 7 * 1024**3])
def test_what_is_shown_is_understood(count):
    assert parse_bytes(format_bytes(count)) == count
