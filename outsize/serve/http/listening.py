"""What there is of a server before there is a model: its socket, and what it imports."""

from __future__ import annotations

import contextlib
import importlib
import socket
import threading
from importlib.util import find_spec

from outsize.errors import OutsizeError

_PARTS = ("fastapi", "uvicorn", "prometheus_client", "llguidance", "jinja2.ext")


def check_installed() -> None:
    """OutsizeError where something is not there that a server is made of."""
    for name in _PARTS:
        if find_spec(name.partition(".")[0]) is None:
            raise OutsizeError(f"serve: {name} is missing; pip install 'outsize[serve]'")


def import_meanwhile() -> None:
    """Import what a server is made of, a third of a second of one processor, beside what reads
    weights and lets Python go."""

    def bring() -> None:
        with contextlib.suppress(ImportError):  # said where it is imported in turn
            for name in _PARTS:
                importlib.import_module(name)

    threading.Thread(target=bring, name="imports", daemon=True).start()


def socket_of(host: str, port: int) -> socket.socket:
    """Bound. OutsizeError for an address that cannot be had."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(kind, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except (OSError, OverflowError) as error:
        made.close()
        why = getattr(error, "strerror", None) or str(error)
        raise OutsizeError(
            f"--port {port} on {host}: {why}; choose another, or 0 for any"
        ) from None
    return made
