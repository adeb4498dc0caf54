"""What a device cannot do is refused in one line, before anything of the run is made."""

from __future__ import annotations

import os
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import strict
import torch
from click.testing import CliRunner

from outsize import accelerator
from outsize.cli.main import main

SMALL = ("model=tiny", "data=text.txt", "train.steps=1", "train.batch_tokens=256")
NOT_THERE = "device is 'xpu', and PyTorch finds only 'strict' here"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train", "precision=bfloat16"), "precision is 'bfloat16', which strict does not"),
        (("train", "device=xpu"), NOT_THERE),
        (("generate",), NOT_THERE),
    ],
)
def test_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    strict.start("demand")
    command, *more = arguments
    module = torch.get_device_module("strict")
    without = patch.object(module, "is_bf16_supported", lambda: False, create=True)
    with TemporaryDirectory() as folder, without, chdir(folder):
        Path("text.txt").write_text("So it goes on and on. " * 50)
        if command == "train":
            given = [word for one in (*SMALL, *more) for word in ("--set", one)]
        else:
            given = ["nowhere", "--device", "xpu"]
        result = CliRunner().invoke(main, [command, *given])
        lines = [line for line in result.output.splitlines() if line.strip()]
        assert result.exit_code == 2 and said in " ".join(lines[-2:]), result.output
        assert not list(Path().glob("runs/*"))


def test_what_tells_devices_apart() -> None:
    """Its own number where it has one; where it has none, its index, and which devices a process
    sees: two that each see one as their first may have the same or not."""
    strict.start("demand", devices=2)
    first, second = torch.device("strict", 0), torch.device("strict", 1)
    alone = patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "1"})

    def numbered(number: str) -> Any:
        found = SimpleNamespace(uuid=number)
        module = torch.get_device_module("strict")
        return patch.object(module, "get_device_properties", lambda _: found, create=True)

    known, told = accelerator.identity(first), accelerator.identity
    assert known == told(first) != told(second)
    with alone:
        assert told(first) not in (known, told(second))
    with numbered("f0e1"):
        own = told(first)
        with alone:
            assert told(first) == own != known
    with numbered("f0e2"):
        assert told(first) != own
    with numbered("00000000-0000"):
        assert told(first) == known


HIDDEN = (
    "device is 'cuda', and PyTorch finds none here, where CUDA_VISIBLE_DEVICES is ''; use 'cpu' or"
    " 'auto'"
)


def test_where_every_device_is_hidden_the_processor_trains() -> None:
    """As CUDA_VISIBLE_DEVICES does that is empty. Who asks for a device is told in one line."""
    strict.start("demand", devices=0)
    empty = patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""})
    with TemporaryDirectory() as folder, empty, chdir(folder):
        Path("text.txt").write_text("So it goes on and on. " * 50)
        given = [word for one in (*SMALL, "sample.tokens=0") for word in ("--set", one)]
        refused = CliRunner().invoke(main, ["train", *given, "--set", "device=cuda"])
        assert refused.exit_code == 2
        assert " ".join(refused.output.split()) == f"error: {HIDDEN}"
        assert not list(Path().glob("runs/*"))
        made = CliRunner().invoke(main, ["train", *given, "--set", "device=auto"])
        assert made.exit_code == 0, made.output
        assert accelerator.find("auto") == torch.device("cpu")
        assert list(Path().glob("runs/*/step-*"))
