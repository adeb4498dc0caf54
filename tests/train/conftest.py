"""A tiny run: two text files, a model of a hundred thousand parameters, a few steps."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked import forked, until
from rates import known_hardware
from rich.console import Console

from outsize.collectives import World
from outsize.train.loop import Loop

Work = Callable[[World], Any]
WORDS = "import os\n\n\ndef walk(path):\n    for name in os.listdir(path):\n        yield name\n"


class Runs:
    """Runs in one directory."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "text").mkdir()
        for i in range(8):
            (home / "text" / f"{i}.txt").write_text(
                "".join(f"{WORDS}    return {i}, {j * i % 17}\n\n" for j in range(20 + i))
            )

    def sets(self, **changes: Any) -> list[str]:
        """What a tiny run sets; `a__b=value` changes the key a.b."""
        values = {
            "model.name": "tiny",
            "data.path": str(self.home / "text"),
            "data.validation": "0.1",
            "train.steps": "8",
            "train.batch_tokens": "256",
            "train.sequence": "64",
            "train.save_every": "3",
            "train.evaluate_every": "4",
            "precision": "float32",
            "device": "cpu",
            "sample.tokens": "3",
            "output": str(self.home / "run"),
        }
        values |= {key.replace("__", "."): str(value) for key, value in changes.items()}
        return [f"{key}={value}" for key, value in values.items()]

    def train(self, **changes: Any) -> str:
        """Train in this process; gives what it printed."""
        from outsize.train.resolve import resolve
        from outsize.train.run import start

        out = io.StringIO()
        assert start(resolve(None, self.sets(**changes)), Console(file=out, width=160)) == 0
        return out.getvalue()

    def resume(self, directory: Path, *changes: str, on_damage: Any = "refuse") -> str:
        """Go on in this process; gives what it printed."""
        from outsize.train.resolve import resolve
        from outsize.train.run import resume

        said = resolve(None, changes)
        out = io.StringIO()
        moved = [(name, value, said.origins[name]) for name, value in said.values.items()]
        assert resume(directory, moved, on_damage, Console(file=out, width=160)) == 0
        return out.getvalue()

    def command(self, *words: str, hold: int | None = None) -> int:
        """A process of the command, forked from this one, in the runs' home. hold: the number of a
        step before which it makes a file `held` there and waits until there is a file `go`."""
        step = Loop._step

        def held(loop: Loop, *given: Any) -> None:
            if loop.place.step + 1 == hold:
                Path("held").touch()
                until(Path("go").exists, 600.0)
            step(loop, *given)

        def first() -> None:
            os.chdir(self.home)
            if hold is not None:
                Loop._step = held  # type: ignore[method-assign]

        return forked(self.home, {}, *words, first=first)

    def ended(self, process: int) -> tuple[int, str]:
        """(exit code, all that it printed) of a command, or minus the signal that ended it."""
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        return code, "".join((self.home / name).read_text() for name in ("out", "err"))

    def wait_for_hold(self) -> None:
        """Wait until a command has got to the step before which it is held."""
        assert until((self.home / "held").exists, 600.0), "the step was not reached"
        (self.home / "held").unlink()


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.fixture(autouse=True)
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """To measure this machine anew in each test takes seconds."""
    hardware = known_hardware()
    monkeypatch.setattr("outsize.train.setup.probe", lambda device: hardware)


@pytest.fixture(autouse=True)
def _timed_once(timed_once: None) -> None:
    """To take the times of blocks is a tenth of a tiny run."""


class Open:
    """A world that is not closed."""

    def __init__(self, world: World) -> None:
        self.mesh, self.rank, self.group = world.mesh, world.rank, world.group

    def close(self) -> None:
        pass

    def abort(self, reason: str) -> str:
        return reason


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> Callable[[Work], Work]:
    """Workers that are threads join their own world: play(mesh, near(work))."""
    mine = threading.local()
    monkeypatch.setattr("outsize.train.prepared.making.from_environment", lambda *_: mine.world)

    def entering(work: Work) -> Work:
        def run(world: World) -> Any:
            mine.world = Open(world)
            return work(world)

        return run

    return entering
