"""What the system says of a process: whether it is stopped, and whether it gets anything done."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# As /proc/PID/stat says it; GONE: no such process.
STOPPED, GONE, DISK, READY = "T", "", "D", "R"


@dataclass(frozen=True)
class Activity:
    """state: one letter of /proc/PID/stat for the main thread, "D" where any thread waits for a
    disk. seconds: of processor time so far, that of processes it has started included. bytes: read
    and written so far, sockets that are written to included."""

    @property
    def wants(self) -> bool:
        """Whether it waits for nothing but the machine: a disk, or its turn on a busy core."""
        return self.state in (DISK, READY)

    state: str
    seconds: float
    bytes: int


def activity(pid: int) -> Activity:
    """Of a process with all its threads."""
    try:
        state, seconds = _stat(Path(f"/proc/{pid}/stat"))
        if state == "S" and _on_disk(pid):
            state = DISK
        seconds += sum(_stat(Path(f"/proc/{child}/stat"))[1] for child in _children(pid))
    except (OSError, IndexError, ValueError):
        return Activity(GONE, 0.0, 0)
    return Activity(GONE if state in ("Z", "X") else state, seconds, _bytes(pid))


def _stat(path: Path) -> tuple[str, float]:
    fields = path.read_text().rpartition(")")[2].split()  # a name may hold blanks and brackets
    ticks = sum(map(int, fields[11:15]))  # own and of children that have ended, user and system
    return fields[0], ticks / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[str]:
    """Processes that it has started and that run, such as a compiler."""
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # not every kernel has it
        return []


def _on_disk(pid: int) -> bool:
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            if _stat(task / "stat")[0] == DISK:
                return True
        except (OSError, IndexError, ValueError):  # a thread that has just ended
            continue
    return False


def _bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        found = dict(line.split(": ") for line in lines)
        return sum(int(found[key]) for key in ("rchar", "wchar", "read_bytes", "write_bytes"))
    except (OSError, KeyError, ValueError):  # hardened systems hide it
        return 0
