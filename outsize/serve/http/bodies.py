"""What is asked, before it is looked at field by field: JSON in which no field comes twice, and
nothing beside it that nobody reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from outsize.serve.http.guard import OPEN


class Route(APIRoute):
    """One whose requests are read so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def read(request: Request) -> Response:
            if request.url.query and request.url.path not in OPEN:
                name = request.url.query.partition("=")[0]
                raise HTTPException(
                    400, f"the address: {name!r} behind a question mark; expected it in the body"
                )
            asking = _Asking(request.scope, request.receive)
            if request.method == "POST" and await asking.body():
                _check_headers(asking)
            return await answer(asking)

        return read


class _Asking(Request):
    async def json(self) -> Any:
        body = await self.body()
        try:
            return json.loads(body, object_pairs_hook=_once, parse_constant=_no_number)
        except json.JSONDecodeError:
            raise
        except UnicodeDecodeError as error:
            what = f"not UTF-8 behind {error.start:,} bytes"
        except RecursionError:
            what = "lists or objects in one another, more than can be read"
        except ValueError:  # of Python's longest
            what = "a number of more digits than can be read"
        raise HTTPException(400, f"the body: {what}")


def _check_headers(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not (kind.startswith("application/") and kind.endswith(("/json", "+json"))):
        raise HTTPException(400, f"Content-Type: {kind!r}; expected application/json")
    packed = request.headers.get("content-encoding", "identity")
    if packed.lower() != "identity":
        raise HTTPException(400, f"Content-Encoding: {packed!r}; expected the body as it is")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise HTTPException(400, f"{twice[:80]}: it comes twice; expected each field once")
    return found


def _no_number(name: str) -> Any:
    raise HTTPException(400, f"the body: {name}, which is not JSON; expected numbers")
