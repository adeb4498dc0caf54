"""Turns: of the threads that are workers of one run, one computes while the others wait for theirs.

Python lets one thread in at a time, and whoever calls an operator of PyTorch lets the next one in:
threads that all have work change places at every small operator, which costs as much as the work.
Turns are a courtesy and keep nobody waiting for ever: who has waited for a while goes on without,
so that long operators run beside one another, and no order of waits can stand still.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from outsize import accelerator

PATIENCE = 0.05  # seconds: more than a few small operators take

_mine = threading.local()


class Turns:
    """Whose turn it is among some threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """The calling thread computes in turns with the others. For one that is in no turns yet."""
        _mine.turns, _mine.has = self, False
        self.enter()
        try:
            yield
        finally:
            self.leave()
            _mine.turns = None

    def enter(self) -> None:
        """Wait for the turn, a while long; it is the calling thread's already, maybe."""
        _mine.has = _mine.has or self._lock.acquire(timeout=PATIENCE)

    def leave(self) -> None:
        """It is another one's, if it was the calling thread's."""
        if _mine.has:
            _mine.has = False
            self._lock.release()


def here() -> Turns | None:
    """Those that the calling thread is in."""
    return getattr(_mine, "turns", None)


@contextmanager
def among(turns: Turns | None) -> Iterator[None]:
    """A thread that works for one of these, with `here()` of that one."""
    if turns is None:
        yield
    else:
        with turns.taken():
            yield


class _Aside:
    """No generator: workers that are threads come here twice for each thing that they say."""

    def __enter__(self) -> None:
        self._turns = here()
        if self._turns is not None:
            self._turns.leave()

    def __exit__(self, *_: object) -> None:
        if self._turns is not None:
            self._turns.enter()


def aside() -> AbstractContextManager[None]:
    """The calling thread waits for another one: it is the others' turn meanwhile."""
    return _Aside()


def differentiating(device: torch.device) -> AbstractContextManager[None]:
    """A backward pass on a device. An accelerator's is run by a thread of PyTorch's, which cannot
    leave the turn that the calling one would keep while both wait for other workers."""
    return aside() if accelerator.queues(device) else nullcontext()
