"""What stands before the API: keys, and bodies that are too large or never come."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outsize.errors import OutsizeError
from outsize.texts import read_text

MOST_BYTES = 16 << 20  # of a body
SECONDS = 30.0  # in which a whole body comes
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
CAME = "outsize.came"  # of a scope: seconds of the engine's clock when its headers had come
OPEN = ("/health", "/metrics", "/")  # to whoever asks


class _Refused(HTTPException):
    """As the API's own, so that it looks alike whoever finds it out."""


def keys_in(path: Path) -> tuple[str, ...]:
    """Of a file, a key a line. OutsizeError for one that others can read, or without a key."""
    if not path.is_file():
        raise OutsizeError(f"--key-file {path} is no file; expected keys, a line each")
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise OutsizeError(f"--key-file {path} can be read by others; chmod 600 {path}")
    keys = tuple(line.strip() for line in read_text(path).splitlines() if line.strip())
    if not keys or not all(key.isascii() for key in keys):
        raise OutsizeError(f"--key-file {path}; expected keys in ASCII, a line each")
    return keys


class Guard:
    """keys: of which a request has one; none: everybody may ask. Whoever is let in is waited on
    from then: while the body comes and is read, too."""

    def __init__(self, app: ASGIApp, keys: Sequence[str] = ()) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[CAME] = time.monotonic()
        try:
            headers = dict(scope["headers"])
            self._known(scope["path"], headers.get(b"authorization", b""))
            declared = headers.get(b"content-length", b"0")
            if declared.isdigit() and int(declared) > MOST_BYTES:
                raise _Refused(413, f"a body of {int(declared):,} bytes; at most {MOST_BYTES:,}")
        except _Refused as error:
            await _say(send, error.status_code, error.detail)
            return
        with contextlib.suppress(asyncio.CancelledError):  # a second signal has ended the server
            await self._app(scope, _bounded(receive), send)

    def _known(self, path: str, said: bytes) -> None:
        if not self._keys or path in OPEN:
            return
        scheme, _, key = said.partition(b" ")
        if scheme.lower() != b"bearer" or not any(
            [hmac.compare_digest(key, one) for one in self._keys]
        ):
            raise _Refused(401, "no key of this server; expected Authorization: Bearer KEY")


def _bounded(receive: Receive) -> Receive:
    size, over = 0, False
    until = asyncio.get_running_loop().time() + SECONDS

    async def some() -> Message:
        nonlocal size, over
        if over:  # what comes now is the client's leaving
            return await receive()
        try:
            async with asyncio.timeout_at(until):
                message = await receive()
        except TimeoutError:
            raise _Refused(408, f"the body did not come within {SECONDS:g} s") from None
        size += len(message.get("body", b""))
        over = not message.get("more_body", False)
        if size > MOST_BYTES:
            raise _Refused(413, f"a body of more than {MOST_BYTES:,} bytes")
        return message

    return some


def fault(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The body of an error, as OpenAI has it. param: the field that is wrong."""
    message = message.encode("utf-8", "backslashreplace").decode()  # half a pair that was sent
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


async def _say(send: Send, status: int, message: str) -> None:
    body = json.dumps(fault(status, message)).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
