"""Checksums against the same arithmetic in plain Python, and against every small kind of damage."""

from __future__ import annotations

import numpy as np
import pytest

from outsize.kernels import native
from outsize.kernels.checksum import checksum, plain_checksum

ODD, LANES, MASK = 0x9E3779B97F4A7C15, 32, 2**64 - 1
Words = np.ndarray[tuple[int], np.dtype[np.uint64]]


def stir(lane: int, word: int) -> int:
    x = ((lane ^ word) * ODD) & MASK
    return (x << 23 | x >> 41) & MASK


def by_hand(words: Words) -> int:
    lanes = [ODD * (i + 1) & MASK for i in range(LANES)]
    for i, word in enumerate(words.tolist()):
        lanes[i % LANES] = stir(lanes[i % LANES], word)
    result = len(words)
    for lane in lanes:
        result = stir(result, lane)
    return result


def of(words: Words) -> int:
    return checksum(words.ctypes.data, words.nbytes)


def some(count: int) -> Words:
    return np.random.default_rng(count).integers(0, 2**64, size=count, dtype=np.uint64)


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 64, 1000])
def test_it_is_the_arithmetic_it_says(count: int) -> None:
    assert native.library() is not None, "the tests need g++"
    assert of(some(count)) == by_hand(some(count))


@pytest.mark.parametrize("service", [checksum, plain_checksum])
def test_damage_is_seen(service) -> None:
    words = some(512)
    seen = {service(words.ctypes.data, words.nbytes)}
    for bit in range(64):
        words[300] ^= np.uint64(1 << bit)
        seen.add(service(words.ctypes.data, words.nbytes))
        words[300] ^= np.uint64(1 << bit)
    top = np.uint64(1 << 63)
    for other in (0, 8, 12, 299, 332):  # in the same lane and in others: two signs flipped
        words[[300, other]] ^= top
        seen.add(service(words.ctypes.data, words.nbytes))
        words[[300, other]] ^= top
    for other in (0, 12, 299, 332):  # two words swapped
        words[[300, other]] = words[[other, 300]]
        seen.add(service(words.ctypes.data, words.nbytes))
        words[[300, other]] = words[[other, 300]]
    seen.add(service(words.ctypes.data, words.nbytes - 8))
    assert len(seen) == 1 + 64 + 5 + 4 + 1


def test_zeros_of_another_length_are_another_thing() -> None:
    zeros = np.zeros(64, np.uint64)
    assert len({of(zeros[:count]) for count in range(64)}) == 64


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    import zlib

    monkeypatch.setattr(native, "library", lambda: None)
    words = some(100)
    assert of(words) == zlib.crc32(words.tobytes())
