"""Mailbox: one worker's place among all of them, before they are joined in a World."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outsize.launch.heartbeat import Heartbeat

if TYPE_CHECKING:
    from outsize.torch_private import Store


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
