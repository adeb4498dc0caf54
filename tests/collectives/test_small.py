"""The table that chooses an all-reduce."""

from __future__ import annotations

import pytest

from outsize.collectives.small import Row, Table, parse_table
from outsize.errors import OutsizeError

# latency + bytes / rate: a star with a quick start, a ring with a high rate
COSTS = (("star", 1e-5, 6e-9), ("doubling", 2e-5, 2e-9), ("ring", 6e-5, 1e-9))
TABLE = Table(
    4,
    tuple(
        Row(name, count, latency + count * byte)
        for name, latency, byte in COSTS
        for count in (1000, 10_000, 1_000_000)
    ),
)


@pytest.mark.parametrize(
    ("count", "name"),
    [(0, "star"), (2000, "star"), (3000, "doubling"), (39_000, "doubling"), (41_000, "ring"),
     (10**9, "ring")],
)  # fmt: skip
def test_the_quickest_is_taken_between_and_beyond_measured_sizes(count: int, name: str) -> None:
    assert TABLE.best(count) == name


def test_a_table_is_written_and_read() -> None:
    assert parse_table(TABLE.text()) == TABLE
    with pytest.raises(OutsizeError, match=r"table of collectives cannot be read \(KeyError"):
        parse_table('{"size": 2}')
