"""Workers as torchrun would start them: processes of their own, which tell what they found."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable, Sequence
from typing import Any

PATIENCE = 120  # seconds for a process to say something


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def started(
    worker: Callable[..., None], count: int, *more: Any, preload: Sequence[str] = ("outsize",)
) -> Callable[[], list[Any]]:
    """Start processes that run worker(rank, *more, pipe), of a module that they can import by its
    name; gives what waits for what each sends."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    workers = []
    for rank in range(count):
        ours, theirs = context.Pipe()
        process = context.Process(target=worker, args=(rank, *more, theirs), daemon=True)
        process.start()
        theirs.close()
        workers.append((process, ours))

    def said() -> list[Any]:
        told = [pipe.recv() if pipe.poll(PATIENCE) else "nothing" for _, pipe in workers]
        for process, _ in workers:
            process.join()
        return told

    return said
