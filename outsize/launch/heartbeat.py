"""Heartbeat: what a worker does at this moment, for whoever watches over it. Mailbox: its place
among all of them, before they are joined in a World.

The runtime says where it is; the collectives say when they wait. Both are a few bytes written into
memory that the watcher reads, about a microsecond each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outsize.torch_private import Store


class Heartbeat:
    """What a worker tells of itself, from any of its threads: each has a place of its own. This one
    is for where nobody watches."""

    def during(self, what: str) -> None:
        """The larger thing that actions are part of, as "step 12"."""

    def at(self, action: str) -> None:
        """What the calling thread does from now on, as "FORWARD 3 0"."""

    def wait(self, what: str) -> None:
        """The calling thread waits for other workers from now on, in `what`."""

    def go(self) -> None:
        """It has what it waited for."""


@dataclass(frozen=True)
class Mailbox:
    """rank of count workers; here: which one it is of the `near` workers of its machine; machine:
    a number. store: what all of them can write to and read. pulse: what it tells of itself.
    output: told the run's directory once it is known."""

    rank: int
    count: int
    here: int
    near: int
    machine: int
    store: Store
    pulse: Heartbeat
    output: Callable[[Path], None]
