"""The command line in this process: exit code, standard output, standard error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rates import known_hardware

Invoke = Callable[..., Result]


@pytest.fixture
def invoke() -> Invoke:
    """invoke(*words): run `outsize *words`; an exception that is no exit is raised here."""

    def run(*words: object) -> Result:
        from outsize.cli.main import main

        result = CliRunner().invoke(main, [str(word) for word in words], catch_exceptions=True)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with text and the file of a tiny run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for i in range(8):
        (tmp_path / "text" / f"{i}.txt").write_text(f"line {i} of a text\n" * (60 + i))
    (tmp_path / "run.yaml").write_text(
        """
model: tiny
data: {path: text, validation: 0.1}
train: {steps: 3, batch_tokens: 256, sequence: 64}
precision: float32
device: cpu
sample: {tokens: 4}
output: run
"""
    )
    return tmp_path


@pytest.fixture(autouse=True)
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """To measure this machine anew in each test takes seconds."""
    hardware = known_hardware()
    monkeypatch.setattr("outsize.train.setup.probe", lambda device: hardware)


@pytest.fixture(autouse=True)
def _timed_once(timed_once: None) -> None:
    """To take the times of blocks is a tenth of a tiny run."""
