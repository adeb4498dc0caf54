"""What torch.distributed sends the device's tensors by: as NCCL does, harder where that lets an
error pass.

An operation is work of the group's own stream, behind what the caller's stream was given before.
It copies what it reads into host memory, a thread of the group meets the other workers over gloo,
and what it writes is copied back. A handle's `wait` has the current stream wait, not the host.
Before each operation the workers compare what they are at: another order on one of them is an
error that says both.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

Deed = Callable[[list[Tensor]], None]  # what the thread does with host copies
_SAID = 96  # bytes of an operation's words

_library: Any = None


def register(library: ctypes.CDLL) -> None:
    """Have torch.distributed find it for the device's tensors."""
    global _library
    from torch.distributed import Backend

    _library = library
    if "strict" not in Backend.backend_list:
        Backend.register_backend("strict", Group, devices=["strict"])


class Work:
    """An operation that is under way. It holds its tensors until somebody waited for it."""

    def __init__(self, group: Group, done: torch.Event, tensors: Sequence[Tensor]) -> None:
        self._group, self._done, self._tensors = group, done, list(tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._group.check()
        torch.accelerator.current_stream(self._group.device).wait_event(self._done)
        self._group.open.discard(self)
        self._tensors.clear()
        return True


class Group:
    """The operations of a backend that Outsize uses: contiguous tensors of the current device."""

    supports_coalescing = True

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        from torch.distributed import ProcessGroupGloo

        self._gloo: Any = ProcessGroupGloo(store, rank, size, timeout)
        self._rank, self._size = rank, size
        self.device = torch.device("strict", torch.accelerator.current_device_index())
        self._stream = torch.Stream(device=self.device)
        self._batch: list[tuple[str, Tensor, int, int]] | None = None
        self._faults: list[BaseException] = []
        self.open = set[Work]()  # nobody has waited for them
        self._jobs: queue.SimpleQueue[tuple[int, int, Callable[[], None]] | None]
        self._jobs = queue.SimpleQueue()
        weakref.finalize(self, self._jobs.put, None)
        arguments = (self._jobs, self._faults)
        threading.Thread(target=_carry, args=arguments, daemon=True).start()

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def check(self) -> None:
        """Raise what an operation has met."""
        if self._faults:
            raise RuntimeError(f"strict: {self._faults[0]}") from self._faults[0]

    # -- operations -------------------------------------------------------------------------------

    def allreduce(self, tensor: Tensor, op: Any) -> Work:
        return self._begin(
            f"allreduce {_form(tensor)}",
            [tensor],
            [tensor],
            lambda host: self._gloo.allreduce(host[0], op).wait(),
        )

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        return self._begin(
            f"broadcast {_form(tensor)} of {root}",
            [tensor],
            [tensor],
            lambda host: self._gloo.broadcast(host[0], root).wait(),
        )

    def _allgather_base(self, out: Tensor, mine: Tensor, options: Any = None) -> Work:
        def gather(host: list[Tensor]) -> None:
            parts = list(host[1].view(self._size, -1).unbind())
            self._gloo.allgather([parts], [host[0].view(-1)]).wait()

        return self._begin(f"allgather {_form(mine)}", [mine], [out], gather)

    def _reduce_scatter_base(self, out: Tensor, flat: Tensor, options: Any = None) -> Work:
        def scatter(host: list[Tensor]) -> None:
            everything = list(host[0].new_empty(self._size, host[0].numel()).unbind())
            self._gloo.allgather([everything], [host[0].view(-1)]).wait()
            mine = [x.view(self._size, -1)[self._rank] for x in everything]
            total = mine[0].clone()
            for part in mine[1:]:
                total += part
            host[1].view(-1).copy_(total)

        return self._begin(f"reduce_scatter {_form(flat)}", [flat], [out], scatter)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work | None:
        return self._message("send", tensors[0], peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work | None:
        return self._message("recv", tensors[0], peer, tag)

    def _message(self, name: str, tensor: Tensor, peer: int, tag: int) -> Work | None:
        self._mine(name, tensor)
        message = (name, tensor, peer, tag)
        if self._batch is not None:
            self._batch.append(message)
            return None
        return self._messages([message])

    def _start_coalescing(self) -> None:
        assert self._batch is None
        self._batch = []

    def _end_coalescing(self) -> Work:
        batch, self._batch = self._batch or [], None
        return self._messages(batch)

    def _messages(self, batch: list[tuple[str, Tensor, int, int]]) -> Work:
        sent = [tensor for name, tensor, _, _ in batch if name == "send"]
        had = [tensor for name, tensor, _, _ in batch if name == "recv"]

        def trade(host: list[Tensor]) -> None:
            places = {"send": iter(host[: len(sent)]), "recv": iter(host[len(sent) :])}
            works = [
                getattr(self._gloo, name)([next(places[name]).view(-1)], peer, tag)
                for name, _, peer, tag in batch
            ]
            for work in works:
                work.wait()

        return self._begin("", sent, had, trade)

    def abort(self) -> None:
        self._gloo.abort()

    def shutdown(self) -> None:
        self._jobs.put(None)

    # -- how one is carried out -------------------------------------------------------------------

    def _begin(self, said: str, reads: list[Tensor], writes: list[Tensor], deed: Deed) -> Work:
        """said: compared among all workers; "" for messages, which only two of them have."""
        self.check()
        for tensor in (*reads, *writes):
            self._mine(said or "a message", tensor)
        current = torch.accelerator.current_stream(self.device)
        self._stream.wait_stream(current)
        with self._stream:
            host = [_room(x) for x in reads]
            for room, tensor in zip(host, reads, strict=True):
                room.copy_(tensor, non_blocking=True)
            apart = [x for x in writes if all(x is not read for read in reads)]
            host += [_room(x) for x in apart]
            at = {id(x): room for x, room in zip((*reads, *apart), host, strict=True)}
            mark = _library.strict_mark(self.device.index, self._stream.stream_id)
            gate = _library.strict_gate(self.device.index, self._stream.stream_id)
            for tensor in writes:
                tensor.copy_(at[id(tensor)], non_blocking=True)
            done = torch.Event(self.device)
            done.record(self._stream)
        gloo, size = self._gloo, self._size
        self._jobs.put((mark, gate, lambda: _meet(gloo, size, said, deed, host)))
        work = Work(self, done, (*reads, *writes))
        self.open.add(work)
        return work

    def _mine(self, what: str, tensor: Tensor) -> None:
        if tensor.device != self.device:
            raise RuntimeError(
                f"strict: {what} of a tensor on {tensor.device}; expected one on {self.device}"
            )
        if not tensor.is_contiguous():
            raise RuntimeError(f"strict: {what} of a tensor that is not contiguous")


def _form(tensor: Tensor) -> str:
    return f"{tensor.numel()} {tensor.dtype}"


def _room(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def _meet(gloo: Any, size: int, said: str, deed: Deed, host: list[Tensor]) -> None:
    """In the group's thread: see that all are at the same operation, and carry it out."""
    if said:
        mine = torch.frombuffer(bytearray(said.encode()[:_SAID].ljust(_SAID)), dtype=torch.uint8)
        words = list(torch.zeros(size, _SAID, dtype=torch.uint8).unbind())
        gloo.allgather([words], [mine]).wait()
        all_said = [bytes(x.tolist()).decode().rstrip() for x in words]
        if len(set(all_said)) > 1:
            raise RuntimeError(
                "operations in another order: "
                + ", ".join(f"rank {rank} is at {text}" for rank, text in enumerate(all_said))
            )
    deed(host)


def _carry(
    jobs: queue.SimpleQueue[tuple[int, int, Callable[[], None]] | None],
    faults: list[BaseException],
) -> None:
    """The group's thread. After a fault nothing is sent, and what waits goes on: it reads NaN."""
    while (job := jobs.get()) is not None:
        mark, gate, deed = job
        _library.strict_reach(mark)
        try:
            if not faults:
                deed()
        except BaseException as fault:  # it is raised where somebody waits
            faults.append(fault)
        _library.strict_open(gate)
        del job, deed
