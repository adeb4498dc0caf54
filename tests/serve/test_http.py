"""The OpenAI API, asked by OpenAI's own client and by hand."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import httpx
import httpx_sse
import openai
import pydantic
import pytest
import sseclient
import tokenizers
import torch
from decoders import SMALL
from prometheus_client.parser import text_string_to_metric_families
from serving import KEY, LIMITED, ROOM, asked, served

from outsize.data.tokenizer import ends_in, open_tokenizer
from outsize.decode.samplers import Sampling
from outsize.errors import OutsizeError
from outsize.kernels import native
from outsize.models.build import build
from outsize.models.families import parse
from outsize.serve.asks import Ask, Full
from outsize.serve.engine import Engine
from outsize.serve.http import guard
from outsize.serve.http.answers import unless_left
from outsize.serve.http.asked import Completion
from outsize.serve.http.choices import Piece, Weighed, pieces
from outsize.serve.http.keys import Allowance
from outsize.serve.http.shapes import Shaped, Shapes
from outsize.serve.model import Model
from outsize.serve.policies import POLICIES
from outsize.serve.price import Curve, Price
from outsize.serve.slo import Slo

PROMPT = "def f("


@pytest.fixture(scope="module")
def model() -> Model:
    config = {**SMALL, "model_type": "llama", "vocab_size": 257, "initializer_range": 0.5}
    return Model(build(parse(config), seed=3))


@pytest.fixture(scope="module")
def address(model: Model) -> Iterator[tuple[str, int]]:
    engine = Engine(model, ROOM, POLICIES.get("mixed"))
    with served(engine, "on") as found:
        yield found
    assert engine.fault is None and not engine.line.requests


@pytest.fixture(scope="module")
def client(address: tuple[str, int]) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{address[1]}/v1"
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=120) as made:
        yield made


def test_completions_are_the_models_own(client: openai.OpenAI, model: Model) -> None:
    expected = model.generate(PROMPT, 12)
    found = client.completions.create(model="small", prompt=PROMPT, max_tokens=12, temperature=0)
    assert found.choices[0].text == expected and found.choices[0].finish_reason == "length"
    assert found.usage is not None and found.usage.prompt_tokens == len(PROMPT) + 1
    ids = [256, *PROMPT.encode()]
    both = client.completions.create(
        model="small", prompt=[ids, ids], max_tokens=12, temperature=0, echo=True, n=2
    )
    assert [one.text for one in both.choices] == [PROMPT + str(expected)] * 4
    assert [one.index for one in both.choices] == [0, 1, 2, 3]


class Fruit(pydantic.BaseModel):
    name: Literal["apple", "pear"]
    ripe: bool
    weights: Annotated[list[int], pydantic.Field(max_length=2)]


def test_an_answer_of_a_schema_is_of_it(client: openai.OpenAI) -> None:
    """The model knows nothing: what comes is of the shape all the same, however it is drawn."""
    for seed in range(3):
        found = client.chat.completions.parse(
            model="small", messages=[{"role": "user", "content": "A fruit?"}], max_tokens=120,
            response_format=Fruit, seed=seed, temperature=1.5, logit_bias={"93": 30},
        )  # fmt: skip
        assert isinstance(found.choices[0].message.parsed, Fruit)
        assert found.choices[0].finish_reason == "stop"
    plain = client.chat.completions.create(
        model="small", messages=[{"role": "user", "content": "A fruit?"}], max_tokens=60,
        response_format={"type": "json_object"}, logit_bias={"125": 30}, seed=1,
    )  # fmt: skip
    assert isinstance(json.loads(plain.choices[0].message.content or ""), dict)


def test_a_seed_says_what_is_drawn(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "small", "prompt": PROMPT, "max_tokens": 9, "n": 3}
    one = client.completions.create(**ask, seed=5)
    assert client.completions.create(**ask, seed=5).choices == one.choices
    assert client.completions.create(**ask, seed=6).choices != one.choices
    texts = [choice.text for choice in one.choices]
    assert len(set(texts)) > 1
    # In a list, each prompt is told what it would be alone; without a seed each draws its own.
    both = client.completions.create(**{**ask, "prompt": ["Or ", PROMPT]}, seed=5).choices
    assert [choice.text for choice in both[3:]] == texts
    drawn = client.completions.create(**{**ask, "prompt": [PROMPT] * 2}).choices
    assert [choice.text for choice in drawn[3:]] != [choice.text for choice in drawn[:3]]


def test_streams_say_what_answers_say(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "small", "max_tokens": 14, "seed": 1, "n": 2, "top_logprobs": 2, "logprobs": True,
        "messages": [{"role": "user", "content": "Is it so?"}],
    }  # fmt: skip
    whole = client.chat.completions.create(**ask)
    texts, logs, usage = ["", ""], [list[Any](), list[Any]()], None
    for event in client.chat.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}
    ):
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.logprobs is not None:
                logs[choice.index] += choice.logprobs.content or []
    assert texts == [choice.message.content for choice in whole.choices] and usage == whole.usage
    for choice, log in zip(whole.choices, logs, strict=True):
        assert choice.logprobs is not None
        assert [x.model_dump() for x in choice.logprobs.content or []] == [
            x.model_dump() for x in log
        ]


def test_logprobs_of_prompt_and_answer(client: openai.OpenAI, model: Model) -> None:
    found = client.completions.create(
        model="small", prompt=PROMPT, max_tokens=3, temperature=0, logprobs=2, echo=True
    ).choices[0]
    assert found.logprobs is not None and found.logprobs.token_logprobs is not None
    ids = [256, *PROMPT.encode(), *model.generate([256, *PROMPT.encode()], 3)]  # type: ignore[list-item]
    with torch.no_grad():
        logs_TV = model(torch.tensor(ids)).log_softmax(-1)
    expected = [float(logs_TV[i, token]) for i, token in enumerate(ids[1:])]
    assert found.logprobs.token_logprobs[0] is None
    assert found.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    assert found.logprobs.text_offset == [0, *range(len(ids) - 1)]


def test_where_tokens_begin_is_said_in_characters(client: openai.OpenAI) -> None:
    """Of the text that is answered, in streams as at once; a part of a character is its bytes."""
    ask: dict[str, Any] = {"model": "small", "prompt": "hé€", "max_tokens": 8, "n": 2, "seed": 3,
                           "logprobs": 3, "echo": True, "stop": ["zz"],
                           "logit_bias": {"195": 50, "169": 50}}  # fmt: skip
    whole = client.completions.create(**ask)
    found = [[list[Any]() for _ in range(4)] for _ in range(2)]
    for event in client.completions.create(**ask, stream=True):
        for one in event.choices:
            for mine, more in zip(found[one.index], _logged(one.logprobs), strict=True):
                mine += more
    assert found == [_logged(one.logprobs) for one in whole.choices]
    words, _, tops, begins = found[0]
    assert words[1:7] == ["h", *(f"bytes:\\x{x}" for x in ("c3", "a9", "e2", "82", "ac"))]
    assert begins[:8] == [0, 0, 1, 1, 2, 2, 2, 3] and all(len(one) == 3 for one in tops[1:])
    text, shown = whole.choices[0].text, 3
    for word, begin in zip(words[7:], begins[7:], strict=True):
        assert begin in (shown, shown - 1) and begin < len(text)
        shown = max(shown, begin + 1)
        assert word in ("bytes:\\xc3", "bytes:\\xa9")


def _logged(logs: Any) -> list[list[Any]]:
    return [logs.tokens, logs.token_logprobs, logs.top_logprobs, logs.text_offset]


def test_stop_bias_and_penalties(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "small", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    only = client.completions.create(**ask, logit_bias={"97": 100}).choices[0]
    assert only.text == "a" * 12
    stopped = client.completions.create(**ask, logit_bias={"97": 100}, stop=["aaa", "b"]).choices[0]
    assert stopped.text == "" and stopped.finish_reason == "stop"
    ended = client.completions.create(**ask, logit_bias={"256": 100}).choices[0]
    assert ended.text == "" and ended.finish_reason == "stop"
    chat = client.chat.completions.create(
        model="small", messages=[{"role": "user", "content": "x"}], max_tokens=2, logprobs=True,
        top_logprobs=2, logit_bias={"195": 100},
    )  # fmt: skip
    assert chat.choices[0].logprobs is not None and chat.usage is not None
    (one, _) = chat.choices[0].logprobs.content or []
    assert one.token == "bytes:\\xc3" and one.bytes == [0xC3] and chat.usage.completion_tokens == 2
    end = client.completions.create(**ask, logit_bias={"256": 100})
    assert end.usage is not None and end.usage.completion_tokens == 1  # that which says nothing


@pytest.mark.parametrize(
    ("stop", "text", "drawn"),
    [("c", "abab", 5), ("bca", "aba", 6), ("babca", "a", 6), ("ab", "", 2), ("abz", "ababcab", 7)],
)
def test_logprobs_are_of_the_text_before_a_stop_string(
    model: Model, stop: str, text: str, drawn: int
) -> None:
    """And of no token that it alone is made of, though each was drawn."""

    def script(logits_V: torch.Tensor, index: int) -> int:
        return b"ababcab"[index]

    async def said() -> list[Piece]:
        with Engine(model, ROOM, POLICIES.get("mixed")) as engine:
            ask = Ask((1, 2), 7, script, tops=0)
            return [x async for x in pieces(engine, open_tokenizer("bytes"), ask, (stop,))]

    found = asyncio.run(said())
    assert "".join(one.text for one in found) == text
    assert bytes(x.id for one in found for x in one.tokens).decode() == text
    assert len(text) + sum(one.unseen for one in found) == drawn


def test_penalties_and_biases_are_those_of_the_formula() -> None:
    logits_V = torch.tensor([3.0, 2.0, 1.0, 0.5])
    seen: list[torch.Tensor] = []

    class Kept:
        def __call__(self, scores_V: torch.Tensor, index: int) -> int:
            seen.append(scores_V)
            return 1 if index < 2 else 0

    weighed = Weighed(Kept(), 0.5, 0.25, {3: 4.0})
    for index in range(3):
        weighed(logits_V, index)
    weighed(logits_V, 3)
    assert seen[0].tolist() == [3, 2, 1, 4.5] and seen[1].tolist() == [3, 1.25, 1, 4.5]
    assert seen[3].tolist() == [2.25, 1.0, 1, 4.5] and logits_V.tolist() == [3, 2, 1, 0.5]


HELLO = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
REFUSED: dict[str, tuple[str, dict[str, Any], int, str | None, str]] = {
    "unknown field": ("completions", {"prompt": "a", "suffix": "b"}, 400, "suffix", "suffix"),
    "wrong type": ("completions", {"prompt": 5}, 400, "prompt", "prompt"),
    "range": ("completions", {"prompt": "a", "temperature": 3}, 400, "temperature", "less than"),
    "choices": ("completions", {"prompt": "a", "n": 1000}, 400, "n", "less than"),
    "id": ("completions", {"prompt": [999]}, 400, None, "expected 0 to 256"),
    "empty": ("completions", {"prompt": [[]]}, 400, "prompt", "at least 1"),
    "lax": ("completions", {"prompt": "a", "logprobs": True}, 400, "logprobs", "integer"),
    "long": ("completions", {"prompt": "a" * 300}, 400, None, "has room for 256"),
    "bias": ("completions", {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias", "x"),
    "bias id": ("completions", {"prompt": "a", "logit_bias": {"257": 1}}, 400, "logit_bias",
                "0 to 256"),
    "model": ("completions", {"prompt": "a", "model": "gpt"}, 404, "model", "'small'"),
    "tools": ("chat/completions", {"messages": HELLO, "tools": []}, 400, "tools", "tools"),
    "format": (
        "chat/completions", {"messages": HELLO, "response_format": {"type": "xml"}}, 400,
        "response_format", "'json_schema'",
    ),
    "schema": (
        "chat/completions",
        {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": {"type": "nothing"}}}},
        400, "response_format", "cannot be compiled",
    ),
    "a schema without an end": (
        "chat/completions",
        {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": {"$ref": "#"}}}},
        400, "response_format", "cannot be compiled: nothing is of it, as of a part that refers to",
    ),
    "a negative id": ("completions", {"prompt": [-1]}, 400, "prompt", "prompt.0: Input should be"),
    "half a pair": ("completions", {"prompt": "\ud800"}, 400, None, "not UTF-8"),
    "half a pair in a chat": (
        "chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, 400, None,
        "half a surrogate pair",
    ),
    "likeliest tokens of nothing": (
        "chat/completions", {"messages": HELLO, "top_logprobs": 2}, 400, "top_logprobs",
        "top_logprobs: without logprobs",
    ),
    "role": (
        "chat/completions", {"messages": [{"role": "nobody", "content": "x"}]}, 400, "messages",
        "role",
    ),
    "an empty stop string": ("completions", {"prompt": "a", "stop": ""}, 400, "stop", "stop"),
    "one of several": ("completions", {"prompt": "a", "stop": ["b", ""]}, 400, "stop", "stop"),
    "prompts": ("completions", {"prompt": [[1]] * 2049}, 400, "prompt", "at most 2048"),
    "of two kinds": ("completions", {"prompt": ["a", [1]]}, 400, "prompt", "prompt.1"),
    "half a pair in a call": (
        "chat/completions", {"messages": [{"role": "assistant", "tool_calls": [
            {"function": {"name": "\ud800", "arguments": "x"}}]}]}, 400, "messages", "\\ud800",
    ),
    "path": ("responses", {"input": "a"}, 404, None, "Not Found"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=list(REFUSED))
def test_what_is_not_there_is_said(
    address: tuple[str, int], case: tuple[str, dict[str, Any], int, str | None, str]
) -> None:
    path, body, status, param, words = case
    for stream in ({}, {"stream": True}):
        found, answer, _ = asked(address, f"/v1/{path}", {**body, **stream})
        assert found == status and answer["error"]["param"] == param
        assert words in answer["error"]["message"]
        code = "context_length_exceeded" if "has room for" in words else None
        assert answer["error"]["code"] == code


def test_null_is_nothing() -> None:
    """As OpenAI's clients send what is None."""
    names = ("temperature", "top_p", "n", "stream", "presence_penalty", "frequency_penalty", "echo",
             "stop", "seed", "logprobs", "logit_bias", "user", "stream_options")  # fmt: skip
    assert Completion(prompt="a") == Completion(prompt="a", **dict.fromkeys(names))
    with pytest.raises(pydantic.ValidationError):
        Completion(prompt="a", temperature=3)


