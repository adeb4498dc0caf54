"""Collectives over torch.distributed's transports: gloo between processors, NCCL between GPUs.

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

from outsize.collectives.collective import Operation, Span
from outsize.collectives.pieces import (
    NARROW,
    agree,
    even,
    flattened,
    gathered,
    joined,
    length,
    outside,
    raw,
    reduced,
    scattered,
    wider,
)
from outsize.errors import OutsizeError
from outsize.torch_private import (
    ProcessGroupGloo,
    ReduceOp,
    Store,
    Work,
    end_coalescing,
    gloo_options,
    start_coalescing,
)

# Bytes of a message of a reduction: few enough for a processor's caches, many for a GPU's launches.
_PIECE = {"cpu": 4 << 20, "cuda": 64 << 20}


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


class C10d:
    """The workers `members` (ranks of the run) over a transport, which numbers them from 0."""

    def __init__(self, transport: Transport, members: Sequence[int], device: str = "cpu") -> None:
        self.members = tuple(members)
        self.size, self.rank = transport.size(), transport.rank()
        self.received: Counter[str] = Counter()
        # NCCL carries what belongs together at once, in the order of a stream.
        self.early = not transport.supports_coalescing
        self._transport: Transport | None = transport
        self._room: dict[tuple[str, torch.dtype], Tensor] = {}
        self._nothing = torch.zeros(1, device=device)

    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> Tensor:
        spans = even(tensor.numel(), self.size)
        numel = reduced(tensor.numel(), self.size, self.rank)
        self.received["all_reduce"] += numel * tensor.element_size()
        with flattened(tensor) as flat:
            if operation == "max" or flat.dtype in NARROW:  # gloo's largest loses a NaN
                mine = flat[slice(*spans[self.rank])]
                self._reduce("all_reduce", flat, spans, mine, operation)
                self._gather("all_reduce", mine, spans, flat)
            elif flat.numel():
                work = self._open().allreduce(flat, ReduceOp.SUM)
                self._finish("all_reduce", self.rank, work)
        return tensor

    def reduce_scatter(self, flat: Tensor, spans: Sequence[Span], out: Tensor) -> None:
        agree("reduce_scatter", self, spans, out, flat)
        self.received["reduce_scatter"] += scattered(spans, self.rank) * out.element_size()
        self._reduce("reduce_scatter", flat, spans, out, "sum")

    def all_gather(self, mine: Tensor, spans: Sequence[Span], out: Tensor) -> None:
        agree("all_gather", self, spans, mine, out)
        self.received["all_gather"] += gathered(spans, self.rank) * out.element_size()
        here = out[slice(*spans[self.rank])]
        if here.data_ptr() != mine.data_ptr():
            here.copy_(mine)
        self._gather("all_gather", mine, spans, out)

    def all_to_all(self, given: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        assert len(given) == len(out) == self.size, "one tensor for and from every worker"
        self.received["all_to_all"] += outside(out, self.rank)
        out[self.rank].copy_(given[self.rank])
        self._trade("all_to_all", lambda peer: given[peer], lambda peer: out[peer])

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        if self.rank != source:
            self.received["broadcast"] += tensor.nbytes
        with flattened(tensor) as flat:
            work = self._open().broadcast(raw(flat), source)
            self._finish("broadcast", source, work)
        return tensor

    def barrier(self) -> None:
        self._trade("barrier", lambda _: self._nothing, lambda _: torch.zeros_like(self._nothing))
        if self._nothing.is_cuda:
            torch.cuda.current_stream().synchronize()

    def messages(
        self, name: str, sent: Sequence[tuple[int, Tensor]], had: Sequence[tuple[int, Tensor]]
    ) -> None:
        """Contiguous tensors to and from workers by their place, counted under a name; both ends
        say so. Waits for all of them."""
        self.finish(name, self.begin(name, sent, had))

    def begin(
        self, name: str, sent: Sequence[tuple[int, Tensor]], had: Sequence[tuple[int, Tensor]]
    ) -> list[tuple[int, Work]]:
        """As `messages`, without waiting: the tensors are left alone until `finish` has had what
        this gives. Where `early`, a receiver that says so before its turn saves a latency: gloo
        sends when it knows that it is awaited."""
        self.received[name] += sum(tensor.nbytes for _, tensor in had)
        return self._post(name, sent, had)

    def finish(self, name: str, works: Sequence[tuple[int, Work]]) -> None:
        """Wait for what was begun."""
        for peer, work in works:
            self._finish(name, peer, work)

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
        longest = max(map(length, spans))
        step = min(_PIECE[flat.device.type] // flat.element_size(), max(longest, 1))
        room = self._kept(flat.dtype, "parts", self.size * step, flat).view(self.size, step)
        for at in range(0, longest, step):
            mine = _piece(flat, spans[self.rank], at, step)
            theirs = room[:, : len(mine)]
            pieces = [_piece(flat, span, at, step) for span in spans]
            self._trade(name, pieces.__getitem__, theirs.__getitem__)
            parts = [mine if r == self.rank else theirs[r] for r in range(self.size)]
            total = self._kept(wider(flat.dtype), "total", step, flat)[: len(mine)].copy_(parts[0])
            for part in parts[1:]:
                joined(total, part, operation)
            out[at : at + len(mine)] = total

    def _kept(self, dtype: torch.dtype, use: str, numel: int, like: Tensor) -> Tensor:
        """Room for a use, kept: fresh memory costs more than the messages."""
        kept = self._room.get((use, dtype))
        if kept is None or kept.numel() < numel:
            kept = self._room[use, dtype] = torch.empty(numel, dtype=dtype, device=like.device)
        return kept[:numel]

    def _gather(self, name: str, mine: Tensor, spans: Sequence[Span], out: Tensor) -> None:
        self._trade(name, lambda _: mine, lambda peer: out[slice(*spans[peer])])

    def _trade(
        self, name: str, given: Callable[[int], Tensor], out: Callable[[int], Tensor]
    ) -> None:
        """Something to and from everyone else, nearest first; not counted."""
        apart = range(1, self.size)
        sent = [(peer, given(peer)) for peer in ((self.rank + d) % self.size for d in apart)]
        had = [(peer, out(peer)) for peer in ((self.rank - d) % self.size for d in apart)]
        self.finish(name, self._post(name, sent, had))

    def _post(
        self, name: str, sent: Sequence[tuple[int, Tensor]], had: Sequence[tuple[int, Tensor]]
    ) -> list[tuple[int, Work]]:
        """Messages under way; empty ones are left out, as both ends know."""
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
        return works

    def _finish(self, name: str, peer: int, work: Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._failed(name, peer, error) from error

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


def over_nccl(store: Store, rank: int, members: Sequence[int], seconds: float) -> C10d:
    """The members' collective over NCCL, each with its current CUDA device."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds)
    transport: Any = ProcessGroupNCCL(store, rank, len(members), options)
    return C10d(transport, members, "cuda")


def _cause(error: RuntimeError) -> str:
    """What the transport says, without its advice."""
    return str(error).strip().splitlines()[0].partition(". This is typically")[0]


def _piece(flat: Tensor, span: Span, at: int, step: int) -> Tensor:
    first, last = span
    return flat[min(first + at, last) : min(first + at + step, last)]
