"""What a worker prints: rank 0 prints where the run was started, every other one into a file.

Until the run has a directory, the text is held in memory that has no name (memfd); then it goes on
in DIRECTORY/workers/rank-N.log. Descriptors 1 and 2 themselves are turned round, so that what
libraries and helper processes print goes the same way.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = "workers"
TAIL = 4000  # bytes of a log that a report shows


@dataclass
class Capture:
    """The output of one worker. held: descriptor of the nameless memory; None: it just prints."""

    rank: int
    held: int | None = None
    path: Path | None = None

    def begin(self) -> None:
        """From now on what this process prints is held."""
        if self.held is not None:
            _turn(self.held)
            sys.stdout, sys.stderr = (
                os.fdopen(n, "w", buffering=1, encoding="utf-8", closefd=False) for n in (1, 2)
            )

    def settle(self, directory: Path) -> None:
        """What was held and all that follows goes into the run's directory."""
        if self.held is None or self.path is not None:
            return
        path = directory / FOLDER / f"rank-{self.rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.write(file, os.pread(self.held, os.fstat(self.held).st_size, 0))
        _turn(file)
        os.close(file)
        self.path = path


def held(rank: int) -> int:
    """Nameless memory for the output of a worker."""
    descriptor = os.memfd_create(f"outsize rank {rank}", os.MFD_CLOEXEC)
    return descriptor


def tail(rank: int, descriptor: int | None, path: Path | None) -> str:
    """The last lines that a worker printed, under a line that says so; empty where it has not."""
    data = b""
    if path is not None:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            data = file.read()
    elif descriptor is not None:
        size = os.fstat(descriptor).st_size
        data = os.pread(descriptor, TAIL, max(0, size - TAIL))
    text = data.decode(errors="replace").strip()
    at = "" if path is None else f" ({path})"
    return text and f"-- the last that rank {rank} printed{at}:\n{text}"


def _turn(descriptor: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    for number in (1, 2):
        os.dup2(descriptor, number)
