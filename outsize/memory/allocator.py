"""The ledger's figures from a CUDA device's own allocator.

The dispatcher's count leaves out what kernels take inside an operator, and what the allocator
rounds up to; on a GPU the allocator knows both, at no cost. Kinds that are held throughout are told
apart by what the allocator held before and after they were made; the rest is activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import Tensor

from outsize.memory.ledger import KINDS, Ledger, OverBudget

_HELD = ("parameters", "gradients", "master", "optimizer", "window")


class AllocatorLedger:
    """Counts live bytes of a CUDA device as a `Ledger` does, by PyTorch's caching allocator. What
    that held before the ledger was made counts as nobody's."""

    def __init__(self, device: torch.device, budget: int | None = None) -> None:
        self.budget, self._device = budget, device
        self._before = torch.cuda.memory_allocated(device)
        self.live: dict[str, int] = dict.fromkeys(KINDS, 0)
        if budget is not None:
            whole = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, budget / whole), device)

    @property
    def total(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._before

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before

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
        torch.cuda.reset_peak_memory_stats(self._device)


Meter = Ledger | AllocatorLedger  # what counts live bytes of the device tier while entered


def meter(device: torch.device | str, budget: int | None = None) -> Meter:
    """What counts bytes on a device: its allocator on CUDA, the dispatcher elsewhere."""
    device = torch.device(device)
    return AllocatorLedger(device, budget) if device.type == "cuda" else Ledger(budget, device.type)
