"""Rows of a step over two axes, over one of which states are sharded."""

from __future__ import annotations

import pytest
from verifying import case_of

from outsize.collectives import AXES, Mesh
from outsize.collectives.axes import Axis
from outsize.errors import OutsizeError
from outsize.plan import Sharding
from outsize.plan.plan import per_segment
from outsize.verify import verify


@pytest.fixture
def copies(monkeypatch):
    """An axis of this test, between those of data and context."""
    AXES.names()
    axis = Axis("copies", 15, "rows", "workers that take different rows, and hold all states")
    monkeypatch.setitem(AXES._entries, axis.name, axis)


def test_every_row_is_taken_once(copies) -> None:
    mesh = Mesh(2, 2, copies=3)
    assert mesh.rows == 6
    found = [mesh.rows_index(rank) for rank in range(mesh.size)]
    assert found == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


@pytest.mark.parametrize("shards", [Sharding(1, 1, 2), Sharding(2, 2, 2)], ids=str)
def test_exact(copies, shards) -> None:
    plan = {"mesh": Mesh(2, copies=2), "shards": shards, "rows": 7, "microbatch_rows": 1}
    found = verify(case_of(clip=0.5, stages=per_segment(5, ("block",)), **plan), own=False)
    assert found.holds, found.exact.worst
    sent = found.sent
    assert sent.network == pytest.approx(sent.formula.states, abs=sent.formula.rounded * 100)


def test_too_few_rows(copies) -> None:
    with pytest.raises(
        OutsizeError, match="rows is 3, too few for 4 workers of the data and copie"
    ):
        case_of(mesh=Mesh(2, copies=2), rows=3)