def test_bodies_that_are_none(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for path, body, words in (
        (
            "/v1/completions",
            {"prompt": "a", "stream_options": {}},
            "stream_options: without stream",
        ),
        ("/tokenize", {"prompt": "\ud800", "add_special_tokens": False}, "not UTF-8"),
        ("/v1/completions", b'{"prompt": ', "the body: not JSON behind 11 characters"),
        ("/v1/completions?stream=true", {"prompt": "a"}, "the address: 'stream' behind a question"),
        ("/v1/models?limit=1", None, "the address: 'limit' behind a question"),
        ("/v1/completions", b'{"prompt": "a\xe9"}', "the body: not UTF-8 behind 13 bytes"),
        ("/v1/completions", b'{"n": %s}' % (b"9" * 5000), "more digits than can be read"),
        ("/v1/completions", b"[" * 99_999, "in one another, more than can be read"),
        ("/v1/completions", b'{"temperature": NaN}', "the body: NaN, which is not JSON"),
        ("/detokenize", b'{"tokens": [1], "tokens": []}', "tokens: it comes twice"),
        ("/v1/chat/completions", b'{"messages": [], "logit_bias": {"3":1,"3":2}}', "3: it comes"),
    ):
        status, answer, _ = asked(address, path, body)
        assert status == 400 and words in answer["error"]["message"]
        assert answer["error"]["param"] in (None, words.partition(": ")[0])
    url, key = "http://{}:{}/tokenize".format(*address), {"authorization": f"Bearer {KEY}"}
    for headers, words in (
        ({"content-type": "text/plain"}, "Content-Type: 'text/plain'; expected application/json"),
        ({}, "Content-Type: ''; expected application/json"),
        ({"content-type": "application/json", "content-encoding": "gzip"}, "Encoding: 'gzip'"),
    ):
        answer = httpx.post(url, content=b'{"prompt": "a"}', headers={**headers, **key}).json()
        assert words in answer["error"]["message"]
    for path in ("/health", "/metrics"):  # whoever watches may ask as he is used to
        assert httpx.get("http://{}:{}{}?a=1".format(*address, path)).status_code == 200
    for body in (b'{"prompt": ', b"\xff\xfe", b"[]", b""):
        status, answer, _ = asked(address, "/v1/completions", body)
        assert status == 400 and answer["error"]["type"] == "invalid_request_error"
    with socket.create_connection(address) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000000\r\n"
                    b"Authorization: Bearer sesame\r\n\r\n")  # fmt: skip
        assert raw.recv(100).startswith(b"HTTP/1.1 413")
    monkeypatch.setattr(guard, "MOST_BYTES", 100)
    with socket.create_connection(address) as raw:  # nothing is said of its length
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
                    b"Authorization: Bearer sesame\r\nContent-Type: text/json\r\n\r\n")  # fmt: skip
        raw.sendall(b"80\r\n" + b" " * 128 + b"\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [None] * 900}, {"prompt": [[None]] * 900}, {"prompt": "a", "stop": [5] * 16},
        {"prompt": "a", "logit_bias": {f"x{i}": 1 for i in range(70_000)}},
        {"prompt": "a", **{f"x{i}": 1 for i in range(900)}},
    ],
)  # fmt: skip
def test_what_is_wrong_a_thousand_times_is_said_once(body: dict[str, Any]) -> None:
    """A body of 16 MiB would be a list of faults of gigabytes."""
    with pytest.raises(pydantic.ValidationError) as found:
        Completion.model_validate(body)
    assert found.value.error_count() <= 5


