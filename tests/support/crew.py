"""A crew: processes that stay and run functions over a world, for tests of collectives.

Processes are forked from a server that has imported torch once, so that a crew starts in little
more than one import.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import forkserver
import torch

from outsize.collectives import Joined, Mesh, join, joined
from outsize.collectives.c10d import C10d
from outsize.collectives.tables import Row, Table

PATIENCE = 1200.0  # seconds: who gives up earlier has seen why


def _ring(group: C10d, *_: Any) -> Table:
    """A table that says the transport's own sums are quickest, whatever this machine's are."""
    return Table(group.size, (Row("ring", 1, 1.0), Row("ring", 2, 1.0)))


def _work(rank: int, mesh: Mesh, path: str, pipe: Connection) -> None:
    """Worlds by name are joined when first asked for: (hosts by rank, or "" for this machine)."""
    from torch.distributed import FileStore, PrefixStore

    torch.set_num_threads(1)
    joined.table_of = _ring  # type: ignore[assignment]
    store, worlds = FileStore(path, mesh.size), dict[tuple[str, ...], Joined]()
    while True:
        try:
            hosts, function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if hosts not in worlds:
                keys = PrefixStore("/".join(hosts) or "near", store)
                host = hosts[rank] if hosts else ""
                worlds[hosts] = join(mesh, rank, keys, host=host, patience=PATIENCE)
            pipe.send((True, function(worlds[hosts], *arguments)))
        except BaseException as error:
            pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


@dataclass
class WorkerGroup:
    """Processes and the pipes to them."""

    processes: list[Any]
    pipes: list[Connection] = field(default_factory=list)

    @classmethod
    def of(cls, mesh: Mesh, path: str) -> WorkerGroup:
        """path: of a file that is not there, for the store."""
        context = forkserver.context()
        crew = cls([])
        for rank in range(mesh.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, mesh, path, theirs), daemon=True)
            process.start()
            theirs.close()
            crew.processes.append(process)
            crew.pipes.append(ours)
        return crew

    def start(
        self, function: Callable[..., Any], *arguments: Any, hosts: tuple[str, ...] = ()
    ) -> None:
        """Begin function(world, *arguments) everywhere; it must be found by its module's name."""
        for pipe in self.pipes:
            pipe.send((hosts, function, arguments))

    def answer(self, rank: int, seconds: float = PATIENCE / 2) -> tuple[bool, Any]:
        """(whether it returned, what it returned or the text of what it raised) of one worker."""
        assert self.pipes[rank].poll(seconds), f"worker {rank} says nothing for {seconds} s"
        return self.pipes[rank].recv()

    def run(
        self, function: Callable[..., Any], *arguments: Any, hosts: tuple[str, ...] = ()
    ) -> list[Any]:
        """What everybody's function returned."""
        self.start(function, *arguments, hosts=hosts)
        answers = [self.answer(rank) for rank in range(len(self.pipes))]
        wrong = [str(what) for good, what in answers if not good]
        assert not wrong, "\n".join(wrong)
        return [what for _, what in answers]

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()
