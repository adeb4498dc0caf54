"""`outsize serve`: a process that serves, drains and ends; what is refused before it does."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from decoders import SMALL

import outsize
from outsize.cli.main import main
from outsize.models.build import build
from outsize.models.families import parse


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serve") / "small"
    config = {**SMALL, "model_type": "llama", "vocab_size": 257}
    outsize.save(build(parse(config), seed=3), path)
    return path


@contextmanager
def killed(process: subprocess.Popen[str]) -> Iterator[None]:
    """In the end, whatever happens."""
    try:
        yield
    finally:
        process.kill()


def test_it_serves_and_ends_when_all_is_answered(directory: Path) -> None:
    """A stream is under way when SIGTERM comes: it is answered to its end."""
    command = [sys.executable, "-m", "outsize", "serve", str(directory), "--port", "0"]
    (options := directory.parent / "serve.yaml").write_text("tokenizer: bytes\ncontext: 64\n")
    command += ["--options", str(options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, killed(process):
        assert process.stdout is not None
        plan = [process.stdout.readline() for _ in range(2)]
        assert "cache" in plan[0] and "up to 16 requests at once, of 64 tokens each" in plan[1]
        line = process.stdout.readline()
        assert line.startswith("serving small at http://127.0.0.1:") and "no chat template" in line
        port = int(line.partition("127.0.0.1:")[2].partition("/")[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        ask = {"prompt": "a", "max_tokens": 60, "stream": True, "logit_bias": {"97": 100}}
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(ask), headers)
        answer = connection.getresponse()
        process.send_signal(signal.SIGTERM)
        events = answer.read().decode().split("\n\n")
        said = [json.loads(one.removeprefix("data: ")) for one in events[:-2]]
        assert "".join(one["choices"][0]["text"] for one in said) == "a" * 60
        assert events[-2:] == ["data: [DONE]", ""]
        assert process.wait(120) == 0


def keyed(path: Path, mode: int, text: str = "secret\n") -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def test_what_cannot_be_is_one_line(directory: Path, tmp_path: Path) -> None:
    def said(text: str) -> Path:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases: list[tuple[tuple[Any, ...], str]] = [
            (("--port", port), f"--port {port} on 127.0.0.1: "),
            (("--port", 70000), "--port 70000 on 127.0.0.1: "),
            (("--slo", "ttft=5"), "--slo ttft=5: 'ttft=5' is none; expected ttft=500ms"),
            (
                ("--policy", "deadline"),
                "policy deadline goes by what is promised; serve with --slo",
            ),
            (("--host", "0.0.0.0"), "--host 0.0.0.0 is open to other machines"),
            (("--key-file", tmp_path / "none"), "is no file"),
            (("--key-file", keyed(tmp_path / "open", 0o644)), "can be read by others"),
            (("--key-file", keyed(tmp_path / "empty", 0o600, "\n")), "expected keys"),
            (
                ("--key-file", keyed(tmp_path / "a", 0o600, "one tokens=9\n\ntwo tokens=0\n")),
                "a: line 3: 'tokens=0' behind the key; expected what it may have in a minute",
            ),
            (("--key-file", keyed(tmp_path / "b", 0o600, "x\nx requests=1\n")), "a key twice"),
            (("--policy", "mixd"), "policy 'mixd' is not known; did you mean 'mixed'"),
            (("--disk", tmp_path / "none"), "is not a folder; make it"),
            (("--host-memory", "1MiB", "--port", 0), "the cache is in the host's memory already"),
            (("--memory", "10KiB", "--port", 0), "--memory 10.00 KiB: "),
            (("--context", 100, "--port", 0), "this model has 64 positions"),
            (("--template", "chatm", "--port", 0), "'chatm'"),
            (("--mesh", "data=2", "--port", 0), "data is 2, but a prompt has nothing to split"),
            (("--mesh", "tensor=2", "--adapter", directory), "adapter_config.json"),
            (
                ("--mesh", "tensor=2", "--adapter", directory, "--memory", "1GiB"),
                "--adapter is for weights",
            ),
            (("--workers", 2, "--port", port), f"--port {port} on 127.0.0.1: "),
            (("--workers", 2, "--mesh", "tensor=3"), "has 3 workers, and there are 2"),
            (("--tokenizer", tmp_path, "--port", 0), "tokenizer.json"),
            (("--options", said("contxt: 5")), "contxt: unknown key; did you mean 'context'"),
            (("--options", said("context: [5]")), "context is [5]; expected one value"),
            (("--options", said("adapter: x")), "adapter is 'x'; expected a list"),
            (("--options", said("context: 100"), "--port", 0), "this model has 64 positions"),
            (("--options", tmp_path / "none.yaml"), "none.yaml"),
        ]
        for words, said in cases:
            known = () if "--tokenizer" in words else ("--tokenizer", "bytes")
            found = CliRunner().invoke(main, ["serve", *map(str, (directory, *known, *words))])
            assert found.exit_code == 2, (words, found.output)
            (line,) = found.stderr.splitlines()
            assert line.startswith("error: ") and said in line, line
