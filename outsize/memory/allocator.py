"""The ledger's figures from an accelerator's own allocator.

The dispatcher's count leaves out what kernels take inside an operator, and what the allocator
rounds up to; there the allocator knows both, at no cost. Kinds that are held throughout are told
apart by what the allocator held before and after they were made; the rest is activations.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import Tensor

from outsize import accelerator
from outsize.memory.ledger import KINDS, Ledger, OverBudget, in_grains
from outsize.torch_private import storage_key

_HELD = ("parameters", "gradients", "master", "optimizer", "window")


class AllocatorLedger:
    """Counts live bytes of an accelerator as a `Ledger` does, by PyTorch's caching allocator. What
    that held before the ledger was made counts as nobody's, but for `own` tensors.

    budget: of bytes in tensors, which are foretold. What the allocator keeps beside them depends on
    all that came before; it gives that back before it refuses. So an action that was over its
    budget raises when it has ended. reserved: bytes that libraries have taken by now and that
    count, too."""

    def __init__(
        self,
        device: torch.device,
        budget: int | None = None,
        own: Iterable[Tensor] = (),
        reserved: int = 0,
    ) -> None:
        self.budget, self._device, self._reserved = budget, device, reserved
        gc.collect()  # tensors of rings of objects that are done would count, and then go
        storages = (x.untyped_storage() for x in own if x.device == device)
        sizes = {storage_key(each): each.nbytes() for each in storages}
        mine = sum(in_grains(size, accelerator.grain(device)) for size in sizes.values())
        self._before = torch.accelerator.memory_allocated(device) - mine - reserved
        self.live: dict[str, int] = dict.fromkeys(KINDS, 0)

    @property
    def total(self) -> int:
        return torch.accelerator.memory_allocated(self._device) - self._before

    @property
    def peak(self) -> int:
        return torch.accelerator.max_memory_allocated(self._device) - self._before

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
    def kind(self, kind: str | None) -> Iterator[None]:
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
        self.live["activations"] = self.total - held - self._reserved
        self.live["workspace"] = self._reserved
        if self.budget is not None and (peak := self.peak) > self.budget:
            raise OverBudget("memory", peak - self.total, self.total, self.budget)

    def reset_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self._device)


Meter = Ledger | AllocatorLedger  # what counts live bytes of the device tier while entered


def meter(
    device: torch.device | str,
    budget: int | None = None,
    own: Iterable[Tensor] = (),
    reserved: int = 0,
) -> Meter:
    """What counts bytes on a device: an accelerator's allocator, the dispatcher elsewhere. own:
    tensors that the work will replace by its own. reserved: bytes that an accelerator's libraries
    have taken by now, which count."""
    device = torch.device(device)
    if not accelerator.queues(device):
        return Ledger(budget, device.type)
    return AllocatorLedger(device, budget, own, reserved)
