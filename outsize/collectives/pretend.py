"""A group in which only this worker exists: shapes and bytes as in the real one, no messages.

For tensors without numbers (fake, meta): a step is rehearsed, its memory and bytes counted. What
comes from others is left as it is; what goes nowhere is not read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from outsize.collectives.collective import Operation, Span
from outsize.collectives.mesh import Mesh
from outsize.collectives.pieces import agree, gathered, outside, reduced, scattered
from outsize.collectives.world import Key, Use
from outsize.errors import OutsizeError


class Pretend:
    """The worker `rank` of a group of `size` that is not there. Lengths are checked as they are in
    a real group, where a wrong one would be a wrong sum or a hang."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank
        self.received: Counter[str] = Counter()

    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> Tensor:
        numel = reduced(tensor.numel(), self.size, self.rank)
        self.received["all_reduce"] += numel * tensor.element_size()
        return tensor

    def reduce_scatter(self, flat: Tensor, spans: Sequence[Span], out: Tensor) -> None:
        agree("reduce_scatter", self, spans, out, flat)
        numel = scattered(spans, self.rank)
        self.received["reduce_scatter"] += numel * out.element_size()

    def all_gather(self, mine: Tensor, spans: Sequence[Span], out: Tensor) -> None:
        agree("all_gather", self, spans, mine, out)
        self.received["all_gather"] += gathered(spans, self.rank) * out.element_size()

    def all_to_all(self, given: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        assert len(given) == len(out) == self.size, "one tensor for and from every worker"
        self.received["all_to_all"] += outside(out, self.rank)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        self.received["broadcast"] += tensor.nbytes * (self.rank != source)
        return tensor

    def barrier(self) -> None:
        return None


class PretendWorld:
    """A run of mesh.size workers as one of them would see it, alone. Each call of `group` gives the
    same collective again, so that what it counted can be read."""

    def __init__(self, mesh: Mesh, rank: int = 0) -> None:
        if not 0 <= rank < mesh.size:
            raise OutsizeError(f"rank {rank} of mesh {mesh}; expected 0 to {mesh.size - 1}")
        self.mesh, self.rank = mesh, rank
        self.groups: dict[Key, Pretend] = {}

    def group(self, ranks: Sequence[int], use: Use = "compute") -> Pretend:
        key = (tuple(ranks), use)
        if key not in self.groups:
            self.groups[key] = Pretend(len(key[0]), key[0].index(self.rank))
        return self.groups[key]