def test_who_has_left_is_not_worked_for() -> None:
    ended = list[str]()

    async def gone() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def work() -> dict[str, Any]:
        try:
            await asyncio.sleep(1e9)
        finally:
            ended.append("cancelled")
        return {}

    request: Any = SimpleNamespace(receive=gone)
    assert asyncio.run(unless_left(request, work())).status_code == 499 and ended == ["cancelled"]


def test_a_body_that_does_not_come(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "SECONDS", 0.0)
    with socket.create_connection(address) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n"
                    b"Authorization: Bearer sesame\r\nContent-Type: text/json\r\n\r\n")  # fmt: skip
        assert raw.recv(100).startswith(b"HTTP/1.1 408")


def test_half_a_body_does_not_hold_up_the_end(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "LAST", 0.0)
    engine, ending = Engine(model, ROOM, POLICIES.get("mixed")), ExitStack()
    address = ending.enter_context(served(engine, "off"))
    with socket.create_connection(address) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n"
                    b"Authorization: Bearer sesame\r\nExpect: 100-continue\r\n\r\n")  # fmt: skip
        assert raw.recv(100).startswith(b"HTTP/1.1 100")  # it waits for the body
        ending.close()
        assert raw.recv(100).startswith(b"HTTP/1.1 503")
    engine.close()


