"""The command line in this process: exit code, standard output, standard error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

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
    """Rates as a probe would give them, without the second or two of measuring."""
    from typing import Any

    from outsize.hardware import Hardware, Measured, Rate, Tier
    from outsize.hardware.hardware import Device

    def rate(value: float, unit: Any) -> Rate:
        return Rate(value, unit, "test", "2026-11-20")

    device = Device(
        "test",
        "cpu",
        rate(8e9, "B"),
        {"fp32": rate(1e11, "FLOP/s"), "bf16": rate(1.1e11, "FLOP/s")},
        rate(2e10, "B/s"),
        measured=Measured(overhead=rate(1e-6, "s")),
    )
    hardware = Hardware((device,), (Tier("device", 8 * 10**9),), (), "test")
    monkeypatch.setattr("outsize.train.setup.probe", lambda device: hardware)
