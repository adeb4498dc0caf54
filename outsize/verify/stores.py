"""The tiers on which the states of a case rest: memory, and files of a folder that goes again."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import astuple
from pathlib import Path

from outsize.memory.disk import DiskStore
from outsize.memory.store import MemoryStore, Store
from outsize.plan import DEVICE, Plan

CAPACITY = 1 << 25  # bytes of a tier for one worker: cases are small


@contextmanager
def stores_of(plan: Plan) -> Iterator[Mapping[str, Store]]:
    """A store for each tier that a plan names: "disk" has files, any other is memory."""
    names = {tier for stage in plan.stages for tier in astuple(stage.rest)} - {DEVICE}
    with ExitStack() as stack:
        found: dict[str, Store] = {}
        for name in sorted(names):
            found[name] = stack.enter_context(closing(_store(stack, name)))
        yield found


def _store(stack: ExitStack, name: str) -> Store:
    if name != "disk":
        return MemoryStore(name, CAPACITY)
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="outsize-verify-"))
    return DiskStore(name, [Path(folder)], CAPACITY)
