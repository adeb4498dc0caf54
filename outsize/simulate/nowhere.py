"""Stores of a rehearsal: tiers for tensors that have no bytes."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor

from outsize.memory.store import Place
from outsize.plan import DEVICE, Plan


class Nowhere:
    """A store that keeps nothing; it counts what it should move."""

    name = "nowhere"

    def __init__(self) -> None:
        self.bytes_read = self.bytes_written = 0

    def reserve(self, nbytes: int) -> Place:
        return Place(0, nbytes)

    def write(self, place: Place, data: Tensor, at: int = 0) -> None:
        """Nothing to keep."""
        self.bytes_written += data.nbytes

    def read(self, place: Place, out: Tensor, at: int = 0) -> None:
        """Nothing to give."""
        self.bytes_read += out.nbytes

    def close(self) -> None:
        """Nothing to let go."""


class NowhereInMemory(Nowhere):
    """One of memory, where updates are made as states rest. Its bytes are on no device that a
    ledger counts."""

    def view(self, place: Place) -> Tensor:
        """Of these bytes there is nothing but their number."""
        return torch.empty(place.bytes, dtype=torch.uint8, device="meta")


def nowhere(plan: Plan, memories: Container[str] = ()) -> dict[str, Nowhere]:
    """Stores for every tier that a plan names. memories: those of them that are memory."""
    every = {tier for stage in plan.stages for tier in vars(stage.rest).values()} - {DEVICE}
    return {tier: NowhereInMemory() if tier in memories else Nowhere() for tier in sorted(every)}
