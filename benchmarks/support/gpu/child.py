"""A case in a process of its own: what it found, or in one line why it found nothing.

Processes are forked from a server that has imported what cases import and touched no device, so
that a case pays for its device alone, and one that runs out of memory, crashes or hangs takes
nothing with it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support.gpu.place import Place

PRELOADED = [
    "support.gpu.generating", "support.gpu.offloading", "transformers.models.llama.modeling_llama",
]  # fmt: skip
LONGEST = 300  # characters of an error
Task = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """state: "done", "failed" or "left out"; why: one line, where it is not done."""

    state: str
    why: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


def run(task: str, place: Place, arguments: Mapping[str, Any], seconds: float) -> Outcome:
    """What a task found within so many seconds. task: "module:function", called with the place and
    the arguments; gives figures."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PRELOADED)
    here, there = processes.Pipe()
    child = processes.Process(target=_inside, args=(task, place, dict(arguments), there))
    child.start()
    there.close()
    try:
        if not here.poll(seconds):
            return Outcome("failed", f"still running after {seconds:.0f} seconds, and was ended")
        return Outcome(**here.recv())
    except EOFError:
        child.join()
        return Outcome("failed", f"its process ended ({_ending(child.exitcode)})")
    finally:
        with contextlib.suppress(ProcessLookupError):  # it leads a group: compilers go with it
            os.killpg(child.pid or 0, signal.SIGKILL)
        child.kill()
        child.join()
        here.close()


def _ending(code: int | None) -> str:
    return signal.Signals(-code).name if code and code < 0 else f"exit code {code}"


def _inside(task: str, place: Place, arguments: dict[str, Any], there: Connection) -> None:
    os.setsid()
    with Path(place.folder, "log.txt").open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    print(f"== {task} {arguments}", flush=True)
    module, _, name = task.partition(":")
    try:
        place.begin()
        function: Task = getattr(import_module(module), name)
        there.send(asdict(Outcome("done", figures=function(place, **arguments))))
    except BaseException as error:
        traceback.print_exc()
        there.send(asdict(Outcome("failed", one_line(error))))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # nobody waits for what is left on a device


def one_line(error: BaseException) -> str:
    """What went wrong, cut short."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
