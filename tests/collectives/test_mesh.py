"""Meshes: named axes, the grid of ranks, and PyTorch's own DeviceMesh."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from outsize.collectives import Mesh, from_device_mesh, parse_mesh, to_device_mesh
from outsize.collectives.mesh import grids
from outsize.errors import OutsizeError
from outsize.plan import Plan
from outsize.plan.plan import per_segment
from outsize.plan.text import from_yaml, to_yaml

WHOLE = Mesh(data=2, tensor=3, pipeline=2)


def test_ranks_are_those_of_a_grid() -> None:
    grid = torch.arange(12).view(2, 2, 3)  # pipeline, data, tensor
    for rank in range(12):
        p, d, t = (int(i) for i in (grid == rank).nonzero()[0])
        assert [WHOLE.index(a, rank) for a in ("pipeline", "data", "tensor")] == [p, d, t]
        assert WHOLE.ranks("pipeline", rank) == tuple(grid[:, d, t].tolist())
        assert WHOLE.ranks("data", rank) == tuple(grid[p, :, t].tolist())
        assert WHOLE.ranks("tensor", rank) == tuple(grid[p, d].tolist())
        assert WHOLE.along(lambda axis: axis.batch, rank) == WHOLE.ranks("data", rank)
        inner = WHOLE.along(lambda axis: axis.name != "pipeline", rank)
        assert inner == tuple(grid[p].flatten().tolist())


def test_neighbours_of_a_digit() -> None:
    mesh = Mesh(data=8, tensor=2)
    assert mesh.ranks("data", 5, 1, 2) == (5, 7)
    assert mesh.ranks("data", 5, 4, 2) == (5, 13)


def test_axes_of_one_worker_are_none() -> None:
    assert Mesh(data=1) == Mesh() == Mesh(data=2).having(data=1)
    assert str(Mesh()) == "1" and str(WHOLE) == "data=2,tensor=3,pipeline=2"
    assert parse_mesh("tensor=3, pipeline=2,data=2") == WHOLE
    assert hash(parse_mesh(str(WHOLE))) == hash(WHOLE)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tensr=2", "'tensr'; did you mean 'tensor'"),
        ("data=2,data=2", "each axis once"),
        ("data=-1", "each axis once"),
        ("data=0", "data is 0; expected 1 or more"),
    ],
)
def test_meshes_that_are_none(text: str, said: str) -> None:
    with pytest.raises(OutsizeError, match=said):
        parse_mesh(text)


def test_an_axis_that_nobody_declares() -> None:
    with pytest.raises(OutsizeError, match="'colour'"):
        Mesh(colour=2)


def test_grids() -> None:
    made = list(grids(4, ("data", "tensor")))
    assert made == [Mesh(tensor=4), Mesh(data=2, tensor=2), Mesh(data=4)]


def test_a_plan_keeps_its_mesh() -> None:
    plan = Plan(3, per_segment(3), rows=4, mesh=WHOLE)
    assert "mesh:\n  data: 2\n  tensor: 3\n  pipeline: 2\n" in to_yaml(plan)
    assert from_yaml(to_yaml(plan)) == plan
    with pytest.raises(OutsizeError, match="'tensr'; did you mean 'tensor'"):
        from_yaml(to_yaml(plan).replace("tensor: 3", "tensr: 3"))


@pytest.fixture
def twelve() -> Iterator[None]:
    """A process group of which this is rank 5."""
    dist.init_process_group("fake", rank=5, world_size=12, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_device_mesh(twelve: None) -> None:
    theirs = to_device_mesh(WHOLE)
    assert theirs.mesh_dim_names == ("pipeline", "data", "tensor")
    for axis in theirs.mesh_dim_names:
        ranks = dist.get_process_group_ranks(theirs.get_group(axis))
        assert tuple(ranks) == WHOLE.ranks(axis, 5)
    assert from_device_mesh(theirs) == WHOLE


def test_device_meshes_that_lie_otherwise(twelve: None) -> None:
    ranks = torch.arange(12)
    for grid, names, said in (
        (ranks.view(2, 6), None, "no names"),
        (ranks.view(2, 6), ("tensor", "data"), "in the order"),
        (ranks.flip(0).view(2, 6), ("data", "tensor"), "in turn"),
        (ranks.view(2, 6), ("dta", "tensor"), "did you mean 'data'"),
    ):
        with pytest.raises(OutsizeError, match=said):
            from_device_mesh(DeviceMesh("cpu", grid, mesh_dim_names=names))
