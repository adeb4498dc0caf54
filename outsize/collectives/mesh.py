"""Mesh: workers as a grid of named axes. Data; no process group is made here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod

from outsize.errors import OutsizeError, nearest

# Workers that differ in the last one alone are neighbours.
AXES = ("pipeline", "data", "tensor")


@dataclass(frozen=True)
class Mesh:
    """How many workers each axis has.

    data: workers that take different rows. tensor: workers that share every matrix product.
    pipeline: workers that have different stages of the model.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            if size < 1:
                raise OutsizeError(f"mesh: {name} is {size}; expected 1 or more")

    @property
    def size(self) -> int:
        """Workers in all."""
        return prod(asdict(self).values())

    def index(self, axis: str, rank: int) -> int:
        """Where on an axis the worker `rank` is."""
        return rank // self._stride(axis) % int(getattr(self, axis))

    def ranks(self, axis: str, rank: int, inner: int = 1, count: int = 0) -> tuple[int, ...]:
        """The workers that differ from `rank` on one axis alone, in the order of that axis.

        With inner and count, those of them that differ in one digit of their place on it: place =
        ... + digit * inner + ..., digit < count. So neighbours are (1, count), and workers with
        the same place among `inner` neighbours (inner, size // inner).
        """
        stride, at = self._stride(axis), self.index(axis, rank)
        count = count or int(getattr(self, axis)) // inner
        digit = at // inner % count
        zero = rank - digit * inner * stride
        return tuple(zero + i * inner * stride for i in range(count))

    def _stride(self, axis: str) -> int:
        later = AXES[AXES.index(axis) + 1 :]
        return prod(int(getattr(self, name)) for name in later)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in asdict(self).items() if size > 1) or "1"


def parse_mesh(text: str) -> Mesh:
    """A mesh as written on the command line: "data=2,tensor=2"."""
    sizes: dict[str, int] = {}
    for word in text.split(","):
        name, _, size = (part.strip() for part in word.partition("="))
        if name not in AXES:
            raise OutsizeError(f"mesh: axis {name!r}{nearest(name, AXES)}")
        if name in sizes or not size.isdecimal():
            raise OutsizeError(
                f"mesh: {word.strip()!r} in {text!r}; expected each axis once with its number of"
                " workers, as data=2,tensor=2"
            )
        sizes[name] = int(size)
    return Mesh(**sizes)
