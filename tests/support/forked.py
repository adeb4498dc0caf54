"""Worker processes of tests: what ran, and that nothing of it is left."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from outsize.launch import Mailbox, run_here
from outsize.launch.activity import GONE, activity


def until(true: Callable[[], bool], seconds: float = 300.0) -> bool:
    """Wait for something that comes about in another thread or process; whether it has."""
    over = time.monotonic() + seconds
    while not true() and time.monotonic() < over:
        time.sleep(0.01)
    return true()


def run_and_leave_nothing(count: int, work: Callable[[Mailbox], int], home: Path) -> int:
    """The exit code of workers that are all gone afterwards, with their shared memory."""

    def noted(post: Mailbox) -> int:
        (home / f"pid-{post.rank}").write_text(str(os.getpid()))
        return work(post)

    code = run_here(count, noted)
    for path in home.glob("pid-*"):
        pid = path.read_text()
        assert activity(int(pid)).state == GONE
        assert not list(Path("/dev/shm").glob(f"outsize-{pid}-*"))
    return code
