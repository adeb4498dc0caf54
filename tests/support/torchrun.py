"""Workers as torchrun would start them: processes of their own, which tell what they found."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import SystemRandom
from typing import Any

import forkserver

PATIENCE = 600  # seconds for a process to say something


def free_port() -> int:
    """A port that stays free until it is used: the system gives none of these to a connection."""
    given = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    ports, draw = range(10_000, max(20_000, int(given[0]))), SystemRandom()
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port := draw.choice(ports)))
            return port


def started(worker: Callable[..., None], count: int, *more: Any) -> Callable[[], list[Any]]:
    """Start processes that run worker(rank, *more, pipe), of a module that they can import by its
    name; gives what waits for what each sends."""
    context = forkserver.context()
    workers = []
    for rank in range(count):
        ours, theirs = context.Pipe()
        process = context.Process(target=worker, args=(rank, *more, theirs), daemon=True)
        process.start()
        theirs.close()
        workers.append((process, ours))

    def said() -> list[Any]:
        told = [pipe.recv() if pipe.poll(PATIENCE) else "nothing" for _, pipe in workers]
        for (process, _), words in zip(workers, told, strict=True):
            if words == "nothing":
                process.kill()
            process.join()
        return told

    return said
