"""Worker processes of tests: what ran, and that nothing of it is left."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from outsize.launch import Mailbox, Speaker, run_here
from outsize.launch.activity import GONE, activity
from outsize.launch.local import FIRST


def until(true: Callable[[], bool], seconds: float = 300.0) -> bool:
    """Wait for something that comes about in another thread or process; whether it has."""
    over = time.monotonic() + seconds
    while not true() and time.monotonic() < over:
        time.sleep(0.01)
    return true()


def run_and_leave_nothing(
    count: int, work: Callable[[Mailbox], int], home: Path, speaker: Speaker = FIRST
) -> int:
    """The exit code of workers that are all gone afterwards, with their shared memory."""

    def noted(post: Mailbox) -> int:
        (home / f"pid-{post.rank}").write_text(str(os.getpid()))
        return work(post)

    code = run_here(count, noted, speaker)
    for path in home.glob("pid-*"):
        pid = path.read_text()
        assert activity(int(pid)).state == GONE
        assert not list(Path("/dev/shm").glob(f"outsize-{pid}-*"))
    return code


def forked(
    home: Path,
    place: dict[str, str],
    *words: object,
    closing: int | None = None,
    first: Callable[[], object] | None = None,
) -> int:
    """A process of `outsize *words` in an environment; what it prints is in home/out and err.
    closing: a descriptor that it shall not have. first: what it does before."""
    pid = os.fork()
    if pid == 0:
        from outsize.cli.main import main

        if closing is not None:
            os.close(closing)
        if first is not None:
            first()
        sys.stdout, sys.stderr = ((home / name).open("w") for name in ("out", "err"))
        os.dup2(sys.stdout.fileno(), 1)
        os.dup2(sys.stderr.fileno(), 2)
        os.environ |= place
        code = 99  # of workers of torchrun: the launcher ends the process itself
        try:
            main([str(word) for word in words], "outsize")
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid
