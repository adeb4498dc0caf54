"""Ledger: the live bytes of each kind, seen by the dispatcher.

Every tensor that PyTorch makes passes the dispatcher, and every storage says when it dies. Counting
both gives the bytes that a device's allocator would hold, to the byte and the same in every run,
on any machine. A budget makes the ledger raise where a real device would run out, so that a small
device can be rehearsed on a large one; the same ledger counts fake tensors, which have no bytes,
and so predicts a step without running it.

What it cannot see are buffers that a kernel takes and gives back inside one operator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from outsize.errors import OutsizeError, counted
from outsize.memory.sizes import format_bytes
from outsize.torch_private import (
    DispatchMode,
    cdata,
    device_asked,
    fake_device,
    safe_softmax,
    storage_key,
    tree_leaves,
)

KINDS = (
    "parameters", "gradients", "master", "optimizer", "window", "activations", "workspace", "data"
)  # fmt: skip


def in_grains(nbytes: int, grain: int) -> int:
    """Bytes as an allocator gives them, in whole multiples of its grain."""
    return -(-nbytes // grain) * grain


class OverBudget(OutsizeError):
    """The device tier would hold more than its budget."""

    def __init__(self, kind: str, asked: int, live: int, budget: int) -> None:
        self.missing = live + asked - budget
        super().__init__(
            f"out of memory on the device tier: {format_bytes(asked)} of {kind} asked for,"
            f" {format_bytes(live)} of the budget of {format_bytes(budget)} in use;"
            f" {counted(self.missing, 'byte')} missing"
        )


class _Dispatch(DispatchMode):
    """Shows the ledger every tensor that an operator gives."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is device_asked and (device := fake_device(args[0])) is not None:
            return device
        result = func(*args, **(kwargs or {}))
        if self.ledger.told is not None:
            self.ledger.told(func, args, kwargs or {}, result)
        if isinstance(result, Tensor):
            self.ledger.see(result)
            if func is safe_softmax and self.ledger.device != "cpu":
                self._inside(result)
        elif isinstance(result, (tuple, list)):
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.ledger.see(leaf)
        return result

    def _inside(self, result: Tensor) -> None:
        """What a softmax of masked scores takes within itself, composed as it is on accelerators:
        which scores are masked, which rows wholly, and a zero."""
        masked = torch.empty_like(result, dtype=torch.bool)
        rows = torch.empty_like(result[..., :1], dtype=torch.bool)
        for taken in (masked, rows, result.new_empty(())):
            self.ledger.see(taken)


class Ledger:
    """Counts live bytes on one device while entered.

    budget: bytes the device tier may hold, or None. device: tensors elsewhere are not counted.
    grain: bytes of which a storage takes whole multiples. told: who else is to know of every
    operator, with its arguments and its result: a mode of its own takes as long as this one.
    """

    def __init__(self, budget: int | None = None, device: str = "cpu", grain: int = 1) -> None:
        self.budget, self.device = budget, torch.device(device).type
        self.grain = grain
        self.live: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.total = 0
        self.peak = 0  # highest total since reset_peak
        self.told: Callable[[Any, Any, Any, Any], None] | None = None
        self._kind: str | None = "workspace"
        self._held: dict[int, list[Any]] = {}  # by storage: weakref, in grains, kind, bytes
        self._modes: list[_Dispatch] = []

    def __enter__(self) -> Ledger:
        mode = _Dispatch(self)
        mode.__enter__()  # type: ignore[no-untyped-call]
        self._modes.append(mode)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._modes.pop().__exit__(kind, value, trace)  # type: ignore[no-untyped-call]

    @contextmanager
    def kind(self, kind: str | None) -> Iterator[None]:
        """Storages made inside count as `kind` instead of "workspace"; None: not at all, since they
        are in no device's memory, wherever they seem to be."""
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = before

    def see(self, tensor: Tensor) -> None:
        """Count the storage of a tensor, once."""
        if self._kind is None:
            return
        storage = tensor.untyped_storage()
        key, size = cdata(storage), storage.nbytes()
        held = self._held.get(key)
        if held is not None:
            if held[3] != size:
                taken = in_grains(size, self.grain)
                self._count(held[2], taken - held[1])
                held[1], held[3] = taken, size
            return
        if size == 0 or tensor.device.type != self.device:
            return
        taken = in_grains(size, self.grain)
        self._count(self._kind, taken)
        alive = weakref.ref(storage, lambda _: self._forget(key))
        self._held[key] = [alive, taken, self._kind, size]

    def release(self, tensor: Tensor) -> None:
        """Stop counting the storage of a tensor that somebody else may keep alive."""
        self._forget(storage_key(tensor))

    def _count(self, kind: str, size: int) -> None:
        if self.budget is not None and size > 0 and self.total + size > self.budget:
            raise OverBudget(kind, size, self.total, self.budget)
        self.live[kind] += size
        self.total += size
        if self.total > self.peak:
            self.peak = self.total

    def _forget(self, key: int) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._count(held[2], -held[1])

    def settle(self) -> None:
        """What the action that ends here leaves alive are activations, no longer its workspace."""
        for held in list(self._held.values()):  # another thread may let one go
            if held[2] == "workspace":
                held[2] = "activations"
        self.live["activations"] += self.live["workspace"]
        self.live["workspace"] = 0

    def reset_peak(self) -> None:
        """Start a new measurement of the peak from what is live now."""
        self.peak = self.total
