"""What torch.distributed sends the device's tensors by: as NCCL does, harder where that lets an
error pass. A ProcessGroup, for `init_process_group("strict")` and a DeviceMesh too.

An operation is work of the group's own stream, behind what the caller's stream was given before.
It copies what it reads into host memory, a thread of the group meets the other workers over gloo
(`meeting`), and what it writes is copied back. A handle's `wait` has the current stream wait, not
the host. Another order on a worker, in one group or of two, is an error that says what each is at.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Backend, ProcessGroup

from strict.meeting import Deed, Job, Meeting

_Ends = tuple[str, Tensor, int, int]  # "send" or "recv", what, the peer, a tag

_library: Any = None


def register(library: ctypes.CDLL) -> None:
    """Have torch.distributed find it for the device's tensors."""
    global _library
    _library = library
    if "strict" not in Backend.backend_list:
        Backend.register_backend("strict", Group, devices=["strict"])


class Work(torch._C._distributed_c10d.Work):
    """An operation that is under way. It holds its tensors until somebody waited for it."""

    def __init__(self, group: Group, done: torch.Event, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._group, self._done, self._tensors = group, done, list(tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._group.check()
        torch.accelerator.current_stream(self._group.device).wait_event(self._done)
        self._group.open.discard(self)
        self._tensors.clear()
        return True


class Group(ProcessGroup):
    """Contiguous tensors of the current device; of ProcessGroup what NCCL does natively."""

    supports_coalescing = True

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.device = torch.device("strict", torch.accelerator.current_device_index())
        self._stream = torch.Stream(device=self.device)
        self._batch: list[_Ends] | None = None
        self.store, self._meeting = store, Meeting(_library, store, rank, size, timeout)
        self.open = set[Work]()  # nobody has waited for them

    def size(self) -> int:
        return self._meeting.size

    def rank(self) -> int:
        return self._meeting.rank

    def getBackendName(self) -> str:  # noqa: N802
        return "strict"

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def check(self) -> None:
        """Raise what an operation has met."""
        if fault := self._meeting.fault:
            raise RuntimeError(f"strict: {fault}") from fault

    # -- operations -------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, op: Any = None) -> Work:
        all_of = _listed(tensors)
        operation = torch.distributed.ReduceOp.SUM if op is None else getattr(op, "reduceOp", op)

        def deed(gloo: Any, host: list[Tensor]) -> None:
            for room in host:
                gloo.allreduce(room, operation).wait()

        return self._begin(f"allreduce {_forms(all_of)}", all_of, all_of, deed)

    def broadcast(self, tensors: Any, root: Any) -> Work:
        tensor, source = _listed(tensors)[0], getattr(root, "rootRank", root)
        return self._begin(
            f"broadcast {_forms([tensor])} of {source}", [tensor], [tensor],
            lambda gloo, host: gloo.broadcast(host[0], source).wait(),
        )  # fmt: skip

    def all_gather_single(self, out: Tensor, mine: Tensor, options: Any = None) -> Work:
        def gather(gloo: Any, host: list[Tensor]) -> None:
            parts = list(host[1].view(self.size(), -1).unbind())
            gloo.allgather([parts], [host[0].view(-1)]).wait()

        return self._begin(f"allgather {_forms([mine])}", [mine], [out], gather)

    def allgather(self, outs: list[list[Tensor]], mine: list[Tensor], options: Any = None) -> Work:
        def gather(gloo: Any, host: list[Tensor]) -> None:
            gloo.allgather([[x.view(-1) for x in host[1:]]], [host[0].view(-1)]).wait()

        return self._begin(f"allgather {_forms(mine)}", mine[:1], outs[0], gather)

    def reduce_scatter_single(self, out: Tensor, flat: Tensor, options: Any = None) -> Work:
        def scatter(gloo: Any, host: list[Tensor]) -> None:
            summed = _summed(gloo, host[0], self.size()).view(self.size(), -1)
            host[1].view(-1).copy_(summed[self.rank()])

        return self._begin(f"reduce_scatter {_forms([flat])}", [flat], [out], scatter)

    def reduce_scatter(
        self, outs: list[Tensor], given: list[list[Tensor]], options: Any = None
    ) -> Work:
        """Of parts that may differ in length."""
        parts = [len(part) for part in given[0]]

        def scatter(gloo: Any, host: list[Tensor]) -> None:
            summed = _summed(gloo, torch.cat(host[:-1]), self.size())
            host[-1].copy_(summed.split(parts)[self.rank()])

        return self._begin(f"reduce_scatter {_forms(given[0])}", given[0], outs, scatter)

    def all_to_all_single(
        self, out: Tensor, flat: Tensor, had: list[int], sent: list[int], options: Any = None
    ) -> Work:
        ends = [x.split(sizes or len(x) // self.size()) for x, sizes in ((flat, sent), (out, had))]
        return self.alltoall(ends[1], ends[0])

    def alltoall(
        self, outs: Sequence[Tensor], given: Sequence[Tensor], options: Any = None
    ) -> Work:
        count = len(given)  # a deed that held tensors would keep them until it is done

        def trade(gloo: Any, host: list[Tensor]) -> None:
            sent, had = host[:count], host[count:]
            had[self.rank()].copy_(sent[self.rank()])
            others = [peer for peer in range(self.size()) if peer != self.rank()]
            works = [gloo.recv([had[peer].view(-1)], peer, 0) for peer in others]
            works += [gloo.send([sent[peer].view(-1)], peer, 0) for peer in others]
            for work in works:
                work.wait()

        return self._begin("alltoall", list(given), list(outs), trade)

    def barrier(self, options: Any = None) -> Work:
        return self.allreduce(torch.zeros(1, device=self.device))

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work | None:
        return self._message("send", tensors[0], peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work | None:
        return self._message("recv", tensors[0], peer, tag)

    def all_gather_single_coalesced(
        self, outs: Sequence[Tensor], mine: Sequence[Tensor], options: Any = None
    ) -> Work:
        return [self.all_gather_single(*pair) for pair in zip(outs, mine, strict=True)][-1]

    def reduce_scatter_single_coalesced(
        self, outs: Sequence[Tensor], flats: Sequence[Tensor], options: Any = None
    ) -> Work:
        return [self.reduce_scatter_single(*pair) for pair in zip(outs, flats, strict=True)][-1]

    # Names of PyTorch 2.12 and before.
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    allreduce_coalesced = allreduce

    # -- messages between two ---------------------------------------------------------------------

    def _message(self, name: str, tensor: Tensor, peer: int, tag: int) -> Work | None:
        self._mine(name, tensor)
        message = (name, tensor, peer, tag)
        if self._batch is not None:
            self._batch.append(message)
            return None
        return self._messages([message])

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        assert self._batch is None
        self._batch = []

    def _end_coalescing(self, device: torch.device | None = None) -> Work:
        batch, self._batch = self._batch or [], None
        return self._messages(batch)

    def _messages(self, batch: list[_Ends]) -> Work:
        sent = [tensor for name, tensor, _, _ in batch if name == "send"]
        had = [tensor for name, tensor, _, _ in batch if name == "recv"]
        count, ends = len(sent), [(name, peer, tag) for name, _, peer, tag in batch]

        def trade(gloo: Any, host: list[Tensor]) -> None:
            places = {"send": iter(host[:count]), "recv": iter(host[count:])}
            works = [
                getattr(gloo, name)([next(places[name]).view(-1)], peer, tag)
                for name, peer, tag in ends
            ]
            for work in works:
                work.wait()

        return self._begin("", sent, had, trade)

    def abort(self) -> None:
        self._meeting.gloo.abort()

    def shutdown(self) -> None:
        self._meeting.end()

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
        self._meeting.put(Job(said, deed, host, mark, gate))
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


def _listed(tensors: Tensor | list[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _forms(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{x.numel()} {x.dtype}" for x in tensors)


def _room(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def _summed(gloo: Any, mine: Tensor, size: int) -> Tensor:
    """(elements,) everybody's added in the order of ranks."""
    everything = list(mine.new_empty(size, mine.numel()).unbind())
    gloo.allgather([everything], [mine.view(-1)]).wait()
    total = everything[0].clone()
    for part in everything[1:]:
        total += part
    return total
