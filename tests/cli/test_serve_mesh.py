"""`outsize serve --mesh`: workers that serve together, drain together and end together."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from decoders import SMALL
from forked import forked, until

import outsize
from outsize.models.build import build
from outsize.models.families import parse


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of texts that take long."""
    path = tmp_path_factory.mktemp("serve") / "small"
    config = {**SMALL, "model_type": "llama", "vocab_size": 257, "max_position_embeddings": 1 << 16}
    outsize.save(build(parse(config), seed=3), path)
    return path


class Server:
    """A process; what it prints is in home/out and home/err."""

    def __init__(self, home: Path, *words: object) -> None:
        self.home, self.pid = home, forked(home, {}, "serve", *words, "--port", 0)
        assert until(lambda: bool(self.said("err")) or " at http://" in self.said("out"))
        assert not self.said("err")

    def said(self, name: str) -> str:
        path = self.home / name
        return path.read_text() if path.exists() else ""

    def ask(self, **ask: Any) -> http.client.HTTPResponse:
        port = int(self.said("out").partition("127.0.0.1:")[2].partition("/")[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(ask), headers)
        return connection.getresponse()

    def workers(self) -> list[int]:
        listed = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [int(pid) for pid in listed.split()]

    def end(self) -> int:
        pid, self.pid = self.pid, 0
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def serving(home: Path, directory: Path, *words: object) -> Iterator[Server]:
    server = Server(home, directory, "--tokenizer", "bytes", "--context", 1 << 15, *words)
    try:
        yield server
    finally:
        if server.pid:
            os.kill(server.pid, signal.SIGKILL)
            server.end()


def test_the_answers_are_those_of_one_worker_to_the_last(directory: Path, tmp_path: Path) -> None:
    """A stream is under way when SIGTERM comes: it is answered to its end."""
    with serving(tmp_path, directory, "--mesh", "tensor=2") as server:
        assert server.said("out").startswith("on tensor=2 a worker holds: weights ")
        found = json.loads(server.ask(prompt="a", max_tokens=12, temperature=0).read())
        own = outsize.generate(outsize.load(directory), "a", 12, tokenizer="bytes")
        assert found["choices"][0]["text"] == own
        answer = server.ask(prompt="a", max_tokens=90, stream=True, logit_bias={"97": 100})
        os.kill(server.pid, signal.SIGTERM)
        *events, done, _ = answer.read().decode().split("\n\n")
        said = [json.loads(one.removeprefix("data: ")) for one in events]
        assert "".join(one["choices"][0]["text"] for one in said) == "a" * 90
        assert done == "data: [DONE]" and server.end() == 0 and not server.said("err")


def test_a_worker_that_dies_is_told_of_to_who_waits(directory: Path, tmp_path: Path) -> None:
    """The answer that is under way ends in an error, and the server in a line that names it."""
    with serving(tmp_path, directory, "--workers", 2) as server:
        answer = server.ask(prompt="a", max_tokens=30_000, stream=True, logit_bias={"97": 100})
        assert answer.readline().startswith(b'data: {"id"')
        os.kill(server.workers()[0], signal.SIGKILL)
        *_, last, _ = answer.read().decode().split("\n\n")
        error = json.loads(last.partition("data: ")[2])["error"]
        assert error["type"] == "server_error" and "rank 0" in error["message"]
        assert server.end() == 128 + signal.SIGKILL
        (line,) = server.said("err").splitlines()
        assert line.startswith("error: rank 0 (in ") and "was killed by SIGKILL" in line
