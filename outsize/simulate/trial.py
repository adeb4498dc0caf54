"""How long a trial is: steps of blocks that are timed before a run begins.

The first steps of a process are slower, up to 1.5 times: memory comes page by page, kernels are set
up, a core wakes. And what is freed goes back to the system in some steps and not in others, so that
times of one action come in two sorts. So short steps are made often, and the middle of the later
ones is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean
from typing import TypeVar

T = TypeVar("T")
WARM = 1  # step that is not counted
SECONDS = 1.5  # of steps that are counted
LEAST, MOST = 3, 8  # of them; more tell little more, and every start waits for them


def counted(seconds: float) -> int:
    """How many steps are counted, of which one takes so long."""
    return LEAST if seconds * LEAST >= SECONDS else min(MOST, math.ceil(SECONDS / seconds))


def lasts(seconds: float) -> float:
    """Seconds of a trial whose steps take so long."""
    return seconds * (WARM + counted(seconds))


def later(steps: Sequence[T]) -> Sequence[T]:
    """Of counted steps those that tell: without the first third where there are enough."""
    return steps[min(len(steps) // 3, max(0, len(steps) - LEAST)) :]


def middle(seconds: Sequence[float]) -> float:
    """The mean without the longest quarter and the shortest: the median of three or four; of two
    sorts of times what many of them take together."""
    count = len(seconds)
    cut = min(math.ceil(count / 4), (count - 1) // 2)
    return mean(sorted(seconds)[cut : count - cut])
