"""Fingerprint: what must be the same on every worker, and the refusal of one that differs."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path

from outsize.errors import OutsizeError

SOURCES = (".py", ".cpp", ".cu", ".h")
SHOWN = 3  # differences in a message


@cache
def code() -> str:
    """This package's version and a hash of its sources."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(p for p in root.rglob("*") if p.suffix in SOURCES):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return f"{version('outsize')} ({digest.hexdigest()})"


def card(facts: Mapping[str, str]) -> str:
    """Facts by name with the machine they hold on, as text that others can compare with."""
    return json.dumps({"host": socket.gethostname(), "facts": dict(facts)})


def compare(mine: str, first: str) -> None:
    """Refuse a worker whose card differs from that of rank 0, naming what differs."""
    own, its = json.loads(mine), json.loads(first)
    names = dict.fromkeys([*its["facts"], *own["facts"]])
    different = [n for n in names if own["facts"].get(n) != its["facts"].get(n)]
    if not different:
        return
    said = "; ".join(
        f"{n} is {own['facts'].get(n, 'not said')}, there {its['facts'].get(n, 'not said')}"
        for n in different[:SHOWN]
    )
    more = f"; and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
    raise OutsizeError(
        f"worker on {own['host']} differs from rank 0 on {its['host']}: {said}{more}; start every"
        " worker with the same code, run file and data"
    )
