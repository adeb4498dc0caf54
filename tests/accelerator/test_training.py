"""Training on the device of the tests gives the CPU's numbers, whatever the device is late with.

Every case runs once on the CPU and under several orders of the device's streams; all orders give
the same bits. Where operators are the CPU's own, those are the CPU's bits. OUTSIZE_ORDERS=all goes
through all twenty orders.

In the first order nothing runs before the host waits. There it is counted how often the computing
thread does in a step: for the norm and for the loss; lanes wait in threads of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import strict
import torch
from cases import CASES, CPU, LR, Case, Waits, far, outcome, some
from streamed import Outcome

from outsize import accelerator
from outsize.kernels import native

CLOSE = {
    "float64": 1e-10,
    "float32": 1e-3,
    "bfloat16": 1e-2,
    "float16": 3e-3,
}  # of the largest value of each
USUAL = 2  # waits: the norm, which clips; the loss, which the caller reads
MORE = {
    "zeroth-order": -1,  # the losses on both sides come together, and there is no norm
    "local learning": 1,  # the norm of the second group, which its update waits for
}
ELSEWHERE = 4  # times that where sums are taken in another order than a CPU's


@contextmanager
def plainly(case: Case, device: str) -> Iterator[None]:
    """In bfloat16 by the CPU's operators alone, as a device without kernels of our own has them:
    those round less often, and three steps make more of that than they do of any fault."""
    kernels = device in accelerator.COMPILED and native.compiles()
    if case.precision != "bfloat16" or kernels:
        yield
        return
    with patch.object(native, "library", lambda: None):
        yield


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_the_cpu_does_whatever_the_order(
    name: str, tmp_path: Path, device: str
) -> None:
    case = CASES[name]
    with plainly(case, device):
        expected, first = outcome(case, CPU, tmp_path), None
    for order in strict.begins(device, some(list(CASES).index(name)), 1 << 28):
        waits = Waits() if order == strict.ORDERS[0] and device == "strict" else None
        found = outcome(case, torch.device(device, 0), tmp_path, waits)
        if waits is not None:
            assert waits.stepping == USUAL + MORE.get(name, 0), "\n".join(waits.lines)
            assert waits.evaluating == 1
        first = first or found
        assert found.differences(first) == [], order
    assert first is not None
    if case.alike and device == "strict":  # the operators of others are their own
        assert first.differences(expected) == []
    if device == "strict" or (case.precision.startswith("float") and case.precision != "float16"):
        apart = far(first, expected)
        assert apart <= CLOSE[case.precision] * (1 if device == "strict" else ELSEWHERE), apart
    else:
        near(first, expected, CLOSE[case.precision], case.steps)


def near(found: Outcome, expected: Outcome, close: float, steps: int) -> None:
    """In 16 bits, by kernels of which each rounds in its own way: the first update, whose sign any
    rounding decides where a gradient is next to nothing, moves a weight by 2 LR at most, and so do
    those behind it."""
    assert found.losses[0] == pytest.approx(expected.losses[0], rel=close)
    norms = next(pair for pair in zip(found.norms, expected.norms, strict=True) if all(pair))
    assert norms[0] == pytest.approx(norms[1], rel=close)
    assert found.losses == pytest.approx(expected.losses, rel=ELSEWHERE * close)
    for name, weight in expected.weights.items():
        apart = (found.weights[name].double() - weight.double()).abs().max()
        assert apart <= 2 * LR * steps + close * weight.abs().max().double(), name
