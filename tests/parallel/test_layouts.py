"""Layouts: parts make up the whole, volumes are the formulas', DTensor means the same by them."""

import itertools

import pytest
import torch

from outsize.errors import OutsizeError
from outsize.parallel.layouts import (
    FAN_OUT,
    PARTIAL,
    REPLICATED,
    SUM,
    Laid,
    Replicated,
    Sharded,
    bytes_received,
    from_placement,
    gather_fan_out,
    joined,
    operation,
    part_of,
    sum_scatter,
    to_placement,
)


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
    assert sum_scatter(0).names == ("reduce_scatter", "all_gather")
    assert gather_fan_out(1).names == ("all_gather", "reduce_scatter")


def test_volumes_are_those_of_the_formulas():
    n, numel, size = 4, 60, 8
    whole = numel * size
    expected = {
        "none": 0, "take": 0, "part": 0, "place": 0, "all_reduce": 2 * 3 / 4 * whole,
        "reduce_scatter": 3 / 4 * whole, "all_gather": 3 / 4 * whole,
        "all_to_all": 3 / 4 * whole / n,
    }  # fmt: skip
    layouts = (REPLICATED, PARTIAL, Sharded(0), Sharded(1))
    seen = set()
    for a, b in itertools.product(layouts, layouts):
        seen.add(operation(a, b))
        assert bytes_received(a, b, numel, size, n) == pytest.approx(expected[operation(a, b)])
    assert seen == set(expected)


def test_placements_of_dtensor_mean_the_same():
    from torch.distributed.tensor import Partial, Replicate, Shard

    pairs = ((REPLICATED, Replicate()), (Sharded(2), Shard(2)), (PARTIAL, Partial()))
    for layout, placement in pairs:
        assert to_placement(layout) == placement
        assert from_placement(placement) == layout
    assert isinstance(from_placement(Replicate()), Replicated)
    with pytest.raises(OutsizeError, match="avg"):
        from_placement(Partial("avg"))
    with pytest.raises(OutsizeError, match="segments"):
        to_placement(Sharded(0, (2, 4)))
