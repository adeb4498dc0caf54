"""The `Collective` seam. All collectives sum; who needs a mean divides, once, by a global count."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Collective(Protocol):
    """Communication over one axis of the mesh."""

    @property
    def size(self) -> int:
        """Workers on the axis."""

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of everybody's `tensor`: takes partial, gives replicated; may work in place."""


class Alone:
    """The axis of one worker."""

    size = 1

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor
