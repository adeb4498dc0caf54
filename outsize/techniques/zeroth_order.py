"""Zeroth-order steps: two losses along a random direction in place of a backward pass.

Malladi et al., "Fine-Tuning Language Models with Just Forward Passes" (MeZO), 2023; on weights that
stream: Wang et al., "ZO2", 2025. outsize/runtime/special/zeroth.py has the handlers that play it.

    plan: {approximate: [zeroth-order]}
    zeroth-order: {epsilon: 1e-3}
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outsize.registry import setting, technique

if TYPE_CHECKING:
    from outsize.hardware import Hardware
    from outsize.memory import Ledger
    from outsize.plan import Plan
    from outsize.runtime import Job
    from outsize.schedule import Action
    from outsize.schedule.starting import Filling
    from outsize.simulate.counter import Work
    from outsize.simulate.forecast import Forecast

KEY = "zeroth-order"
DRAWN = 26e6  # normal numbers a second of one core (docs/log.md): two for every weight and step


@dataclass(frozen=True)
class ZerothOrder:
    """Of a run whose plan.approximate names it."""

    epsilon: float = setting(1e-3, "how far from the weights the losses are taken", least=0)


technique(
    KEY, ZerothOrder, "settings of plan.approximate: [zeroth-order]", exact=False,
    touches=frozenset({"the backward pass", "optimizer states"}), alone=True,
    method="outsize.runtime.special.zeroth.Losses",
    clashes=(
        (
            "states other than parameters below the device: there are none",
            lambda p: p.rests_below("gradients", "optimizer", "activations"),
        ),
        ("recompute", lambda p: any(stage.recompute for stage in p.stages)),
        ("split_backward", lambda p: p.split_backward),
        ("update: behind", lambda p: p.update == "behind"),
    ),
)  # fmt: skip


def predicted(
    plan: Plan,
    job_of: Callable[[Plan, Ledger], Job],
    batch_of: Callable[[int], object],
    hardware: Hardware,
    filling: Filling,
) -> Forecast:
    """What a plan of losses alone will hold and take. job_of, batch_of: called in a fake mode."""
    import torch

    from outsize.memory import Ledger
    from outsize.simulate.playing import forecast_of, highest, played, segments_of, static_of
    from outsize.torch_private import FakeTensorMode

    ledger = Ledger()
    with FakeTensorMode(), torch.no_grad():
        job = job_of(plan, ledger)
        static = static_of(ledger)
        job.ready(batch_of(plan.rows), 1.0)

        def seconds(action: Action, work: Work) -> float:
            return _seconds(job, hardware, action, work)

        made = played(job.engine, job.loaded, ledger, static, seconds)
        names = [name for name, _ in job.flow.segments]
        segments = segments_of(job.placement, names, made.schedule)
        job.method.microbatches.ready(batch_of(size := plan.microbatch_size), [(0, size)], 1.0)
        evaluation = highest(job.engine, job.playable(job.placement.evaluation(1)), ledger)
    return forecast_of(plan, made, static, segments, [job.placement], filling, evaluation)


def _seconds(job: Job, hardware: Hardware, action: Action, work: Work) -> float:
    from outsize.runtime.special.zeroth import learning
    from outsize.schedule import Kind, Lane
    from outsize.schedule.residency import moved
    from outsize.simulate.forecast import duration, rate

    placement, stage = job.placement, action.stage
    if action.lane is not Lane.COMPUTE:
        fetch = action.kind is Kind.FETCH
        return sum(
            span.bytes / rate(hardware, placement.chunks.tier(span.chunk, span.what), fetch)
            for span in placement.items.spans[moved(action)]
        )
    draws = action.kind is Kind.UPDATE or not action.microbatch
    learns = learning(job.flow, placement)
    chunks = (c for c in placement.chunks.of_stage[stage] if learns[c])
    numel = sum(placement.chunks.tables[c].numel for c in chunks) if draws else 0
    return duration(work, hardware.devices[0]) + numel / DRAWN
