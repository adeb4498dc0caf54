"""Tests of the accelerator: in processes of their own, see `apart`.

`pytest -m accelerator --on cuda tests/accelerator` runs those that ask for `device` on a real one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from apart import HERE, STRICT, Apart, Task
from strict.building import NoCompiler, build, cache_folder

CACHE = cache_folder()  # now: a test has one of its own
os.environ["STRICT_CACHE"] = str(CACHE.parents[1])  # of all processes of tests


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


@pytest.fixture(autouse=True, scope="session")
def apart(request: pytest.FixtureRequest, rehearsed: Path) -> Iterator[Apart]:
    """The process that tests run in."""
    made = Apart(_on(request.config), CACHE.parents[1], rehearsed)
    yield made
    made.close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the test in a process beside this one, whose traceback is the test's. Tests that change
    this process's state do not touch the device, and stay here."""
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    if "monkeypatch" in arguments:
        return None
    name, apart = pyfuncitem.originalname, pyfuncitem.funcargs["apart"]
    variables = {"XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}
    task = Task(str(pyfuncitem.path), name, arguments, variables)
    text = apart.run(task, pyfuncitem.get_closest_marker("fresh") is not None)
    if text:
        pytest.fail(text, pytrace=False)
    return True
