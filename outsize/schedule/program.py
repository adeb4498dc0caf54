"""Program: the actions of every worker of a mesh, in the grain that runs, and what they say.

Workers of one class have the same list: of a mesh whose data and tensor axes are alike throughout
there is one class a place of the pipeline. Lists are kept once a class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from outsize.schedule.schedule import Schedule

BUFFERS = 2  # tensors that one worker may have sent to another before they are received


class Talk(NamedTuple):
    """ranks: who takes part, in order. channel: the thread that calls it. operation: what the
    collective does. bytes: of it as a whole; 0 where they depend on a microbatch's shape. memory:
    bytes that a worker moves in its own memory to write and read them, where that is no copy. wide:
    times as many bytes are said where workers of several machines sum, which is done in a wider
    dtype (outsize/collectives/hierarchical.py)."""

    ranks: tuple[int, ...]
    channel: str
    operation: str
    bytes: float = 0
    memory: float = 0
    wide: float = 1

    @property
    def carried(self) -> float:
        """Bytes of which every worker has the shares of the others: an all-reduce carries each
        twice; who sends a tensor has nothing."""
        return {"all_reduce": 2, "recv": 2, "send": 0}.get(self.operation, 1) * self.bytes

    @property
    def received(self) -> float:
        """Bytes that a worker has from the others, on average where their shares are uneven: of B
        bytes over n workers an all-gather or a reduce-scatter brings B (n - 1) / n, an all-reduce
        twice as many."""
        return self.carried * (len(self.ranks) - 1) / len(self.ranks)


Says = Sequence[tuple[Talk, ...]]  # by an action's place in its list


class Voice(Protocol):
    """What one worker's actions say."""

    def says(self, schedule: Schedule) -> Says:
        """By place, what an action says to others, in order."""


@dataclass(frozen=True)
class Program:
    """lists: of one worker each. which: by rank, the worker's list. voices: by rank. alike: by
    rank, the first worker of which a proof may take this one for a copy: it has the same list, and
    the workers with which both speak are copies of each other in the same way. replicas: workers
    that compute every stage of every microbatch of theirs once."""

    lists: tuple[Schedule, ...]
    which: tuple[int, ...]
    voices: Sequence[Voice]
    alike: tuple[int, ...]
    replicas: tuple[tuple[int, ...], ...]

    def worker(self, rank: int) -> Schedule:
        """The list of a worker, with what it has of the step."""
        return self.lists[self.which[rank]]

    @property
    def own(self) -> Schedule:
        """The list of the worker that compiled the program: the first one."""
        return self.lists[0]
