"""Virtual tokens: every document begins with some whose place an adapter's own values take.

They stand in rows, caches and messages like other tokens, so that packing, axes of the mesh, chunks
and generation know nothing of them. Which tokens they are follows from their positions in their
documents. An adapter takes the place of their embeddings (`Prologue.virtual`), or of their keys and
values in a layer (`Attention.virtual`). None is a target, and their ids are read by nobody.

T tokens laid flat, P virtual tokens, E features of each.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from outsize.models.adapter import Adapter
from outsize.models.declared import Declared, Initial, Lies
from outsize.models.linear import Embedding

LIKE_WEIGHTS = Initial(std="model")


@runtime_checkable
class Prompting(Adapter, Protocol):
    """An adapter with virtual tokens."""

    @property
    def virtual_tokens(self) -> int:
        """How many every document begins with."""


def virtual(adapter: object) -> int:
    """How many virtual tokens every document begins with; 0 unless it is such an adapter."""
    return adapter.virtual_tokens if isinstance(adapter, Prompting) else 0


def places(positions_T: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Which of so many virtual tokens each token is, or the last, and whether it is one (T, 1)."""
    return positions_T.clamp(max=count - 1), (positions_T < count).unsqueeze(1)


class Rows(Embedding):
    """positions_T -> the values (T, E) that virtual tokens have, and whether a token is one (T, 1).
    weight (P, E). file: its name in files, joined there along dim 1 with others of that name."""

    def __init__(
        self, count: int, size: int, lies: Lies, file: str, begins: Initial = LIKE_WEIGHTS
    ) -> None:
        super().__init__(count, size)
        self.lies, self.file, self.begins = lies, file, begins

    def declare(self, _: str) -> Declared:
        return Declared(self.begins, self.lies, self.file, joined=1)

    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        at_T, here_T1 = places(positions_T, self.weight.shape[0])
        return super().forward(at_T), here_T1
