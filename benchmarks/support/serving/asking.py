"""A client of its own: asks a server of OpenAI's API, keeps when each token came.

    python -m support.serving.asking JOB ANSWER

Imports httpx and the standard library alone.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from support.serving.traffic import Reply, Wish

Lines = list[tuple[float, str]]


class Asking:
    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._client, self._model = client, model
        self._begin = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._begin

    async def at(self, wish: Wish) -> Reply:
        """Ask when it is time."""
        await asyncio.sleep(max(0.0, wish.at - self.now()))
        return await self.once(wish)

    async def once(self, wish: Wish) -> Reply:
        body = {
            "model": self._model, "prompt": wish.ids, "max_tokens": wish.new, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        sent, lines, status, retry = self.now(), Lines(), 0, ""
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as answer:
                status, retry = answer.status_code, answer.headers.get("retry-after", "")
                async for line in answer.aiter_lines():
                    if line:
                        lines.append((self.now(), line))
        except httpx.HTTPError as error:
            return Reply(sent, status, retry, error=f"{type(error).__name__}: {error}")
        if status != 200:
            return Reply(sent, status, retry, error=" ".join(line for _, line in lines)[:300])
        return _read(sent, lines)


def _read(sent: float, lines: Lines) -> Reply:
    """Behind the last event, so that nothing is held up by it."""
    times, text, used, error, whole = list[float](), "", 0, "", False
    for at, line in lines:
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            whole = not error
            continue
        event = json.loads(data)
        error = error or str(event.get("error") or "")
        used = (event.get("usage") or {}).get("completion_tokens", used)
        piece = "".join(choice.get("text") or "" for choice in event.get("choices", ()))
        if piece:
            times.append(at)
            text += piece
    return Reply(sent, 200, "", times, text, whole, used, error)


async def played(
    url: str, wishes: list[Wish], at_once: int, timeout: float, key: str
) -> list[Reply]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    own = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(
        base_url=url, limits=limits, timeout=timeout, headers=own
    ) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        asking = Asking(client, model)
        if not at_once:
            return list(await asyncio.gather(*map(asking.at, wishes)))
        turn = iter(enumerate(wishes))
        found = dict[int, Reply]()

        async def follow() -> None:
            for index, wish in turn:
                found[index] = await asking.once(wish)

        await asyncio.gather(*(follow() for _ in range(at_once)))
        return [found[index] for index in range(len(wishes))]


def main() -> None:
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    wishes = [Wish(**one) for one in job.pop("wishes")]
    gc.disable()  # no pause of ours is the server's
    found = asyncio.run(played(wishes=wishes, **job))
    Path(sys.argv[2]).write_text(json.dumps([asdict(one) for one in found]), encoding="utf-8")


if __name__ == "__main__":
    main()
