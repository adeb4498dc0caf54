"""Processes in which the tests of this folder run: forked from a server that only imports.

A process that has a device has threads of autograd's for it, and the device must be there before
the first backward pass. Pytest's own process has run such passes, and workers of other tests are
forked from it. So one process beside it runs test after test: it learns once what an operator's
results look like. A test that forks workers which train is marked `fresh`: it has a process of its
own.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import runpy
import signal
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import forkserver
import pytest
import torch
from rates import known_machine
from remembered import remember
from trials import shorten

from outsize.hardware.probe import keep

HERE = Path(__file__).parent
STRICT = "strict"
SECONDS = 600  # of a test that takes one or two, all orders a minute: longer is a deadlock


@dataclass(frozen=True)
class Task:
    """A test: a function of a file, its arguments, the environment of pytest's process."""

    path: str
    name: str
    arguments: Mapping[str, Any]
    variables: Mapping[str, str]


class Apart:
    """A process that runs tests, one after another, until one of them fails or leaves something on
    the device; the next test has a new one then. on: the kind of device. cache: see `strict`.
    rehearsed: the folder of what planning has rehearsed (remembered.py), for processes that are
    fresh: others run tests with planted faults."""

    def __init__(self, on: str, cache: Path, rehearsed: Path) -> None:
        self._on, self._cache, self._rehearsed = on, cache, rehearsed
        self._here: Connection | None = None
        self._child: Any = None

    def run(self, task: Task, fresh: bool) -> str:
        """The traceback of a test, or "". fresh: in a process that has computed nothing."""
        if fresh or self._here is None:
            self.close()
            self._begin(fresh)
        assert self._here is not None
        self._here.send(task)
        try:
            if self._here.poll(SECONDS):
                text, clean = self._here.recv()
            else:
                text, clean = f"the test hung for {SECONDS} seconds", False
        except EOFError:
            text, clean = "the test's process ended in its midst", False
        if fresh or text or not clean:
            self.close()
        return str(text)

    def _begin(self, fresh: bool) -> None:
        processes = forkserver.context()
        self._here, there = processes.Pipe()
        arguments = (self._on, self._cache, there, self._rehearsed if fresh else None)
        self._child = processes.Process(target=_serve, args=arguments)
        self._child.start()
        there.close()

    def close(self) -> None:
        """End the process; what is on its device is not waited for."""
        if self._here is not None:
            with contextlib.suppress(ProcessLookupError):  # those that it forked go with it
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.kill()
            self._child.join()
            self._here.close()
        self._here = None


def _serve(on: str, cache: Path, there: Connection, rehearsed: Path | None) -> None:
    """Of the process: run what comes, until the other end closes. rehearsed: of a fresh one, which
    computes nothing before; in others the first backward pass, which counts the devices for good,
    sees as many as can be."""
    os.setsid()
    os.environ["STRICT_CACHE"] = str(cache)
    importlib.import_module("imported")
    rates: dict[str, str] = {}
    if on == STRICT:  # before the first backward pass, on the CPU too
        strict = importlib.import_module("strict")
        strict.load()
        if rehearsed is None:
            strict.start("eager", devices=strict.MOST_DEVICES)
            torch.ones(1, requires_grad=True).sum().backward()
            strict.start("eager")
            rates = _rates()
    shorten()
    if rehearsed is not None:
        remember(rehearsed, pytest.MonkeyPatch())
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    files: dict[str, dict[str, Any]] = {}
    try:
        while True:
            task = there.recv()
            os.environ.update(task.variables)
            for name, kept in rates.items():
                Path(os.environ["XDG_CACHE_HOME"], "outsize", name).write_text(kept)
            text = _run(task, files)
            there.send((text, not text and _clean(on)))
    except (EOFError, OSError):
        pass
    finally:
        os._exit(0)


def _rates() -> dict[str, str]:
    """Files of a cache that know the device's rates: to measure them takes four seconds."""
    machine = known_machine()
    device = replace(machine.devices[0], name=STRICT, kind="gpu", grain=512)
    with tempfile.TemporaryDirectory() as folder:
        keep(replace(machine, devices=(device,)), STRICT, cache=folder)
        return {file.name: file.read_text() for file in Path(folder).iterdir()}


def _run(task: Task, files: dict[str, dict[str, Any]]) -> str:
    os.chdir(tempfile.gettempdir())
    torch.manual_seed(0)
    torch.set_num_threads(1)
    try:
        if task.path not in files:
            files[task.path] = runpy.run_path(task.path)
        files[task.path][task.name](**task.arguments)
    except BaseException:
        return traceback.format_exc()
    return ""


def _clean(on: str) -> bool:
    """Whether nothing is left on the devices."""
    gc.collect()
    if on != STRICT:
        return True
    accelerator = torch.accelerator
    return not any(accelerator.memory_allocated(i) for i in range(accelerator.device_count()))
