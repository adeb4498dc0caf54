"""Post: one worker's place among all of them, before they are joined in a World."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outsize.launch.pulse import Pulse

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True)
class Post:
    """rank of count workers; here: which one it is of the `near` workers of its machine; machine:
    a number. store: what all of them can write to and read. pulse: what it tells of itself.
    output: told the run's directory once it is known."""

    rank: int
    count: int
    here: int
    near: int
    machine: int
    store: Store
    pulse: Pulse
    output: Callable[[Path], None]
