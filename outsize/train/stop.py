"""Ctrl-C and SIGTERM: the first asks the run to stop after its step, the second stops at once.

A signal reaches the workers of a run at different moments; which step is the last, they agree on
(outsize/train/loop.py).
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Self

ASKED = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """While entered, remembers the first signal in `signal` (None: none came to this worker).
    agreed: the signal that all workers stop for."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.agreed: int | None = None
        self._before: dict[int, object] = {}

    def asked(self) -> bool:
        """Whether all workers are to stop."""
        return self.agreed is not None

    @property
    def code(self) -> int:
        """The exit code that shells know a stopped process by."""
        number = self.agreed or self.signal
        assert number is not None
        return 128 + number

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            self._before = {number: signal.signal(number, self._handle) for number in ASKED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = number
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
