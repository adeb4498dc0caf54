"""`outsize serve` as a process of its own, and what can be seen of it from outside."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import httpx

OUTSIZE = (sys.executable, "-m", "outsize")
READY = 300.0  # seconds in which a server is there
LINES = 15  # of a log that are shown


class Server:
    """Of a directory, with options of `outsize serve`, in a `with`. url: of the API; plan: what it
    says before that; since: seconds from its start to the address."""

    def __init__(self, directory: Path, options: Sequence[str], log: Path) -> None:
        self._log, begin = log, time.perf_counter()
        command = [
            *OUTSIZE,
            "serve",
            str(directory),
            "--port",
            "0",
            "--tokenizer",
            "bytes",
            *options,
        ]
        with log.open("w") as out:
            self._child = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            self.url = self._address()
        except BaseException:
            self._child.kill()
            self._child.wait()
            raise
        self.since = time.perf_counter() - begin
        self.plan = [line for line in log.read_text().splitlines() if "serving" not in line]

    def _address(self) -> str:
        until = time.monotonic() + READY
        while time.monotonic() < until:
            text = self._log.read_text(errors="replace")
            if found := re.search(r"^serving \S+ at (http\S+)/v1", text, re.MULTILINE):
                return found[1]
            if self._child.poll() is not None:
                raise SystemExit(f"the server failed:\n{_tail(text)}")
            time.sleep(0.05)
        raise SystemExit(f"the server is not there after {READY:g} s:\n{_tail(text)}")

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def resident(self) -> int:
        """Bytes now, of all its processes."""
        return sum(_status(pid, "VmRSS") for pid in self._pids())

    @property
    def peak(self) -> int:
        """Most bytes so far; of several processes together, at most."""
        return sum(_status(pid, "VmHWM") for pid in self._pids())

    @property
    def metrics(self) -> dict[str, float]:
        """What it counts, by name without `outsize_` and `_total`."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        lines = [line.split() for line in text.splitlines() if line.startswith("outsize_")]
        return {
            name.removeprefix("outsize_").removesuffix("_total"): float(value)
            for name, value in lines
        }

    def processor(self) -> tuple[float, float]:
        """Seconds of processor that it has taken: the thread of the API, and all others."""
        ticks, found = os.sysconf("SC_CLK_TCK"), [0.0, 0.0]
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            words = (task / "stat").read_text().rpartition(")")[2].split()
            found[int(task.name) != self.pid] += (int(words[11]) + int(words[12])) / ticks
        return found[0], found[1]

    def _pids(self) -> list[int]:
        below = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [self.pid, *map(int, below)]

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._child.send_signal(signal.SIGTERM)
        try:
            self._child.wait(60)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
            raise SystemExit("the server did not end within 60 s of SIGTERM") from None


def ended_too() -> None:
    """SIGTERM ends servers too, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def _status(pid: int, key: str) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return 0  # it has ended
    found = re.search(rf"^{key}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-LINES:])
