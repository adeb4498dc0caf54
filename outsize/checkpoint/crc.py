"""CRC-32 of bytes as they pass, and of a file from the checksums of its parts.

zlib's CRC-32 runs at 2.2 GB/s on one core of the reference machine (blake2b 0.9, sha256 1.3), twice
as fast as the disk reads, and finds every burst of up to 32 wrong bits and all but 2^-32 of other
damage. It protects from disks and cables, not from people.

The checksum of joined parts comes from theirs by arithmetic in GF(2)[x] modulo the CRC polynomial,
so the checksum of a whole file costs no second pass over its bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path

_POLYNOMIAL = 0xEDB88320  # of IEEE 802.3, lowest power in the highest bit
_ONE = 1 << 31  # the polynomial 1
_X8 = 1 << 23  # x^8: what one more byte multiplies by


def crc32(data: bytes | memoryview, value: int = 0) -> int:
    """CRC-32 of `data`, going on from `value`."""
    return zlib.crc32(data, value)


def join_crc32(parts: Iterable[tuple[int, int]]) -> int:
    """CRC-32 of the concatenation of parts given as (their CRC-32, their length in bytes)."""
    total = 0
    for value, length in parts:
        total = _multiply(_power(_X8, length), total) ^ value
    return total


def file_crc32(path: Path) -> int:
    """CRC-32 of a whole file, read in pieces. OSError if it cannot be read."""
    value = 0
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            value = crc32(data, value)
    return value


def _multiply(a: int, b: int) -> int:
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _power(base: int, exponent: int) -> int:
    result = _ONE
    while exponent:
        if exponent & 1:
            result = _multiply(result, base)
        base = _multiply(base, base)
        exponent >>= 1
    return result
