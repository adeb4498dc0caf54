"""A server of the API in this process, and requests to it by hand."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import uvicorn

from outsize.data.template import template_of
from outsize.data.tokenizer import open_tokenizer
from outsize.serve.asks import Room
from outsize.serve.engine import Engine
from outsize.serve.http.app import Serving, app_of
from outsize.serve.http.guard import Guard
from outsize.serve.http.keys import Key
from outsize.serve.http.listening import socket_of
from outsize.serve.http.run import Server
from outsize.serve.talk import Talk

KEY = "sesame"
LIMITED = Key("poppy", requests=3, tokens=30)
ROOM = Room(pages=64, page=16, slots=4, budget=64, queue=900, context=256)


@contextmanager
def served(
    engine: Engine, lifespan: Literal["on", "off"], talk: Talk | None = None
) -> Iterator[tuple[str, int]]:
    """The address of a server. lifespan: off: nobody starts its engine; talk: plain by default."""
    text = open_tokenizer("bytes")
    template = template_of(None, text, "plain")
    assert template is not None
    talk = talk or Talk(engine.model, text, template)
    app = Guard(app_of(Serving(engine, text, "small", talk)), [Key(KEY), LIMITED], lambda: 0.0)
    with socket_of("127.0.0.1", 0) as listening:
        listening.listen()
        server = Server(uvicorn.Config(app, log_level="error", lifespan=lifespan), app)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield listening.getsockname()
        finally:
            server.should_exit = True
            thread.join()


def asked(
    address: tuple[str, int], path: str, body: bytes | dict[str, Any] | None, key: str = KEY
) -> tuple[int, Any, http.client.HTTPMessage]:
    """Status, the answer's JSON (or text) and headers of a request made by hand."""
    connection = http.client.HTTPConnection(*address, timeout=120)
    try:
        sent = json.dumps(body).encode() if isinstance(body, dict) else body
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        connection.request("GET" if body is None else "POST", path, sent, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        try:
            return answer.status, json.loads(text), answer.headers
        except json.JSONDecodeError:
            return answer.status, text, answer.headers
    finally:
        connection.close()