def test_keys(address: tuple[str, int], client: openai.OpenAI) -> None:
    status, answer, _ = asked(address, "/v1/models", None, "wrong")
    assert status == 401 and answer["error"]["type"] == "authentication_error"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    assert asked(address, "/health", None, "wrong")[:2] == (200, {"status": "ok"})
    for words, expected in ((f"bearer {KEY}", 200), (KEY, 401), (f"Basic {KEY}", 401)):
        url, headers = "http://{}:{}/v1/models".format(*address), {"authorization": words}
        assert httpx.get(url, headers=headers).status_code == expected
    assert [one.id for one in client.models.list()] == ["small"]
    assert client.models.retrieve("small").id == "small"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("large")


def test_a_key_has_what_a_minute_allows(address: tuple[str, int]) -> None:
    """Thirty tokens: six of a prompt and nine of each of two choices leave six, of seven."""
    ask = {"prompt": "abcde", "max_tokens": 9, "n": 2, "logit_bias": {"256": -100}}
    assert asked(address, "/v1/completions", ask, LIMITED.secret)[0] == 200
    for path, body, words in (
        ("/v1/embeddings", {"input": "abcdefghijk"}, "30 tokens"),
        ("/v1/completions", {"prompt": "abcdefghijk", "stream": True}, "30 tokens"),
        ("/tokenize", {"prompt": "a"}, "3 requests"),
    ):
        status, answer, headers = asked(address, path, body, LIMITED.secret)
        assert status == 429 and answer["error"]["type"] == "rate_limit_error"
        assert f"this key has had its {words} of a minute" in answer["error"]["message"]
        assert 1 <= int(headers["retry-after"]) <= 60
    assert asked(address, "/tokenize", {"prompt": "a"})[0] == 200
    now = [5.0]
    one = Allowance(LIMITED, lambda: now[0])
    one.begin(900)  # more than it ever may have: all that it has
    now[0] += 2.0 * (900 - 30)
    with pytest.raises(Full) as found:
        one.begin(2)
    assert found.value.wait == pytest.approx(4.0)
    now[0] += 4.0
    one.begin(2)


