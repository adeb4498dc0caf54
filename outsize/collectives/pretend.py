"""A group in which only this worker exists: shapes and bytes as in the real one, no messages.

For tensors without numbers (fake, meta): a step is rehearsed, its memory and bytes counted. What
comes from others is left as it is; what goes nowhere is not read. On an accelerator a sum that
workers add themselves takes the room that it takes there (c10d.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from outsize import accelerator
from outsize.collectives.collective import DONE, Call, Collective, Handle, Span
from outsize.collectives.mesh import Mesh
from outsize.collectives.pieces import added_here, at_once, wider
from outsize.collectives.world import Key, Use
from outsize.errors import OutsizeError


class Pretend(Collective):
    """The worker `rank` of a group of `size` that is not there. Lengths are checked as they are in
    a real group, where a wrong one would be a wrong sum or a hang."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank
        self.received = Counter()

    def start(self, call: Call) -> Handle:
        self.count(call)
        if summed := added_here(call, self.size):
            self._rooms(*summed)
        return DONE

    def _rooms(self, flat: Tensor, spans: Sequence[Span]) -> None:
        """What C10d makes for a sum, for as long as it is made."""
        if accelerator.queues(flat.device):
            step = at_once(flat, spans)
            parts = flat.new_empty(self.size * step)
            sums = flat.new_empty(step, dtype=wider(flat.dtype))
            del parts, sums


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
