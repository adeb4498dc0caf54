"""Tests of the accelerator: each in a process of its own, forked from a server that only imports.

A process that has a device has threads of autograd's for it, and the device must be there before
the first backward pass. Pytest's own process has run such passes, and workers of other tests are
forked from it.

`pytest -m accelerator --on cuda tests/accelerator` runs those that ask for `device` on a real one.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from strict.building import NoCompiler, build, cache_folder

HERE = Path(__file__).parent
STRICT = "strict"
CACHE = cache_folder()  # now: a test has one of its own
SECONDS = 300  # of a test that takes one or two: longer is a deadlock
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "outsize.train.prepare"])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--on", default=STRICT, metavar="DEVICE",
        help="run on a real device, as PyTorch calls it, the tests that need no more than one",
    )  # fmt: skip


def _on(config: pytest.Config) -> str:
    return str(config.getoption("--on", STRICT))  # unknown where this folder is not asked for


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Every test of this folder has the marker; on a real device those that ask for none go."""
    mine = [item for item in items if HERE in item.path.parents]
    for item in mine:
        item.add_marker(pytest.mark.accelerator)
    if _on(config) != STRICT:
        strictly = [item for item in mine if "device" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=strictly)
        items[:] = [item for item in items if item not in strictly]


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The kind of device of a test that needs no more than one: the strict one, or a real one."""
    return _on(request.config)


@pytest.fixture(autouse=True, scope="session")
def built(request: pytest.FixtureRequest) -> Path:
    """The folder that has the library. Without a compiler tests are skipped, and fail where CI is
    true."""
    if _on(request.config) != STRICT:
        return CACHE
    try:
        build(CACHE)
    except NoCompiler as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))
    return CACHE


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the test in a process of its own, whose traceback is the test's. Tests that change this
    process's state do not touch the device, and stay here."""
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    if "monkeypatch" in arguments:
        return None
    here, there = PROCESSES.Pipe()
    child = PROCESSES.Process(
        target=_run,
        args=(
            str(pyfuncitem.path),
            pyfuncitem.originalname,
            arguments,
            CACHE.parents[1],
            _on(pyfuncitem.config),
            there,
        ),
    )
    child.start()
    there.close()
    try:
        text = here.recv() if here.poll(SECONDS) else f"the test hung for {SECONDS} seconds"
    except EOFError:
        text = "the test's process ended in its midst"
    child.kill()
    child.join()
    if text:
        pytest.fail(text, pytrace=False)
    return True


def _run(
    path: str, name: str, arguments: dict[str, Any], cache: Path, on: str, there: Connection
) -> None:
    """Of a fresh process: load the test's file, run one test, send the traceback or nothing."""
    try:
        os.environ["XDG_CACHE_HOME"] = str(
            cache
        )  # the server began in a test that had one of its own
        torch.manual_seed(0)
        torch.set_num_threads(1)
        sys.path[:0] = [str(HERE)]
        if on == STRICT:  # before the first backward pass, on the CPU too
            importlib.import_module("strict").load()
        runpy.run_path(path)[name](**arguments)
        there.send("")
    except BaseException:
        there.send(traceback.format_exc())
    finally:
        os._exit(0)  # what tests leave on the device is not waited for