def test_an_engine_that_fails_is_the_servers_fault(model: Model) -> None:
    engine = Engine(model, ROOM, POLICIES.get("mixed"))

    def broken(*_: object) -> None:
        raise RuntimeError("the disk is gone")

    engine.steps.feed = broken  # type: ignore[method-assign]
    with served(engine, "on") as address:
        for _ in range(2):
            status, answer, _headers = asked(address, "/v1/completions", {"prompt": "a"})
            assert status == 500 and answer["error"]["type"] == "server_error"
            assert "the disk is gone" in answer["error"]["message"]
        assert asked(address, "/health", None)[0] == 503


@pytest.mark.parametrize(
    ("room", "words"),
    [
        ({"queue": 810}, "804 tokens wait"),
        ({"slo": Slo(ttft=1e-3), "price": Price(Curve(((1, 5.0),)))}, "and 1ms is promised"),
    ],
)
def test_more_than_may_wait_is_refused_with_a_time(
    model: Model, room: dict[str, Any], words: str
) -> None:
    """An engine that has not started: five choices whose prompts wait, where four may, or one."""
    engine = Engine(model, replace(ROOM, **room), POLICIES.get("mixed"))
    with served(engine, "off") as address:
        ask = {"prompt": "a" * 200, "max_tokens": 50, "n": 5, "stream": True}
        status, answer, headers = asked(address, "/v1/completions", ask)
        assert status == 429 and answer["error"]["type"] == "rate_limit_error"
        assert words in answer["error"]["message"]
        assert int(headers["retry-after"]) >= (5 if "slo" in room else 1)
        assert all(one.came is not None for one in (r.ask for r in engine.line.requests.values()))
        assert {one.ask.owner for one in engine.line.requests.values()} == {KEY}
        assert all(one.cancelled for one in engine.line.requests.values())
        monkey = asked(address, "/health", None)[0]
        assert monkey == 200 and not engine.stuck(1e9) and engine.stuck(-1.0)
    engine.close()


