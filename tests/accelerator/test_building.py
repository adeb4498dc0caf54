"""The device's library: built once and kept, or the reason why not."""

from __future__ import annotations

from pathlib import Path

import pytest
import strict
from strict import building


def test_without_a_compiler_the_reason_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(strict.NoCompiler, match=r"no C\+\+ compiler .* install g\+\+"):
        building.build(tmp_path)


def test_what_is_built_is_kept(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, target: Path) -> None:
        raise AssertionError(f"{target} is compiled again")

    monkeypatch.setattr(building, "_compile", refuse)
    assert building.build(built).exists()


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ValueError, match="order is 'late'; expected one of eager, random"):
        strict.start("late")
