"""What people do to running commands: read slowly, kill a worker."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from outsize.checkpoint.store import Store
from outsize.cli.generate import _printing
from outsize.train import workers
from outsize.train.resolve import resolve

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


class Told:
    def __init__(self) -> None:
        self.said: list[str] = []

    def during(self, what: str) -> None: ...
    def at(self, action: str) -> None: ...
    def wait(self, what: str) -> None:
        self.said.append(what)

    def go(self) -> None:
        self.said.append("go")


def test_who_writes_for_a_slow_reader_waits(capsys) -> None:
    """The judge of workers ends those alone that do nothing and wait for nobody."""
    told = Told()
    _printing(told)("text")
    assert told.said == ["writing the text", "go"] and capsys.readouterr().out == "text"


@pytest.mark.parametrize(("code", "says"), [(137, True), (1, True), (130, False), (0, False)])
def test_a_killed_worker_s_ending_says_what_goes_on(code, says, tmp_path, monkeypatch, capsys):
    run = tmp_path / "a run"

    def killed(count, work) -> int:
        with Store(run) as store:
            store.save(4, (), {})
        return code

    monkeypatch.setattr(workers, "run_here", killed)
    monkeypatch.setattr(workers, "_import_all", lambda: None)
    values = resolve(None, ["workers=2", f"output={run}"])
    assert workers.run_workers(lambda: values, None, "refuse", lambda: None) == code  # type: ignore[arg-type, return-value]
    said = capsys.readouterr().err
    assert (f"step 4 is saved; to go on: outsize train --resume '{run}'" in said) == says


def test_a_relative_python_of_peers_is_found_from_anywhere(monkeypatch, tmp_path: Path) -> None:
    from support.paths import whole_path

    monkeypatch.chdir(tmp_path)
    assert whole_path("venv/bin/python") == str(tmp_path / "venv/bin/python")
    assert whole_path("python3") == "python3" and whole_path("/usr/bin/python") == "/usr/bin/python"
