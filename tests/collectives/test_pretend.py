"""A pretended group counts what a real one counts, and moves nothing."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from outsize.collectives import Mesh, Pretend, PretendWorld, along
from outsize.errors import OutsizeError


def test_bytes_are_the_formulas() -> None:
    group, spans = Pretend(4, 1), ((0, 3), (3, 10), (10, 10), (10, 16))
    with FakeTensorMode():
        x = torch.empty(16, dtype=torch.bfloat16)
        assert group.all_reduce(x) is x
        group.reduce_scatter(x, spans, torch.empty(7, dtype=torch.bfloat16))
        group.all_gather(torch.empty(7, dtype=torch.bfloat16), spans, x)
        group.all_to_all([x] * 4, [x[:r] for r in range(4)])
        group.broadcast(x, source=0)
    assert group.received == {
        "all_reduce": 2 * 3 * 4 * 2,
        "reduce_scatter": 3 * 7 * 2,
        "all_gather": 9 * 2,
        "all_to_all": (0 + 2 + 3) * 2,
        "broadcast": 32,
    }


def test_meta_tensors_pass_and_wrong_lengths_do_not() -> None:
    group, x = Pretend(2, 0), torch.empty(8, device="meta")
    group.reduce_scatter(x, ((0, 4), (4, 8)), x[:4])
    with pytest.raises(AssertionError, match="reduce_scatter: a part of 3 elements"):
        group.reduce_scatter(x, ((0, 4), (4, 8)), x[:3])
    with pytest.raises(AssertionError, match="all_gather: spans"):
        group.all_gather(x[:4], ((0, 4), (4, 9)), x)


def test_a_world_keeps_its_groups() -> None:
    world = PretendWorld(Mesh(data=2, tensor=3), 4)
    tensor, data = along(world, "tensor"), along(world, "data")
    assert (tensor.size, tensor.rank, data.size, data.rank) == (3, 1, 2, 1)
    assert along(world, "tensor") is tensor
    assert along(world, "tensor", "network") is not tensor
    with pytest.raises(OutsizeError, match="rank 6 of mesh data=2,tensor=3; expected 0 to 5"):
        PretendWorld(Mesh(data=2, tensor=3), 6)
