"""Faults planted in the product, each of which the device of the tests shows: by wrong numbers, an
error, or waits of the host that a step does not need."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import strict
from cases import CASES, CPU, Waits, device, far, outcome
from plants import FAULTS, WAITING, Plant
from streamed import Outcome
from test_training import USUAL

FAR = 1e-10  # of the largest value: operators of some cases are not the CPU's own


@functools.cache
def right(name: str) -> Outcome:
    """Of the CPU's run."""
    with TemporaryDirectory() as folder:
        return outcome(CASES[name], CPU, Path(folder))


def shown(name: str, plant: Plant, folder: Path) -> str:
    """How a fault shows first; "" where it does not."""
    with plant():
        for order in strict.ORDERS:
            strict.start(*order, device_bytes=1 << 28)
            try:
                if far(outcome(CASES[name], device(), folder), right(name)) > FAR:
                    return f"wrong numbers in order {order}"
            except Exception as error:
                return f"{type(error).__name__} in order {order}: {error}"
    return ""


def waited(name: str, plant: Plant, folder: Path) -> tuple[int, int]:
    """Waits of a step that it does not need, and copies of memory that is not pinned."""
    waits = Waits()
    strict.start("demand", device_bytes=1 << 28)
    with plant():
        outcome(CASES[name], device(), folder, waits)
    return waits.stepping - USUAL, waits.unpinned


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_shown(fault: str, tmp_path: Path) -> None:
    name, plant = FAULTS[fault]
    right(name)  # without the fault
    found = shown(name, plant, tmp_path)
    print(f"{fault}: {found}")
    assert found, fault


@pytest.mark.parametrize("fault", WAITING)
def test_a_planted_wait_is_counted(fault: str, tmp_path: Path) -> None:
    needless, unpinned = waited(*WAITING[fault], tmp_path)
    print(f"{fault}: {needless} waits, {unpinned} unpinned")
    assert needless or unpinned


@pytest.mark.parametrize(
    "name", sorted({name for name, _ in (*FAULTS.values(), *WAITING.values())})
)
def test_no_fault_shows_where_there_is_none(name: str, tmp_path: Path) -> None:
    strict.start(*strict.ORDERS[-1], device_bytes=1 << 28)
    assert far(outcome(CASES[name], device(), tmp_path), right(name)) <= FAR
    if name in {name for name, _ in WAITING.values()}:
        assert waited(name, nullcontext, tmp_path) == (0, 0)
