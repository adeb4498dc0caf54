"""Collectives over torch.distributed's transports: gloo between processors, an accelerator's own.

The transport is made here, on a store; no default process group is touched. Its own operations are
used where they are fast and right: all-reduces of dtypes that need no wider sum, broadcasts. All
else is messages between two workers, so spans may be of any lengths and nothing is padded: in a
reduction everybody's part is sent to whom it belongs and summed there in the order of ranks.
bfloat16 and float16 are summed in float32 and rounded once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from outsize import accelerator
from outsize.collectives.collective import (
    DONE,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Call,
    Collective,
    Handle,
    Operation,
    ReduceScatter,
    Span,
    even,
    length,
    put,
)
from outsize.collectives.pieces import (
    NARROW,
    added_here,
    at_once,
    equal,
    flattened,
    joined,
    raw,
    wider,
)
from outsize.errors import OutsizeError
from outsize.torch_private import (
    ProcessGroupGloo,
    ReduceOp,
    Store,
    Work,
    device_transport,
    end_coalescing,
    gloo_options,
    parts_of_all,
    start_coalescing,
    sums_of_parts,
    sums_of_uneven_parts,
)


class Transport(Protocol):
    """What is used of a backend of torch.distributed."""

    supports_coalescing: bool

    def size(self) -> int: ...
    def rank(self) -> int: ...
    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work: ...
    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work: ...
    def broadcast(self, tensor: Tensor, root: int) -> Work: ...
    def allreduce(self, tensor: Tensor, op: Any) -> Work: ...
    def abort(self) -> None: ...
    def shutdown(self) -> None: ...


class C10d(Collective):
    """The workers `members` (ranks of the run) over a transport, which numbers them from 0.

    device: whose tensors it carries; those of another are copied there and back. own: equal parts
    are summed and gathered by the transport's own operations; NCCL's are the quickest there are.
    """

    def __init__(self, transport: Transport, members: Sequence[int], device: str = "cpu") -> None:
        self.members = tuple(members)
        self.size, self.rank = transport.size(), transport.rank()
        self.received = Counter()
        self.device = torch.device(device)
        # NCCL carries what belongs together at once, in the order of a stream.
        self.early = not transport.supports_coalescing
        self.own = not self.early
        self._transport: Transport | None = transport
        self._room: dict[tuple[str, torch.dtype], Tensor] = {}

    def start(self, call: Call) -> Handle:
        """A sum whose parts are added here is over when this returns."""
        self.count(call)
        elsewhere = call.device not in (None, self.device)
        return self._sent(call) if elsewhere else self._begin(call)

    def _sent(self, call: Call) -> Handle:
        """An operation on tensors of another device: small numbers, which stay with the host."""
        placed: list[tuple[Tensor, Tensor]] = []

        def place(tensor: Tensor) -> Tensor:
            placed.append((tensor, tensor.to(self.device, copy=True)))
            return placed[-1][1]

        handle = self._begin(call.mapped(place))

        def back() -> None:
            handle.wait()
            for tensor, there in placed:
                tensor.copy_(there)

        return Handle(back)

    def _begin(self, call: Call) -> Handle:
        match call:
            case AllReduce(tensor, operation):
                return self._all_reduce(tensor, operation)
            case ReduceScatter(flat, spans, out):
                if not self.own or added_here(call, self.size):
                    self._reduce(call.name, flat, spans, out, "sum")
                    return DONE
                if equal(spans):
                    here = flat[spans[0][0] : spans[-1][1]]
                    return self._under_way(call.name, sums_of_parts(self._open(), out, here))
                parts = [flat[slice(*span)] for span in spans]
                return self._under_way(call.name, sums_of_uneven_parts(self._open(), out, parts))
            case AllGather(mine, spans, out):
                put(mine, out[slice(*spans[self.rank])])
                if self.own and equal(spans):
                    here = out[spans[0][0] : spans[-1][1]]
                    return self._under_way(call.name, parts_of_all(self._open(), here, mine))
                return self._gather(call.name, mine, spans, out)
            case AllToAll(given, parts):
                parts[self.rank].copy_(given[self.rank])
                return self._trade(call.name, given.__getitem__, parts.__getitem__)
            case Broadcast(tensor, source):
                flat, back = flattened(tensor)
                work = self._open().broadcast(raw(flat), source)
                return self._under_way(call.name, work, source, back)
            case _:
                nothing = torch.zeros(1, device=self.device)
                self._trade(call.name, lambda _: nothing, lambda _: nothing.clone()).wait()
                accelerator.settle(self.device)
                return DONE

    def _all_reduce(self, tensor: Tensor, operation: Operation) -> Handle:
        flat, back = flattened(tensor)
        if operation == "max" or flat.dtype in NARROW:  # gloo's largest loses a NaN
            spans = even(flat.numel(), self.size)
            mine = flat[slice(*spans[self.rank])]
            self._reduce("all_reduce", flat, spans, mine, operation)
            self._gather("all_reduce", mine, spans, flat).wait()
            back()
            return DONE
        if not flat.numel():
            return DONE
        work = self._open().allreduce(flat, ReduceOp.SUM)
        return self._under_way("all_reduce", work, back=back)

    def post(
        self, name: str, sent: Sequence[tuple[int, Tensor]], had: Sequence[tuple[int, Tensor]]
    ) -> Handle:
        """Contiguous tensors to and from workers by their place; both ends say so, under a name.
        Empty ones are left out, as both ends know. Nothing is counted. Where `early`, a receiver
        that says so before its turn saves a latency: gloo sends when it knows that it is awaited.
        """
        transport, works, peer = self._open(), list[tuple[int, Work]](), self.rank
        together = not self.early
        try:
            if together:
                start_coalescing(transport)
            for peer, tensor in had:
                if tensor.numel():
                    works.append((peer, transport.recv([raw(tensor)], peer, 0)))
            for peer, tensor in sent:
                if tensor.numel():
                    works.append((peer, transport.send([raw(tensor)], peer, 0)))
            if together:
                works = [(peer, end_coalescing(transport))]
        except RuntimeError as error:
            raise self._failed(name, peer, error) from error
        return Handle(lambda: self._finish(name, works))

    def abort(self, reason: str) -> None:
        """Cut the connections: whoever waits for this worker in this group fails at once."""
        if self._transport is not None:
            self._transport.abort()  # NCCL's; gloo's does nothing
            self._transport = None

    def close(self) -> None:
        """Cut the connections, after use."""
        if self._transport is not None:
            self._transport.shutdown()
            self._transport = None

    def _open(self) -> Transport:
        assert self._transport is not None, "a group that was closed"
        return self._transport

    def _reduce(
        self, name: str, flat: Tensor, spans: Sequence[Span], out: Tensor, operation: Operation
    ) -> None:
        """out = the sum or the largest of everybody's flat[own span], by pieces."""
        longest, step = max(map(length, spans)), at_once(flat, spans)
        room = self._made(flat.dtype, "parts", self.size * step, flat).view(self.size, step)
        sums = self._made(wider(flat.dtype), "total", step, flat)
        for at in range(0, longest, step):
            mine = _piece(flat, spans[self.rank], at, step)
            theirs = room[:, : len(mine)]
            pieces = [_piece(flat, span, at, step) for span in spans]
            self._trade(name, pieces.__getitem__, theirs.__getitem__).wait()
            parts = [mine if r == self.rank else theirs[r] for r in range(self.size)]
            total = sums[: len(mine)].copy_(parts[0])
            for part in parts[1:]:
                joined(total, part, operation)
            out[at : at + len(mine)] = total

    def _made(self, dtype: torch.dtype, use: str, numel: int, like: Tensor) -> Tensor:
        """Room for a use. A processor's is kept: fresh memory costs more than the messages. An
        accelerator's allocator has it at hand, and forecasts count it while the sum is made."""
        if accelerator.queues(like.device):
            return like.new_empty(numel, dtype=dtype)
        kept = self._room.get((use, dtype))
        if kept is None or kept.numel() < numel:
            kept = self._room[use, dtype] = torch.empty(numel, dtype=dtype, device=like.device)
        return kept[:numel]

    def _gather(self, name: str, mine: Tensor, spans: Sequence[Span], out: Tensor) -> Handle:
        return self._trade(name, lambda _: mine, lambda peer: out[slice(*spans[peer])])

    def _trade(
        self, name: str, given: Callable[[int], Tensor], out: Callable[[int], Tensor]
    ) -> Handle:
        """Something to and from everyone else, nearest first; not counted."""
        apart = range(1, self.size)
        sent = [(peer, given(peer)) for peer in ((self.rank + d) % self.size for d in apart)]
        had = [(peer, out(peer)) for peer in ((self.rank - d) % self.size for d in apart)]
        return self.post(name, sent, had)

    def _under_way(
        self, name: str, work: Work, peer: int = -1, back: Callable[[], object] | None = None
    ) -> Handle:
        """peer: who is waited for, where the transport says so; back: what comes after."""
        works = [(self.rank if peer < 0 else peer, work)]
        return Handle(lambda: self._finish(name, works, back))

    def _finish(
        self,
        name: str,
        works: Sequence[tuple[int, Work]],
        back: Callable[[], object] | None = None,
    ) -> None:
        for peer, work in works:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._failed(name, peer, error) from error
        if back is not None:
            back()

    def _failed(self, name: str, peer: int, error: RuntimeError) -> OutsizeError:
        """peer: who was waited for; this worker itself where the transport does not say."""
        who = f"rank {self.members[peer]}" if peer != self.rank else "one of them"
        return OutsizeError(
            f"rank {self.members[self.rank]}: {name} with ranks {list(self.members)} waited for"
            f" {who}, which is gone or does not answer ({_cause(error)});"
            " see what the others printed"
        )


