"""One writer in a directory: a lock that the kernel lets go of when its process ends, however.

A file with a pid in it would outlive a killed process; an flock does not. The pid is written into
the file only so that the second comer can be told who was first.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

from outsize.errors import OutsizeError

LOCK_NAME = ".lock"


class DirectoryLock:
    """Held from `acquire` to `release` or to the end of the process."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / LOCK_NAME
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def acquire(self) -> None:
        """Take the lock, or OutsizeError naming the process that has it; OSError as it comes."""
        if self.held:
            return
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise OutsizeError(
                f"directory {str(self.path.parent)!r} is in use by process {holder or 'unknown'}; "
                "expected one run at a time: wait for it, end it, or choose another directory"
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        self._write_pid(descriptor)
        _drop_in_children(self)

    def release(self) -> None:
        """Let go; nothing happens when it is not held. The file stays: to remove it is a race."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def _write_pid(self, descriptor: int) -> None:
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError:  # a full disk: the lock holds all the same, only unnamed
            return


def _drop_in_children(lock: DirectoryLock) -> None:
    """A forked helper shares the lock and would keep it after a killed parent: close it there."""
    reference = weakref.ref(lock)

    def close() -> None:
        held = reference()
        if held is not None:
            held.release()

    os.register_at_fork(after_in_child=close)
