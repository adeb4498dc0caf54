"""Workers of a pipeline, as threads, beside one worker that has the same rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from plain import batches
from streamed import memory, model_of, plan_of, snapshot
from subjects import SEQUENCE, VOCAB
from threads import play
from torch import Tensor

from outsize.collectives import Mesh, World
from outsize.data import Batch
from outsize.kernels.entropy import PLAIN, LossOptions
from outsize.models.build import build
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.optim import AdamW, Optimizer
from outsize.parallel.divide import divide
from outsize.plan import Pipelined, Plan, Sharding, Stage
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe

SEGMENTS = 8
Numbers = tuple[list[Any], dict[str, Tensor], dict[str, Tensor]]
_ALONE: dict[Any, Numbers] = {}


def piped(schedule: str, devices: int = 2, microbatches: int = 4, **changes: Any) -> Plan:
    """So many microbatches of two rows, the last of one row, on every worker of a data axis."""
    mesh, segments = changes.pop("mesh", Mesh(pipeline=devices)), changes.pop("segments", SEGMENTS)
    rows = (2 * microbatches - 1) * mesh.data
    changes = {"stages": per_segment(segments), "pipeline": Pipelined(schedule), **changes}
    return plan_of("float64", segments=segments, rows=rows, microbatch_rows=2, mesh=mesh, **changes)


def numbers(job: Job, plan: Plan, data: list[Batch]) -> Numbers:
    """What each step gives, an evaluation, and the states at the end."""
    found: list[Any] = []
    for batch in data:
        loss = job.step(batch.rows(*plan.rows_at(job.place)), 1e-2)
        found.append((float(loss), job.report.norm, job.report.count))
    mine = data[0].rows(*plan.rows_at(job.place))
    found.append(job.evaluate(mine, mine.ids_BS.shape[0]))
    found.append(job.update_counts())
    return found, *snapshot(job)


def model(
    family: str | DecoderConfig,
    frozen: Callable[[str, Any], bool] | None = None,
    segments: int = SEGMENTS,
) -> Decoder:
    """A decoder of a family, a layer for each segment between the ends, or of a configuration."""
    if isinstance(family, DecoderConfig):
        return build(family, seed=1, dtype=torch.float64)
    depth = "n_layer" if family == "gpt2" else "num_hidden_layers"
    made: Decoder = model_of(family, "float64", frozen, **{depth: segments - 2})
    return made


def one(plan: Plan) -> Plan:
    """The same for one worker, with nothing but microbatches."""
    stages = tuple(Stage(s.first, s.last) for s in plan.stages)
    return replace(
        plan, mesh=Mesh(), shards=Sharding(), sequence_parallel=False, stages=stages,
        sequence_chunk=0, pipeline=Pipelined(),
    )  # fmt: skip


def check(
    plan: Plan,
    family: str | DecoderConfig = "llama",
    clip: float | None = 0.5,
    optimizer: Optimizer | None = None,
    frozen: Callable[[str, Any], bool] | None = None,
    options: LossOptions = PLAIN,
    data: list[Batch] | None = None,
    steps: int = 2,
) -> None:
    """The workers of a plan against one worker with the same rows: losses, norms, an evaluation,
    weights and states."""
    optimizer = optimizer or AdamW(weight_decay=0.1)
    said = (plan.rows, plan.segments, repr(family), repr(optimizer), clip, options, steps)
    key = None if data or frozen else said
    data = data or batches(steps, plan.rows, SEQUENCE, VOCAB)
    if key not in _ALONE:  # one worker's numbers do not depend on how the others share the work
        alone = one(plan)
        whole = NativeFlow(model(family, frozen, plan.segments), alone, options)
        _ALONE[key] = numbers(Job(whole, alone, Recipe(optimizer, clip)), alone, data)
    wanted = _ALONE[key] if key else _ALONE.pop(key)

    def run(world: World) -> Numbers:
        mine = model(family, frozen, plan.segments)
        cuts = divide(mine, world, plan)
        with memory() as made:
            job = Job(
                NativeFlow(mine, plan, options),
                plan,
                Recipe(optimizer, clip),
                Here(world, stores=made),
                cuts=cuts,
            )
            result = numbers(job, plan, data)
            job.close()
        return result

    every = play(plan.mesh, run)
    for result in every:
        for here, there in zip(result[0], wanted[0], strict=True):
            assert here == pytest.approx(there, rel=1e-10)
        for own, theirs in zip(result[1:], wanted[1:], strict=True):
            near(own, theirs)
    for result in every[1:]:  # bit for bit among themselves
        assert result[0] == every[0][0]
        assert all(torch.equal(w, every[0][1][n]) for n, w in result[1].items())


def near(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Within 1e-10, name by name."""
    assert found.keys() == wanted.keys()
    for name in found:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-10, atol=1e-10)
