"""A hard cap on the memory of a child process: a group of control groups, version 1, as root.

Everything that the process and its children touch counts, the interpreter, the heap and the page
cache of what they read alike; past the limit the kernel takes page cache back, then kills.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup/memory")
ENTER = 'echo $$ > "$0/cgroup.procs" && exec "$@"'  # the shell enters, then becomes the command
KILLED = -signal.SIGKILL


@dataclass(frozen=True)
class Finished:
    """How a capped process ended. code: its exit code; peak: most bytes of the whole group, page
    cache included; killed: the kernel ended it for memory; late: it ran past its time."""

    code: int
    peak: int
    killed: bool
    late: bool = False

    @property
    def good(self) -> bool:
        return self.code == 0

    def __str__(self) -> str:
        if self.good:
            return "ended well"
        why = "over its memory" if self.killed else "over its time" if self.late else "a fault"
        return f"ended with exit code {self.code}: {why}"


def available() -> bool:
    """Whether this machine and user can cap memory this way."""
    return (ROOT / "memory.limit_in_bytes").exists() and os.access(ROOT, os.W_OK)


@contextlib.contextmanager
def capped(nbytes: int) -> Iterator[Path]:
    """A group that may hold nbytes; whoever is left in it at the end is killed, the group removed.

    SystemExit where the machine has no such groups.
    """
    if not available():
        raise SystemExit(f"{ROOT} is not there or not writable; run as root with cgroups version 1")
    group = ROOT / f"outsize-{os.getpid()}-{secrets.token_hex(4)}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(nbytes))
        yield group
    finally:
        _remove(group)


def run_capped(
    command: Sequence[str], nbytes: int, timeout: float, env: dict[str, str] | None = None
) -> Finished:
    """Run a command under a cap; its output goes where this process's goes."""
    with capped(nbytes) as group:
        child = subprocess.Popen(["sh", "-c", ENTER, str(group), *command], env=env)
        late = False
        try:
            code = child.wait(timeout)
        except subprocess.TimeoutExpired:
            late = True
            child.kill()
            code = child.wait()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        peak = int((group / "memory.max_usage_in_bytes").read_text())
        return Finished(code, peak, code == KILLED and not late, late)


def _remove(group: Path) -> None:
    for _ in range(50):
        for process in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        with contextlib.suppress(OSError):  # busy while a process is still dying
            group.rmdir()
            return
        time.sleep(0.1)