def over_gloo(
    store: Store, rank: int, members: Sequence[int], seconds: float, address: str = ""
) -> C10d:
    """The members' collective over gloo; rank: this worker's place among them. Everyone who waits
    `seconds` for a message gives up. address: of the interface to use, else the host's name's."""
    gloo: Any = ProcessGroupGloo
    span = timedelta(seconds=seconds)
    options: Any = span
    try:
        if address:
            options = gloo_options(address, span)
        return C10d(gloo(store, rank, len(members), options), members)
    except RuntimeError as error:
        raise OutsizeError(
            f"rank {members[rank]} cannot connect to ranks {list(members)}: {_cause(error)}; see"
            " that they run, and that GLOO_SOCKET_IFNAME names an interface on which they are seen"
        ) from error


def over_device(store: Store, rank: int, members: Sequence[int], seconds: float, kind: str) -> C10d:
    """The members' collective over what torch.distributed has for a kind of accelerator, such
    as NCCL; each with its current device."""
    try:
        made = device_transport(kind, store, rank, len(members), timedelta(seconds=seconds))
    except ValueError as error:
        raise OutsizeError(f"{error}; expected a device for several workers, or cpu") from error
    return C10d(made, members, str(accelerator.find(kind)))


def _cause(error: RuntimeError) -> str:
    """What the transport says, without its advice."""
    return str(error).strip().splitlines()[0].partition(". This is typically")[0]


def _piece(flat: Tensor, span: Span, at: int, step: int) -> Tensor:
    first, last = span
    return flat[min(first + at, last) : min(first + at + step, last)]
