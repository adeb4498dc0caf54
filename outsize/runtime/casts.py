"""Autocast: a part of a module computes under what its caller had entered, whenever it runs.

The state belongs to a thread. A module's own code stops in the midst of it, while others compute,
and a block is computed again when that code is through.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Casts:
    """What autocast does where this is made, by kind of device: (kind, whether it casts, to which
    type)."""

    def __init__(self) -> None:
        found = torch.accelerator.current_accelerator()
        kinds = ("cpu",) if found is None else ("cpu", found.type)
        self._kinds = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
            if torch.amp.is_autocast_available(kind)
        ]
        self._cache = torch.is_autocast_cache_enabled()

    def enter(self) -> None:
        """Have it do the same from here on."""
        for kind, casts, dtype in self._kinds:
            torch.set_autocast_enabled(kind, casts)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._cache)

    @contextmanager
    def within(self) -> Iterator[None]:
        """Have it do the same, and keep no weight that it casts: its room is written again."""
        before = Casts()
        self.enter()
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            before.enter()
