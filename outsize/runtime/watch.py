"""Watch: what looks on while a job works: the ledger, if there is one now, and who is told."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from outsize.memory import Meter


@dataclass
class Watch:
    """ledger: counts bytes, and raises over its budget; it may come and go between steps. at: told
    what each thread is about to do (outsize/launch/heartbeat.py)."""

    ledger: Meter | None = None
    at: Callable[[str], None] | None = None

    def on(self) -> AbstractContextManager[Any]:
        """While entered, bytes are counted."""
        return nullcontext() if self.ledger is None else self.ledger

    def kind(self, kind: str | None) -> AbstractContextManager[None]:
        """What is made inside counts as `kind`; None: it is in no device's memory."""
        return nullcontext() if self.ledger is None else self.ledger.kind(kind)
