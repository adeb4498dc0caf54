"""How often the computing thread waits for the device in a step: for the norm and for the loss.

What else a case needs is said here, with its reason; lanes wait in threads of their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import strict
from cases import CASES, Case, device, stores_of
from streamed import data_of
from subjects import ROWS

USUAL = 2  # the norm, which clips; the loss, which the caller reads
MORE = {
    "zeroth-order": -1,  # the losses on both sides come together, and there is no norm
    "freezing": 2,  # which weights are 0; the distances of all layers
    "local learning": 2,  # the norm of the second group; the losses of all groups
    "experts": 9,  # rows of each expert, in three blocks and three microbatches
    "latent attention": 6,  # two of its blocks have experts
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
    experts = MORE[name] if CASES[name].family in ("mixtral", "deepseek_v3") else 0
    assert evaluating == 1 + experts, name
