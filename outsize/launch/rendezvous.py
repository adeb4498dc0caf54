"""The store where local workers meet: served by the process that watches them, on one machine."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outsize.torch_private import Store

CONNECT = 60.0  # seconds


def serve(listener: socket.socket) -> Store:
    """Serve a store on a socket that listens already; the store owns it from now on. It starts a
    thread: workers are forked before."""
    from outsize.torch_private import TCPStore

    host, port = listener.getsockname()[:2]
    descriptor = listener.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


def client(host: str, port: int) -> Store:
    """A worker's connection to it."""
    from outsize.torch_private import TCPStore

    return TCPStore(host, port, timeout=timedelta(seconds=CONNECT), wait_for_workers=False)
