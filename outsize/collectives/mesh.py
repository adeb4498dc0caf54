"""Mesh: workers as a grid of named axes. Data; no process group is made here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, product
from math import prod
from typing import Any

from outsize.collectives.axes import CORE, Axis, Cuts, axis_of, ordered
from outsize.errors import OutsizeError
from outsize.typed import Written


@dataclass(frozen=True, init=False)
class Mesh(Written):
    """How many workers each axis has: `Mesh(data=2, tensor=2)`, `Mesh(context=2)`.

    sizes: of the axes with several workers, in the order of the ranks. OutsizeError for an axis
    that nobody declares, and for a size under 1.
    """

    sizes: tuple[tuple[str, int], ...]

    def __init__(self, data: int = 1, tensor: int = 1, pipeline: int = 1, **others: int) -> None:
        sizes = {"data": data, "tensor": tensor, "pipeline": pipeline, **others}
        axes = ordered(sizes)
        for name, size in sizes.items():
            if size < 1:
                raise OutsizeError(f"mesh: {name} is {size}; expected 1 or more")
        kept = tuple((axis.name, sizes[axis.name]) for axis in axes if sizes[axis.name] > 1)
        object.__setattr__(self, "sizes", kept)

    def __getitem__(self, axis: str) -> int:
        """Workers of an axis."""
        for name, size in self.sizes:
            if name == axis:
                return size
        return 1

    @property
    def data(self) -> int:
        """Workers that take different rows."""
        return self["data"]

    @property
    def tensor(self) -> int:
        """Workers that share every matrix product."""
        return self["tensor"]

    @property
    def pipeline(self) -> int:
        """Workers that have different stages of the model."""
        return self["pipeline"]

    @property
    def size(self) -> int:
        """Workers in all."""
        return prod(size for _, size in self.sizes)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The declarations of the axes with several workers, in the order of the ranks."""
        return tuple(axis_of(name) for name, _ in self.sizes)

    @property
    def summed(self) -> bool:
        """Several workers have parts of every gradient."""
        return any(axis.batch for axis in self.axes)

    def cutting(self, what: Cuts) -> tuple[str, ...]:
        """The axes whose several workers have different ones of these."""
        return tuple(axis.name for axis in self.axes if axis.cuts == what)

    @property
    def rows(self) -> int:
        """Into how many parts the rows of a step fall."""
        return prod(self[name] for name in self.cutting("rows"))

    def rows_index(self, rank: int) -> int:
        """Which of these parts the worker `rank` takes."""
        found = 0
        for name in self.cutting("rows"):
            found = found * self[name] + self.index(name, rank)
        return found

    def having(self, **sizes: int) -> Mesh:
        """The mesh with other sizes of some axes."""
        return Mesh(**{**dict(self.sizes), **sizes})

    def index(self, axis: str, rank: int) -> int:
        """Where on an axis the worker `rank` is."""
        return rank // self.stride(axis) % self[axis]

    def stride(self, axis: str) -> int:
        """By how much the ranks of neighbours on an axis differ."""
        order, found = axis_of(axis).order, 1
        for later, size in self.sizes:
            if later != axis and axis_of(later).order > order:
                found *= size
        return found

    def ranks(self, axis: str, rank: int, inner: int = 1, count: int = 0) -> tuple[int, ...]:
        """The workers that differ from `rank` on one axis alone, in the order of that axis.

        With inner and count, those of them that differ in one digit of their place on it: place =
        ... + digit * inner + ..., digit < count. So neighbours are (1, count), and workers with
        the same place among `inner` neighbours (inner, size // inner).
        """
        stride, at = self.stride(axis), self.index(axis, rank)
        count = count or self[axis] // inner
        digit = at // inner % count
        zero = rank - digit * inner * stride
        return tuple(zero + i * inner * stride for i in range(count))

    def runs(self, counts: Mapping[str, int], rank: int) -> tuple[int, ...]:
        """The workers that differ from `rank` in their place among so many neighbours of some axes
        alone."""
        found: tuple[int, ...] = (rank,)
        for axis in self.axes:
            ways = (self.ranks(axis.name, one, 1, counts.get(axis.name, 1)) for one in found)
            found = tuple(chain.from_iterable(ways))
        return found

    def along(self, wanted: Callable[[Axis], bool], rank: int) -> tuple[int, ...]:
        """The workers that differ from `rank` on the axes that are wanted alone."""
        return self.runs({axis.name: self[axis.name] for axis in self.axes if wanted(axis)}, rank)

    def written(self) -> dict[str, int]:
        """By axis, those of the core always."""
        return {name: self[name] for name in (*CORE, *(n for n, _ in self.sizes if n not in CORE))}

    @classmethod
    def read(cls, value: Mapping[str, int]) -> Mesh:
        """What `written` gave."""
        return cls(**value)

    def __str__(self) -> str:
        shown = ",".join(f"{name}={size}" for name, size in self.written().items() if size > 1)
        return shown or "1"


def parse_mesh(text: str) -> Mesh:
    """A mesh as written on the command line: "data=2,tensor=2"."""
    sizes: dict[str, int] = {}
    for word in text.split(","):
        name, _, size = (part.strip() for part in word.partition("="))
        axis_of(name)
        if name in sizes or not size.isdecimal():
            raise OutsizeError(
                f"mesh: {word.strip()!r} in {text!r}; expected each axis once with its number of"
                " workers, as data=2,tensor=2"
            )
        sizes[name] = int(size)
    return Mesh(**sizes)


def grids(count: int, names: tuple[str, ...]) -> Iterator[Mesh]:
    """Every mesh of `count` workers on some axes."""
    sizes = [n for n in range(1, count + 1) if count % n == 0]
    for found in product(sizes, repeat=len(names)):
        if prod(found) == count:
            yield Mesh(**dict(zip(names, found, strict=True)))


# -- PyTorch's own ---------------------------------------------------------------------------------


def to_device_mesh(mesh: Mesh, device: str = "cpu") -> Any:
    """The same grid as a `torch.distributed` DeviceMesh, whose dims have the names of our axes. The
    default process group must have as many ranks as the mesh; PyTorch makes a group for each."""
    from torch.distributed.device_mesh import init_device_mesh

    names = tuple(name for name, _ in mesh.sizes) or ("data",)
    return init_device_mesh(device, tuple(mesh[name] for name in names), mesh_dim_names=names)


def from_device_mesh(found: Any) -> Mesh:
    """The mesh that a DeviceMesh of PyTorch's stands for. OutsizeError for dims without names, for
    names that no axis has, and for ranks that lie in another order than ours."""
    names = found.mesh_dim_names
    if names is None:
        raise OutsizeError(
            "device mesh: its dims have no names; expected mesh_dim_names such as"
            " ('pipeline', 'data', 'tensor')"
        )
    mesh = Mesh(**dict(zip(names, found.mesh.shape, strict=True)))
    ranks = found.mesh.flatten().tolist()
    own = [axis.name for axis in ordered(names)]
    if own != list(names) or ranks != list(range(mesh.size)):
        raise OutsizeError(
            f"device mesh: dims {tuple(names)} of ranks {ranks}; expected the dims in the order"
            f" {tuple(own)} and ranks 0 to {mesh.size - 1} in turn"
        )
    return mesh
