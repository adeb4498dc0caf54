"""Activations that rest below the device tier between FORWARD and BACKWARD.

What autograd saves in a stage's forward is noted, each storage once however many tensors share it,
written to the tier while the next stage computes, let go, and read back before the backward pass
asks for it. What somebody else still holds is not let go: there are never two copies. (Wu et al.,
"SSDTrain", 2024: deduplication, forwarding.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from outsize.torch_private import storage_key, storage_uses

if TYPE_CHECKING:
    from outsize.memory.store import Place, Store

LEAST = 1 << 16  # bytes: what is smaller costs more to move than to keep
_OURS = 2  # references to a storage that only its entry holds: the entry's and the question's


@dataclass
class Entry:
    """One storage, as a flat tensor over all of it: there, on its tier, or both."""

    flat: Tensor | None
    numel: int
    dtype: torch.dtype
    device: torch.device
    place: Place | None = None
    written: bool = False
    wanted: bool = False  # a backward pass has asked for it: it stays, whoever else is done with it

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Handle:
    """A tensor that autograd saved: a view of an entry's storage."""

    entry: Entry
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """The tensor; its entry must be there."""
        flat = self.entry.flat
        assert flat is not None, "activations are asked for before they were fetched"
        return flat.view(self.dtype).as_strided(self.size, self.stride, self.offset)


@dataclass
class Spill:
    """What one stage keeps of one microbatch."""

    owner: Spills
    store: Store
    parts: bool  # only named parts of the stage spill, each with hooks of its own
    entries: list[Entry] = field(default_factory=list)  # noted here first
    uses: list[Entry] = field(default_factory=list)  # these, and those that another noted before
    places: list[Place] = field(default_factory=list)  # of entries that were handed over

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps instead of a tensor."""
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return tensor  # its bytes alone do not say what it is
        storage = tensor.untyped_storage()
        if storage.nbytes() < LEAST or storage_key(storage) in self.owner.kept:
            return tensor
        del storage
        entry = self._entry(tensor)
        offset = int(tensor.storage_offset())
        return Handle(entry, tensor.dtype, tensor.shape, tensor.stride(), offset)

    def _entry(self, tensor: Tensor) -> Entry:
        entry = self.owner.noted.get(storage_key(tensor))
        if entry is None:
            entry = _noted(tensor)
            self.entries.append(entry)
            self.owner.note(entry)
        if not any(entry is known for known in self.uses):
            self.uses.append(entry)
        return entry

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A stage's forward: what it saves is noted."""
        self.owner.active = self
        try:
            with nullcontext() if self.parts else self.hooks():
                yield
        finally:
            self.owner.active = None

    def hooks(self) -> AbstractContextManager[Any]:
        """While entered, autograd saves handles."""
        return saved_tensors_hooks(self.pack, _unpack)

    def hold(self, inputs: list[Tensor]) -> list[Handle | None]:
        """Keep the inputs of the stage as handles too; the tensors become empty shells."""
        if self.parts:
            return []
        handles: list[Handle | None] = []
        for tensor in inputs:
            packed = self.pack(tensor.data)
            handles.append(packed if isinstance(packed, Handle) else None)
            if isinstance(packed, Handle):
                # The graph accumulates into this tensor: its shape must stay.
                tensor.data = tensor.new_zeros(()).expand(tensor.shape)
        return handles

    # -- EVICT: begin is called by the computing thread, run by the lane, settle by the former ----

    def write(self) -> None:
        """Write what is not on the tier yet."""
        for entry in self.uses:
            if entry.flat is not None and not entry.written:
                entry.place = self.owner.place(self.store, entry.bytes)
                self.store.write(entry.place, entry.flat)
                entry.written = True

    def release(self) -> None:
        """Let go what is on the tier, unless somebody else holds it or it was asked for again."""
        for entry in self.uses:
            if entry.wanted or entry.flat is None or not entry.written:
                continue
            if storage_uses(entry.flat) <= _OURS:
                self.owner.forget(entry)
                entry.flat = None

    # -- FETCH ----------------------------------------------------------------------------------

    def allocate(self) -> list[Entry]:
        """Room for what is not there; gives what has to be read."""
        for entry in self.uses:
            entry.wanted = True
        missing = [entry for entry in self.uses if entry.flat is None]
        for entry in missing:
            entry.flat = torch.empty(entry.numel, dtype=entry.dtype, device=entry.device)
            self.owner.note(entry)
        return missing

    def read(self, missing: list[Entry]) -> None:
        """Fill what was allocated."""
        for entry in missing:
            assert entry.flat is not None and entry.place is not None
            self.store.read(entry.place, entry.flat)

    # -- BACKWARD -------------------------------------------------------------------------------

    def hand_over(self) -> None:
        """What is there belongs to the graph alone from now on, which lets go of it piece by piece
        while it is differentiated."""
        self.places += [entry.place for entry in self.entries if entry.place is not None]
        for entry in self.entries:
            self.owner.forget(entry)
        self.entries, self.uses = [], []


