"""How often the computing thread waits for the device in a step: for the norm and for the loss.

What else a case needs is said here, with its reason; lanes wait in threads of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import strict
import torch
from cases import CASES, Case, device, stores_of
from streamed import data_of
from subjects import ROWS

from outsize.collectives.collective import Alone
from outsize.models.experts import LocalDispatch
from outsize.techniques.axes.expert import Exchanged

USUAL = 2  # the norm, which clips; the loss, which the caller reads
MORE = {
    "zeroth-order": -1,  # the losses on both sides come together, and there is no norm
    "local learning": 1,  # the norm of the second group, which its update waits for
}


def waits_in(case: Case, folder: Path) -> tuple[int, int, list[str]]:
    """(of a second step, of an evaluation, where) on the computing thread."""
    strict.start("demand", device_bytes=1 << 28)
    with stores_of(case, device(), folder) as stores:
        job, data = case.job(device(), stores), case.batches(2)
        job.step(data[0], 1e-2)
        with strict.waits(mine=True) as stepping:
            job.step(data[1], 1e-2)
        job.evaluate(
            data_of(1)[0], ROWS
        )  # where weights stream: brings those that a list begins with
        with strict.waits(mine=True) as evaluating:
            job.evaluate(data_of(1)[0], ROWS)
        job.close()
    lines = [f"{count} x {kind} at {where}" for (kind, where), count in stepping.items()]
    return sum(stepping.values()), sum(evaluating.values()), lines


@pytest.mark.parametrize("name", CASES)
def test_a_step_waits_for_the_norm_and_the_loss(name: str, tmp_path: Path) -> None:
    stepping, evaluating, lines = waits_in(CASES[name], tmp_path)
    assert stepping == USUAL + MORE.get(name, 0), "\n".join(lines)
    assert evaluating == 1, name


class Doubling:
    """Four experts, which double."""

    every = count = 4

    def __call__(self, x_ND: torch.Tensor, sizes: Sequence[int] | torch.Tensor) -> torch.Tensor:
        assert len(sizes) == self.count
        return x_ND * 2


def test_tokens_wait_once_a_layer_where_experts_are_of_several_workers() -> None:
    """For how many rows go and come, together; where all experts are here they do not."""
    strict.start("demand")
    chosen_TJ = torch.tensor([[0, 2], [3, 1], [2, 3]], device="strict")
    weight_TJ = torch.rand(3, 2, dtype=torch.float64, device="strict")
    x_TD = torch.rand(3, 5, dtype=torch.float64, device="strict", requires_grad=True)
    for dispatch, waits in ((LocalDispatch(), 0), (Exchanged(Alone()), 1)):
        with strict.waits() as counted:
            y_TD = dispatch(x_TD, chosen_TJ, weight_TJ, Doubling())
            y_TD.sum().backward()
        assert sum(counted.values()) == waits, counted
        expected = 2 * x_TD * weight_TJ.sum(1, keepdim=True)
        assert torch.allclose(y_TD, expected, rtol=1e-12)
