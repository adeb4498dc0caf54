"""Layouts: parts make up the whole, an exchange names its collectives."""

from types import SimpleNamespace

import pytest
import torch
from joined import joined

from outsize.errors import OutsizeError
from outsize.parallel.layouts import (
    FAN_OUT,
    PARTIAL,
    REPLICATED,
    SUM,
    Exchange,
    Laid,
    Sharded,
    part_of,
)
from outsize.parallel.sums import cross


@pytest.mark.parametrize(
    ("layout", "n"),
    [(Sharded(0), 2), (Sharded(1), 3), (Sharded(1, (3, 6)), 2), (Sharded(0, copies=2), 4)],
)
def test_parts_make_up_the_whole(layout, n):
    whole = torch.arange(7 * 9.0).view(7, 9)
    parts = [part_of(whole, layout, n, rank) for rank in range(n)]
    assert torch.equal(joined(parts, layout), whole)
    rows = sum(p.shape[layout.dim] for p in parts)
    assert rows == whole.shape[layout.dim] * layout.copies


def test_a_segmented_part_has_its_share_of_every_segment():
    whole = torch.arange(12)
    assert part_of(whole, Sharded(0, (8, 4)), 2, 1).tolist() == [4, 5, 6, 7, 10, 11]


def test_a_gradient_lies_as_its_value_allows():
    assert str(Laid(REPLICATED, PARTIAL)) == "replicated with partial gradient"
    for value, gradient in ((PARTIAL, PARTIAL), (Sharded(0), Sharded(1)), (Sharded(0), REPLICATED)):
        with pytest.raises(OutsizeError, match="layout: a value that is"):
            Laid(value, gradient)


def test_exchanges_name_their_collectives():
    assert SUM.names == ("all_reduce", "none")
    assert FAN_OUT.names == ("none", "all_reduce")
    scattered = Exchange(Laid(PARTIAL, REPLICATED), Laid(Sharded(0), Sharded(0)))
    assert scattered.names == ("reduce_scatter", "all_gather")
    gathered = Exchange(Laid(Sharded(1), Sharded(1)), Laid(REPLICATED, PARTIAL))
    assert gathered.names == ("all_gather", "reduce_scatter")


def test_a_part_that_is_taken_holds_no_more_than_itself():
    axis = SimpleNamespace(size=2, rank=1)
    part = cross(torch.arange(6.0), ("take", "all_gather"), axis, 0, 6)
    assert part.tolist() == [3, 4, 5] and part.untyped_storage().nbytes() == 3 * 4