class Spills:
    """The spilled activations of a job: one Spill for a stage and microbatch that is under way.
    kept: tensors whose storages stay whatever happens: parameters, the pool. noted: what is there
    of the stages under way, by its storage."""

    def __init__(self, kept: Iterable[Tensor] = ()) -> None:
        self.active: Spill | None = None
        self.kept = {storage_key(tensor) for tensor in kept}
        self.noted: dict[int, Entry] = {}
        self._live: dict[tuple[int, int], Spill] = {}
        self._free: dict[tuple[str, int], list[Place]] = {}  # places of steps before, by size

    def begin(self, stage: int, microbatch: int, store: Store, parts: bool) -> Spill:
        """That of a stage, whose blocks share it."""
        return self._live.setdefault((stage, microbatch), Spill(self, store, parts))

    def of(self, stage: int, microbatch: int) -> Spill:
        """The one of a stage and microbatch."""
        return self._live[stage, microbatch]

    def note(self, entry: Entry) -> None:
        """It is there, and shared by whoever saves a tensor of its storage."""
        if entry.flat is not None:
            self.noted[storage_key(entry.flat)] = entry

    def forget(self, entry: Entry) -> None:
        """It goes, or the graph alone has it."""
        if entry.flat is not None:
            self.noted.pop(storage_key(entry.flat), None)

    def place(self, store: Store, nbytes: int) -> Place:
        """A place for so many bytes: one of an earlier step, or a new one."""
        free = self._free.get((store.name, nbytes))
        return free.pop() if free else store.reserve(nbytes)

    def end(self, stage: int, microbatch: int) -> None:
        """The backward pass has had it."""
        spill = self._live.pop((stage, microbatch), None)
        if spill is None:
            return
        spill.hand_over()
        for place in spill.places:
            self._free.setdefault((spill.store.name, place.bytes), []).append(place)

    def reset(self) -> None:
        """Forget a step that failed."""
        for stage, microbatch in list(self._live):
            self.end(stage, microbatch)
        self.active = None


def spilling(module: nn.Module, spills: Spills) -> Callable[..., Any]:
    """A forward for a part whose saved tensors spill."""
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if spills.active is None or not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        with spills.active.hooks():
            return plain(*args, **kwargs)

    return forward


def _noted(tensor: Tensor) -> Entry:
    """An entry for a tensor's whole storage. `data` makes tensors that are views of no other, so
    that the entry is one reference to the storage."""
    numel = tensor.untyped_storage().nbytes() // tensor.element_size()
    flat = tensor.data.as_strided((numel,), (1,), 0).data
    return Entry(flat, numel, tensor.dtype, tensor.device)


def restore(inputs: list[Tensor], handles: list[Handle | None]) -> None:
    """Give a stage's inputs their values back."""
    for tensor, handle in zip(inputs, handles, strict=False):
        if handle is not None:
            tensor.data = handle.tensor()


def _unpack(packed: Any) -> Tensor:
    tensor: Tensor = packed.tensor() if isinstance(packed, Handle) else packed
    return tensor
