"""Activations kept in 8 bits: what autograd saves in a block is rounded while it waits.

A storage is cut into groups of GROUP numbers, each with one scale, and rounded to 8-bit integers,
once however many tensors share it. The forward pass computes with whole numbers; only gradients
see the rounded ones. (Ardakani et al., "SlimFit", 2023, rounds what a frozen layer cannot drop, in
fixed point; a scale for each group: Chen et al., "ActNN", 2021.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from outsize.errors import OutsizeError
from outsize.plan import Plan
from outsize.runtime.engine import Around, Call
from outsize.runtime.points import Points
from outsize.schedule import Action
from outsize.torch_private import StorageWatch, storage_key

if TYPE_CHECKING:
    from outsize.runtime.job import Job

GROUP = 128  # numbers that share a scale: 3% of what they weigh in float32
LEAST = 1 << 10  # numbers: what is smaller stays as it is
MOST = 127


@dataclass(frozen=True)
class Rounded:
    """A flat tensor of `numel` numbers: codes (groups, GROUP) in int8, scales (groups, 1)."""

    codes: Tensor
    scales: Tensor
    numel: int
    dtype: torch.dtype

    def flat(self) -> Tensor:
        """The numbers again, each off by half a scale at most."""
        whole = self.codes.to(self.scales.dtype).mul_(self.scales).to(self.dtype)
        return whole.view(-1)[: self.numel]


def rounded(flat: Tensor) -> Rounded:
    """A 1-D tensor in 8 bits; numbers must be finite."""
    numel, wide = flat.numel(), torch.promote_types(flat.dtype, torch.float32)
    rows = flat.new_zeros(-(-numel // GROUP), GROUP, dtype=wide)
    rows.view(-1)[:numel].copy_(flat)
    scales = rows.abs().amax(1, keepdim=True).div_(MOST)
    codes = rows.div_(scales.clamp(min=torch.finfo(wide).tiny)).round_().to(torch.int8)
    return Rounded(codes, scales, numel, flat.dtype)


@dataclass(frozen=True)
class _View:
    """A tensor that autograd saved: a view of a storage that was rounded."""

    rounded: Rounded
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        return self.rounded.flat().as_strided(self.size, self.stride, self.offset)


class _Call:
    """One forward of a stage. kept: storages that stay as they are."""

    def __init__(self, kept: Collection[int]) -> None:
        self._kept = kept
        self._seen: dict[int, tuple[StorageWatch, Rounded]] = {}

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps instead of a tensor."""
        plain = tensor.layout is torch.strided and tensor.is_floating_point()
        storage = tensor.untyped_storage()
        numel = storage.nbytes() // tensor.element_size()
        if not plain or numel < LEAST or storage_key(storage) in self._kept:
            return tensor
        if storage_key(storage) not in self._seen:
            flat = tensor.detach().as_strided((numel,), (1,), 0)
            self._seen[storage_key(storage)] = (StorageWatch(tensor), rounded(flat))
        _, made = self._seen[storage_key(storage)]
        return _View(made, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def forget(self) -> None:
        """Let the tensors go: the graph holds on to its hooks."""
        self._seen.clear()


def _unpack(packed: Any) -> Tensor:
    tensor: Tensor = packed.tensor() if isinstance(packed, _View) else packed
    return tensor


@contextmanager
def compressing(kept: Collection[int]) -> Iterator[None]:
    """Round what autograd saves meanwhile. kept: storages (their keys) that are not: parameters."""
    call = _Call(kept)
    try:
        with saved_tensors_hooks(call.pack, _unpack):
            yield
    finally:
        call.forget()


def check_resting(plan: Plan, key: str) -> None:
    """OutsizeError where activations that are rounded would leave the device. key: of the setting
    that is int8."""
    if plan.rests_below("activations"):
        raise OutsizeError(
            f"{key} is 'int8', and activations rest below the device, which do not go together:"
            " leave one of them out"
        )


def rounding_blocks(job: Job) -> Around:
    """Has passes of stages of blocks round what they keep; what the head keeps stays as it is."""

    def around(run: Call, action: Action, points: Points) -> Call:
        stage, blocks = job.plan.stages[action.stage], len(job.flow.blocks)
        if points.evaluates or not 1 <= stage.first < stage.last <= blocks + 1:
            return run
        kept = {storage_key(chunk.parameters) for chunk in job.chunks}

        def rounding() -> None:
            with compressing(kept):
                run()

        return rounding

    return around
