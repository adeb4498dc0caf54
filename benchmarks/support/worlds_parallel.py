"""Worlds: the processes of one contender, and two of them that step in turns."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from support.contender_parallel import Answer

HERE = Path(__file__).resolve().parent.parent
PATIENCE = 90.0  # seconds for a start or a step
LOG_LINES = 25


@dataclass(frozen=True)
class Spot:
    """Where the workers of a world run. prefix: by rank, what its command begins with; address: of
    rank 0; environment: by rank, more variables."""

    size: int
    address: str = "127.0.0.1"
    prefix: tuple[tuple[str, ...], ...] = ()
    environment: tuple[Mapping[str, str], ...] = ()


@dataclass
class World:
    """The processes of one contender: each has a task of its own world and waits for lines."""

    module: str
    task: Path
    spot: Spot
    python: str = sys.executable
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._logs = [tempfile.TemporaryFile() for _ in range(self.spot.size)]  # noqa: SIM115  closed by stop
        port = _free_port()
        self._workers = [self._start(rank, port) for rank in range(self.spot.size)]

    def _start(self, rank: int, port: int) -> subprocess.Popen[bytes]:
        spot = self.spot
        more = spot.environment[rank] if spot.environment else {}
        prefix = spot.prefix[rank] if spot.prefix else ()
        paths = (str(HERE), *((str(HERE.parent),) if self.python == sys.executable else ()))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(spot.size),
            "MASTER_ADDR": spot.address,
            "MASTER_PORT": str(port),
            "LOCAL_WORLD_SIZE": str(1 if spot.prefix else spot.size),
            # What DeepSpeed's launcher sets: it then sums over shared memory.
            "LOCAL_SIZE": str(1 if spot.prefix else spot.size),
            "DS_ACCELERATOR": "cpu",
            **more,
        }
        return subprocess.Popen(
            [*prefix, self.python, "-m", self.module, str(self.task)], cwd=HERE, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._logs[rank],
        )  # fmt: skip

    def ready(self) -> None:
        """Wait until all have started."""
        assert self._answers() == ["ready"] * self.spot.size

    def step(self, number: int) -> float:
        """Seconds of a step, from the word until the last worker is done."""
        begin = time.perf_counter()
        self._say(f"step {number}")
        answers = self._answers()
        self.seconds.append(time.perf_counter() - begin)
        self.losses.append(sum(a["loss"] for a in answers) / len(answers))
        return self.seconds[-1]

    def end(self) -> list[Answer]:
        """What the workers found; they are gone then."""
        self._say("end")
        found = [Answer(**a) for a in self._answers()]
        self.stop()
        return found

    def stop(self) -> None:
        """No worker is left."""
        for worker in self._workers:
            worker.kill()
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    pipe.close()
        for log in self._logs:
            log.close()

    def _say(self, word: str) -> None:
        for worker in self._workers:
            _pipe(worker.stdin).write(f"{word}\n".encode())
            _pipe(worker.stdin).flush()

    def _answers(self) -> list[Any]:
        """A line of every worker, by rank."""
        found: dict[int, Any] = {}
        until = time.monotonic() + PATIENCE
        with selectors.DefaultSelector() as waiting:
            for rank, worker in enumerate(self._workers):
                waiting.register(_pipe(worker.stdout), selectors.EVENT_READ, rank)
            while len(found) < len(self._workers):
                events = waiting.select(max(0.0, until - time.monotonic()))
                if not events:
                    late = sorted(set(range(len(self._workers))) - set(found))
                    raise self._failed(late[0], f"gave no answer in {PATIENCE:.0f} s")
                for key, _ in events:
                    line = _pipe(self._workers[key.data].stdout).readline()
                    if not line:
                        raise self._failed(key.data, "ended")
                    found[key.data] = json.loads(line)
                    waiting.unregister(key.fileobj)
        return [found[rank] for rank in range(len(self._workers))]

    def _failed(self, rank: int, what: str) -> SystemExit:
        self._logs[rank].seek(0)
        text = self._logs[rank].read().decode(errors="replace")
        tail = "\n".join(text.splitlines()[-LOG_LINES:])
        return SystemExit(f"{self.module}: rank {rank} {what}:\n{tail}")


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def in_turns(worlds: Sequence[World], steps: int) -> None:
    """So many steps of each, the order turned round every time."""
    for number in range(steps):
        for world in worlds if number % 2 == 0 else reversed(worlds):
            world.step(number)
