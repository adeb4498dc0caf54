"""WorkerGroup: what the code of a run has of the other workers: a world to compute with, and a few
words outside the steps. Every worker calls the same of these in the same order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from outsize.collectives.joined import join
from outsize.collectives.mesh import Mesh
from outsize.collectives.world import Lone, World
from outsize.errors import OutsizeError
from outsize.launch import fingerprint
from outsize.launch.heartbeat import Heartbeat, Mailbox
from outsize.launch.watched import WatchedWorld

T = TypeVar("T")
ROUND = timedelta(seconds=30)  # of waiting for a word; the watcher ends what waits in vain


@dataclass(frozen=True)
class WorkerGroup:
    """The workers of a run as one of them sees them; by default it is alone."""

    world: World = field(default_factory=Lone)
    pulse: Heartbeat = field(default_factory=Heartbeat)
    post: Mailbox | None = None

    @property
    def rank(self) -> int:
        """This worker, from 0."""
        return 0 if self.post is None else self.post.rank

    @property
    def first(self) -> bool:
        """Whether this is the worker that prints, and writes what there is one of."""
        return self.rank == 0

    def told(self, topic: str, say: Callable[[], str]) -> str:
        """What rank 0 says about a topic, which comes up once in a run; say: makes it there."""
        if self.post is None:
            return say()
        if self.first:
            text = say()
            self.post.store.set(f"told/{topic}", text)
            return text
        return self._word(f"told/{topic}", f"what rank 0 says of the {topic}")

    def same(self, topic: str, facts: Mapping[str, str]) -> None:
        """Refuse this worker where its facts are not those of rank 0."""
        mine = fingerprint.card(facts)
        first = self.told(f"{topic} to compare", lambda: mine)
        fingerprint.compare(mine, first)

    def in_turn(self, topic: str, work: Callable[[], T]) -> T:
        """work(), by rank 0 first, then by one worker of every other machine, then by the rest:
        what the first puts into a cache, the others find there."""
        post = self.post
        if post is None:
            return work()
        before = [f"turn/{topic}/first"] if post.rank else []
        if post.rank and post.here:
            before.append(f"turn/{topic}/{post.machine}")
        for key in before:
            self._word(key, f"the {topic} of the first worker")
        done = work()
        if post.rank == 0:
            post.store.set(f"turn/{topic}/first", "")
        if post.here == 0:
            post.store.set(f"turn/{topic}/{post.machine}", "")
        return done

    def output(self, directory: Path) -> None:
        """The run's directory is known: what this worker prints goes there, unless it is the
        first, which prints where the run was started."""
        if self.post is not None:
            self.post.output(directory)

    def _word(self, key: str, what: str) -> str:
        assert self.post is not None
        self.pulse.wait(what)
        text = read(self.post, key)
        self.pulse.go()
        return text


def read(post: Mailbox, key: str) -> str:
    """What another worker writes under a key, however long that takes it."""
    while True:
        try:
            post.store.wait([key], ROUND)
            return bytes(post.store.get(key)).decode()
        except RuntimeError as error:
            if "imed out" in str(error) or "imeout" in str(error):
                continue
            raise OutsizeError(
                f"rank {post.rank} has lost the others: {str(error).splitlines()[0]}"
            ) from error


def enter(post: Mailbox, mesh: Mesh, facts: Mapping[str, str], device: str = "cpu") -> WorkerGroup:
    """Join the others in a world of `mesh`, where they run the same code with the same facts.

    device: the kind where the run's tensors are. OutsizeError for a worker that differs.
    """
    WorkerGroup(pulse=post.pulse, post=post).same(
        "run", {"code": fingerprint.code(), "mesh": str(mesh), **facts}
    )
    post.pulse.wait("joining the others")
    connection: Any = post.store
    world = join(mesh, post.rank, connection.clone(), device)
    post.pulse.go()
    return WorkerGroup(WatchedWorld(world, post.pulse), post.pulse, post)
