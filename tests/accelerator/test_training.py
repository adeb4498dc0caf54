"""Training on the device of the tests gives the CPU's numbers, whatever the device is late with.

Every case runs once on the CPU and under several orders of the device's streams; all orders give
the same bits. Where operators are the CPU's own, those are the CPU's bits. OUTSIZE_ORDERS=all goes
through all twenty orders.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import strict
import torch
from cases import CASES, CPU, outcome
from streamed import Outcome

CLOSE = {"float64": 1e-10, "float32": 1e-3, "bfloat16": 1e-2}  # of the largest value of each


def orders_of(index: int) -> tuple[tuple[str, int, int], ...]:
    """Those of a case; all of them come up within twenty cases."""
    if os.environ.get("OUTSIZE_ORDERS") == "all":
        return strict.ORDERS
    return strict.ORDERS[0], strict.ORDERS[1 + index % 4], strict.ORDERS[5 + index % 15]


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_the_cpu_does_whatever_the_order(
    name: str, tmp_path: Path, device: str
) -> None:
    case = CASES[name]
    expected, first = outcome(case, CPU, tmp_path), None
    for order in strict.begins(device, orders_of(list(CASES).index(name)), 1 << 28):
        found = outcome(case, torch.device(device, 0), tmp_path)
        first = first or found
        assert found.differences(first) == [], order
    assert first is not None
    if case.alike and device == "strict":  # the operators of others are their own
        assert first.differences(expected) == []
    assert far(first, expected) <= CLOSE[case.precision]


def far(found: Outcome, expected: Outcome) -> float:
    """The largest difference of anything, as a part of the largest value of its kind."""
    pairs: list[tuple[Any, Any]] = [
        (found.losses, expected.losses),
        (found.norms, expected.norms),
        *zip(found.evaluations, expected.evaluations, strict=True),
        *((found.weights[name], expected.weights[name]) for name in expected.weights),
        *((found.states[name], expected.states[name]) for name in expected.states),
    ]
    return max(_apart(*(torch.as_tensor(x).double() for x in pair)) for pair in pairs)


def _apart(x: torch.Tensor, y: torch.Tensor) -> float:
    assert x.shape == y.shape
    largest = float(y.abs().max()) or 1.0
    return float((x - y).abs().max()) / max(largest, 1e-3)
