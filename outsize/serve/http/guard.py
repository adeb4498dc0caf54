"""What stands before the API: keys and their limits, bodies that are too large or never come."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outsize.serve.asks import Full
from outsize.serve.http.keys import ALLOWED, Allowance, Key

MOST_BYTES = 16 << 20  # of a body
SECONDS = 30.0  # in which a whole body comes
LAST = 2.0  # that a body has which is under way when the server ends
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
CAME = "outsize.came"  # of a scope: seconds of the engine's clock when its headers had come
OPEN = ("/health", "/metrics", "/")  # to whoever asks


class _Refused(HTTPException):
    """As the API's own, so that it looks alike whoever finds it out."""


class Guard:
    """keys: of which a request has one; none: everybody may ask. Whoever is let in is waited on
    from then: while the body comes and is read, too. clock: gives the seconds of what keys have."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[Key] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._keys = [(one.secret.encode(), Allowance(one, clock)) for one in keys]
        self._last: float | None = None
        self._coming = set[asyncio.Timeout]()

    def end(self) -> None:
        """The server ends: bodies that are under way are waited for only a moment."""
        self._last = asyncio.get_running_loop().time() + LAST
        for one in self._coming:
            one.reschedule(min(one.when() or self._last, self._last))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[CAME] = time.monotonic()
        try:
            headers = dict(scope["headers"])
            if self._keys and scope["path"] not in OPEN:
                scope[ALLOWED] = self._known(headers.get(b"authorization", b""))
                scope[ALLOWED].ask()
            declared = headers.get(b"content-length", b"0")
            if declared.isdigit() and int(declared) > MOST_BYTES:
                raise _Refused(413, f"a body of {int(declared):,} bytes; at most {MOST_BYTES:,}")
        except _Refused as error:
            await _say(send, error.status_code, error.detail)
            return
        except Full as error:
            await _say(send, 429, str(error), later(error))
            return
        with contextlib.suppress(asyncio.CancelledError):  # a second signal has ended the server
            await self._app(scope, self._bounded(receive), send)

    def _known(self, said: bytes) -> Allowance:
        scheme, _, key = said.partition(b" ")
        found = [one for own, one in self._keys if hmac.compare_digest(key, own)]  # asks all
        if scheme.lower() != b"bearer" or not found:
            raise _Refused(401, "no key of this server; expected Authorization: Bearer KEY")
        return found[0]

    def _bounded(self, receive: Receive) -> Receive:
        size, over = 0, False
        until = asyncio.get_running_loop().time() + SECONDS

        async def some() -> Message:
            nonlocal size, over
            if over:  # what comes now is the client's leaving
                return await receive()
            message = await self._coming_by(until, receive)
            size += len(message.get("body", b""))
            over = not message.get("more_body", False)
            if size > MOST_BYTES:
                raise _Refused(413, f"a body of more than {MOST_BYTES:,} bytes")
            return message

        return some

    async def _coming_by(self, until: float, receive: Receive) -> Message:
        """A part of a body."""
        limit = asyncio.timeout_at(until if self._last is None else min(until, self._last))
        self._coming.add(limit)
        try:
            async with limit:
                return await receive()
        except TimeoutError:
            if self._last is not None:
                raise _Refused(503, "the server ends, and the body had not come") from None
            raise _Refused(408, f"the body did not come within {SECONDS:g} s") from None
        finally:
            self._coming.discard(limit)


def later(error: Full) -> dict[str, str]:
    """The header that says when to ask again."""
    return {"Retry-After": str(max(1, math.ceil(error.wait)))}


def fault(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The body of an error, as OpenAI has it. param: the field that is wrong; code: what clients
    know some errors by."""
    message = message.encode("utf-8", "backslashreplace").decode()  # half a pair that was sent
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def _say(
    send: Send, status: int, message: str, more: Mapping[str, str] = MappingProxyType({})
) -> None:
    body = json.dumps(fault(status, message)).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    headers += [(name.lower().encode(), value.encode()) for name, value in more.items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