def test_the_page_is_one_file_of_its_own(address: tuple[str, int]) -> None:
    status, text, headers = asked(address, "/", None, "wrong")
    assert status == 200 and "connect-src 'self'" in headers["content-security-policy"]
    assert '"name": "small"' in text and "src=" not in text and "http" not in text


def test_shapes_of_a_tokenizer_of_words(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    inner.train_from_iterator(['{"name": "apple", "ripe": true}'] * 2, trainer)
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": [0, 7, 900]}', encoding="utf-8")
    assert ends_in(tmp_path, 320) == {0, 7}  # as many as the model names
    text = open_tokenizer(str(tmp_path))
    shapes = Shapes(text, 320, [text.eos])  # the model has more ids than there are tokens
    sampler, ids = Shaped(Sampling(1.0, seed=3), shapes.of(Fruit.model_json_schema())), list[int]()
    seeded = torch.Generator().manual_seed(0)
    while not ids or ids[-1] != text.eos:
        ids.append(sampler(torch.randn(320, generator=seeded), len(ids)))
        assert len(ids) < 500
    assert Fruit.model_validate_json(text.decode(ids))


def test_a_schema_that_refers_to_itself_ends_where_it_can() -> None:
    """And one that cannot go on says so, whether that is seen at its beginning or behind it."""
    text = open_tokenizer("bytes")
    shapes = Shapes(text, 257, [text.eos])
    items = {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}
    sampler, ids = Shaped(Sampling(), shapes.of(items)), list[int]()
    likely_V = torch.zeros(257)
    likely_V[list(b"[]")] = torch.tensor([1.0, 2.0])
    while not ids or ids[-1] != text.eos:
        ids.append(sampler(likely_V, len(ids)))
    assert bytes(ids[:-1]) == b"[]"
    with pytest.raises(OutsizeError, match=r"response_format: .* nothing is of it, as of a part"):
        shapes.of({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})
    turns = {"a": {"$ref": "#/properties/b"}, "b": {"$ref": "#/properties/a"}}
    later = shapes.of({"type": "object", "properties": turns, "required": ["a"]})
    with pytest.raises(OutsizeError, match="the answer's grammar: nothing is of it"):
        for index in range(99):
            Shaped(Sampling(1.0, seed=3), later)(torch.zeros(257), index)


def test_a_model_has_more_ids_than_the_grammar_knows() -> None:
    """As where rows of its embedding are padding: none of these is drawn, however likely."""
    text = open_tokenizer("bytes")
    sampler = Shaped(Sampling(1.0, seed=3), Shapes(text, 900, [text.eos]).of({"type": "boolean"}))
    logits_V, ids = torch.zeros(900), list[int]()
    logits_V[257:] = 50.0
    while not ids or ids[-1] != text.eos:
        ids.append(sampler(logits_V, len(ids)))
        assert len(ids) < 10
    assert text.decode(ids[:-1]) in ("true", "false")


def test_the_document_is_kept(address: tuple[str, int], tmp_path: Path) -> None:
    """What schemathesis makes of it, right and wrong: no 5xx, answers of the forms it names."""
    url = f"http://{address[0]}:{address[1]}/openapi.json"
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", url, "-H", f"Authorization: Bearer {KEY}",
        "--phases=fuzzing", "--max-examples=5", "--seed=1", "--generation-deterministic",
        "--exclude-checks=positive_data_acceptance,ignored_auth", "--suppress-health-check=all",
        "--request-timeout=600", "--no-color",
    ]  # fmt: skip
    found = subprocess.run(command, capture_output=True, text=True, timeout=1200, cwd=tmp_path)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr


