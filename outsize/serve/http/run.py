"""Starts the server on a socket and ends it: uvicorn over the API."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import click
import uvicorn

from outsize.checkpoint.adapters import tokenizer_directory
from outsize.data.template import OWN, template_of
from outsize.data.tokenizer import Tokenizer
from outsize.errors import OutsizeError
from outsize.serve.engine import Engine
from outsize.serve.http.app import Serving, app_of
from outsize.serve.http.guard import Guard
from outsize.serve.http.keys import Key
from outsize.serve.pooling import pooling_in
from outsize.serve.talk import Talk

_DRAIN = 600  # seconds that answers under way have at the end
# Seconds after which a connection is closed on which nobody asks. A request that is sent in that
# moment is lost, and a busy loop makes it long: few clients keep one so long without asking.
_IDLE = 75
_WAITING = 2048  # connections that the system holds until they are taken


def run(
    engine: Engine,
    text: Tokenizer,
    found: Path,
    said: Path,
    template: str,
    tokenizer: str | None,
    keys: tuple[Key, ...],
    listening: socket.socket,
    plan: Sequence[str],
) -> None:
    """Serve until a signal ends it, and what was begun is answered. said: the directory as it was
    named, whose name is the model's; plan: lines about what it holds."""
    folder = tokenizer or str(tokenizer_directory(found))
    own = template_of(None if folder == "bytes" else folder, text, template)
    if own is None and template != OWN:
        raise OutsizeError(f"--template {template} is none")
    talk = None if own is None else Talk(engine.model, text, own)
    name, pooling = said.resolve().name, pooling_in(found)
    serving = Serving(engine, text, name, talk, plan, bool(keys), pooling)
    host, port = listening.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    guard = Guard(app_of(serving), keys)
    config = uvicorn.Config(
        guard,
        log_level="warning",
        timeout_graceful_shutdown=_DRAIN,
        timeout_keep_alive=_IDLE,
        backlog=_WAITING,
        lifespan="on",
        server_header=False,
    )
    listening.listen(_WAITING)  # who comes from now on waits
    chats = "" if talk is not None else "; no chat template, so no chats"
    click.echo(f"serving {serving.name} at {address}/v1, a page to try it at {address}{chats}")
    _until_the_end(Server(config, guard), engine, listening)
    if engine.fault is not None:
        raise OutsizeError(f"the engine has failed: {engine.fault}")


class Server(uvicorn.Server):
    """One that says to what stands before the API that it ends."""

    def __init__(self, config: uvicorn.Config, guard: Guard) -> None:
        super().__init__(config)
        self._guard = guard

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._guard.end()
        await super().shutdown(sockets)


def _until_the_end(server: uvicorn.Server, engine: Engine, listening: socket.socket) -> None:
    """Serve until a signal comes, or the engine fails. A server that has ended because of a signal
    raises it once more, which asks for nothing then."""

    def over() -> None:
        server.should_exit = True

    def asked(number: int, frame: FrameType | None) -> None:
        if not server.started:
            raise KeyboardInterrupt

    engine.failed = over
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, asked)
    try:
        server.run([listening])
    finally:
        engine.close()  # where a second signal has cut it short
