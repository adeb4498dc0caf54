"""Numbers of things are said as people say them."""

from __future__ import annotations

import pytest

from outsize.errors import counted


@pytest.mark.parametrize(
    ("count", "thing", "form", "said"),
    [
        (0, "step", "", "0 steps"),
        (1, "byte", ",", "1 byte"),
        (2, "microbatch", "", "2 microbatches"),
        (12345, "byte", ",", "12,345 bytes"),
        (12345, "byte", "", "12345 bytes"),
    ],
)
def test_one_is_singular(count: int, thing: str, form: str, said: str) -> None:
    assert counted(count, thing, form) == said