def test_two_readers_of_events(address: tuple[str, int]) -> None:
    """Those of others, one of them a byte at a time."""
    body = {"prompt": PROMPT, "max_tokens": 9, "temperature": 0, "stream": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    url = f"http://{address[0]}:{address[1]}/v1/completions"
    with httpx.Client(timeout=120) as client:
        with httpx_sse.connect_sse(client, "POST", url, json=body, headers=headers) as source:
            one = [event.data for event in source.iter_sse()]
        with client.stream("POST", url, json=body, headers=headers) as answer:
            other = [x.data for x in sseclient.SSEClient(answer.iter_bytes(1)).events()]

    def texts(events: list[str]) -> list[str]:
        assert events.pop() == "[DONE]"
        return [json.loads(event)["choices"][0]["text"] for event in events]

    assert texts(one) == texts(other) and len(one) > 1


def test_tokens_and_metrics(address: tuple[str, int]) -> None:
    status, answer, _ = asked(address, "/tokenize", {"prompt": "hé"})
    assert status == 200 and answer == {"tokens": [256, 104, 195, 169], "count": 4,
                                        "max_model_len": 256}  # fmt: skip
    assert asked(address, "/detokenize", {"tokens": answer["tokens"]})[1] == {"prompt": "hé"}
    assert asked(address, "/detokenize", {"tokens": [257]})[0] == 400
    asked(address, "/v1/completions", {"prompt": [5], "max_tokens": 3, "logit_bias": {"97": 100}})
    _, text, _ = asked(address, "/metrics", None)
    found = {x.name: x.samples[0].value for x in text_string_to_metric_families(text)}
    assert found["outsize_drawn"] >= 3 and found["outsize_pages"] == 64
    assert found["outsize_native"] == (native.library() is not None)
    assert asked(address, "/openapi.json", None)[1]["info"]["title"] == "Outsize"


def test_who_goes_away_is_not_drawn_for(model: Model) -> None:
    engine, text = Engine(model, ROOM, POLICIES.get("mixed")), open_tokenizer("bytes")

    async def left() -> None:
        made = pieces(engine, text, Ask((1, 2), 9, Sampling()), ())
        waiting = asyncio.ensure_future(anext(made))
        while not engine.line.requests:
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(left())
    assert [one.cancelled for one in engine.line.requests.values()] == [True]
    engine.close()
