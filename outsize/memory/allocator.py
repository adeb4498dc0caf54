"""The ledger's figures from a CUDA device's own allocator.

The dispatcher's count leaves out what kernels take inside an operator, and what the allocator
rounds up to; on a GPU the allocator knows both, at no cost. Kinds that are held throughout are told
apart by what the allocator held before and after they were made; the rest is activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from outsize.memory.ledger import KINDS, Ledger, Meter, OverBudget

_HELD = ("parameters", "gradients", "master", "optimizer", "window")


class Allocator(Protocol):
    """A device's allocator."""

    def allocated(self) -> int:
        """Bytes that tensors hold now."""

    def most(self) -> int:
        """Highest of these since reset."""

    def reset(self) -> None: ...

    def limit(self, budget: int) -> None:
        """Refuse to hold more, with torch.OutOfMemoryError."""


class CudaAllocator:
    """PyTorch's caching allocator on one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def most(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def limit(self, budget: int) -> None:
        whole = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / whole), self.device)


class AllocatorLedger:
    """A Meter over an allocator. What it held before the ledger was made counts as nobody's."""

    def __init__(self, allocator: Allocator, budget: int | None = None) -> None:
        self.budget, self._allocator = budget, allocator
        self._before = allocator.allocated()
        self.live: dict[str, int] = dict.fromkeys(KINDS, 0)
        if budget is not None:
            allocator.limit(budget)

    @property
    def total(self) -> int:
        return self._allocator.allocated() - self._before

    @property
    def peak(self) -> int:
        return self._allocator.most() - self._before

    def __enter__(self) -> AllocatorLedger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(value, torch.OutOfMemoryError) and self.budget is not None:
            raise OverBudget("memory", 0, self.total, self.budget) from value

    @contextmanager
    def kind(self, kind: str) -> Iterator[None]:
        before = self.total
        try:
            yield
        finally:
            if kind in _HELD:
                self.live[kind] += self.total - before

    def see(self, tensor: Tensor) -> None:
        """The allocator has seen it."""

    def release(self, tensor: Tensor) -> None:
        """The allocator sees it die."""

    def settle(self) -> None:
        held = sum(self.live[kind] for kind in _HELD)
        self.live["activations"], self.live["workspace"] = self.total - held, 0

    def reset_peak(self) -> None:
        self._allocator.reset()


def meter(device: torch.device | str, budget: int | None = None) -> Meter:
    """What counts bytes on a device: its allocator on CUDA, the dispatcher elsewhere."""
    device = torch.device(device)
    if device.type == "cuda":
        return AllocatorLedger(CudaAllocator(device), budget)
    return Ledger(budget, device.type)
