"""Workers with unequal shares of a step's rows: the numbers are those of one worker, and memory is
forecast as the one with the most rows holds it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from plain import batches
from subjects import config_of
from threads import play
from verifying import case_of

from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.hardware import catalogue
from outsize.memory import Ledger
from outsize.models.build import build
from outsize.optim import AdamW
from outsize.plan import Pipelined, Plan, Precision, zero
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.search import PlanRequest
from outsize.search.planner import predict
from outsize.verify import verify

CASES = {
    "one row": (Mesh(2), (4, 1), {"shards": zero(1, 2)}),
    "the last has most": (Mesh(3), (1, 2, 5), {"shards": zero(3, 3), "microbatch_rows": 2}),
    "a pipeline": (Mesh(2, 1, 2), (7, 3), {"pipeline": Pipelined("zb-h1")}),
    "experts": (Mesh(expert=2), (2, 6), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_exact(name: str) -> None:
    """Loss, norm, gradients and weights to ten digits; what collectives sent is as ever."""
    mesh, shares, more = CASES[name]
    more = {"microbatch_rows": 1, **more}
    family = "mixtral" if name == "experts" else "llama, untied"
    segments = len(config_of(family).layers) + 2
    case = case_of(
        family, clip=0.5, mesh=mesh, rows=sum(shares), row_shares=shares,
        stages=per_segment(segments), **more,
    )  # fmt: skip
    spans = [case.plan.rows_of(m, 1) for m in range(case.plan.microbatches)]
    assert [spans[0][0], spans[-1][1]] == [0, shares[1]] and all(a < b for a, b in spans)
    found = verify(case, own=False)
    assert found.holds and found.exact.worst < 1e-12, found.exact.worst


def test_memory_is_that_of_the_most_rows() -> None:
    """Three microbatches of one row, and of at most two on the other worker."""
    config, sequence = config_of("llama, untied", hidden_size=64), 32
    plan = Plan(
        5, per_segment(5), 8, 2, sequence, Precision.named("float32"), mesh=Mesh(2),
        row_shares=(3, 5),
    )  # fmt: skip
    request = PlanRequest(
        8, sequence, plan.precision, AdamW(), documents=(0, sequence), mesh=plan.mesh
    )
    made = predict(config, request, plan, catalogue("H200", 2))
    (batch,) = batches(1, 8, sequence, config.vocab)
    batch = replace(batch, bounds=((0, sequence),) * 8)

    def peak(world) -> int:
        ledger = Ledger()
        flow = NativeFlow(build(config, seed=0), plan)
        job = Job(flow, plan, Recipe(AdamW()), Here(world, ledger=ledger))
        own = batch.rows(*plan.rows_at(job.place))
        mine = own.changed(torch.clone, own.bounds)
        for _ in range(2):
            job.step(mine)
        job.close()
        return job.report.trace.peak()

    found = play(plan.mesh, peak)
    assert max(found) == found[plan.busiest] > min(found)
    assert max(found) <= made.peak <= 1.05 * max(found), (found, made.peak)


@pytest.mark.parametrize("shares", [(3, 1), (4, 3, 1), (8, 0), (9, -1)], ids=str)
def test_what_are_no_shares(shares: tuple[int, ...]) -> None:
    with pytest.raises(OutsizeError, match=r"plan: row_shares is \[.*2 numbers from 1 on, 8 in"):
        case_of(mesh=Mesh(2), rows=8, row_shares=shares)
