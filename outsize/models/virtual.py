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


@runtime_checkable
class Prompting(Adapter, Protocol):
    """An adapter with virtual tokens."""

    @property
    def virtual_tokens(self) -> int:
        """How many every document begins with."""


def virtual(adapter: object) -> int:
    """How many virtual tokens every document begins with; 0 unless it is such an adapter."""
    return adapter.virtual_tokens if isinstance(adapter, Prompting) else 0


class Rows(Embedding):
    """positions_T -> the values (T, E) that virtual tokens have, and whether a token is one (T, 1).
    weight (P, E). file: its name in files, joined there along dim 1 with others of that name."""

    def __init__(self, count: int, size: int, lies: Lies, file: str) -> None:
        super().__init__(count, size)
        self.lies, self.file = lies, file

    def declare(self, _: str) -> Declared:
        return Declared(Initial(std="model"), self.lies, self.file, joined=1)

    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        count = self.weight.shape[0]
        values_TE = super().forward(positions_T.clamp(max=count - 1))
        return values_TE, (positions_T < count).unsqueeze(1)
