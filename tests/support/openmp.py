"""Threads that OpenMP keeps for the next parallel region. A forked process has none of them, and
waits for them for ever in the first region of its own."""

from __future__ import annotations

import ctypes

from outsize.kernels import building

SOFT = 1  # omp_pause_soft: what was set stays


def let_threads_go() -> None:
    """End those of the calling thread; the next region makes new ones."""
    for path in building.runtimes():
        assert ctypes.CDLL(path).omp_pause_resource_all(SOFT) == 0
