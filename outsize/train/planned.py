"""A run whose plan was made before: `outsize train --plan FILE`. What the plan fixes are values of
the run; what is said besides must be the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.config import DecoderConfig
from outsize.plan import Plan
from outsize.plan.file import PlanFile, digest_of, read_plan
from outsize.plan.settings import PLAN_SETTINGS
from outsize.train.resolve import Resolved

KEY = "plan_file"
_SAME = ("microbatch_rows", "loss_chunk", "mlp_tile", "split_backward")


def with_plan(resolved: Resolved) -> Resolved:
    """The values of a run and those that its plan file fixes. OutsizeError naming the first that
    was said otherwise."""
    path = resolved.get(KEY)
    return resolved if path is None else laid_over(resolved, read_plan(Path(path)).plan, str(path))


def laid_over(resolved: Resolved, plan: Plan, source: str) -> Resolved:
    """The values of a run and those that a plan fixes. source: where it is from."""
    for name, value in _fixed(plan):
        said = resolved.get(name) if resolved.given(name) else None
        if said is not None and said != value:
            raise OutsizeError(
                f"{name} is {_text(said)} ({resolved.origins[name]}), and the plan in {source} has"
                f" {_text(value)}: leave it out, or plan anew with it"
            )
        resolved = resolved.with_value(name, value, f"--plan {source}")
    if plan.budget is not None and resolved.get("memory") is None:
        resolved = resolved.with_value("memory", plan.budget, f"--plan {source}")
    count, size = resolved.get("workers"), plan.mesh.size
    if count not in (None, size):
        raise OutsizeError(
            f"workers is {count}, and the plan in {source} is for {size}: start {size}, or plan"
            " anew"
        )
    return resolved


def plan_of(resolved: Resolved, config: DecoderConfig) -> Plan | None:
    """The plan of a run's plan file, if it has one. OutsizeError for that of another model."""
    path = resolved.get(KEY)
    if path is None:
        return None
    found = read_plan(Path(path))
    _check(found, f"plan file {path}", resolved, config)
    return found.plan


def check(plan: Plan, source: str, resolved: Resolved, config: DecoderConfig) -> None:
    """OutsizeError for the plan of another model."""
    _check(PlanFile(plan), source, resolved, config)


def _check(found: PlanFile, source: str, resolved: Resolved, config: DecoderConfig) -> None:
    name = f"model {resolved.get('model.name')}"
    found.check_model(source, name, len(config.layers) + 2, _digest(config))


def file_of(plan: Plan, model: str, config: DecoderConfig) -> PlanFile:
    """A plan for other runs of the same model."""
    return PlanFile(plan, model=model, parameters=_digest(config))


def _digest(config: DecoderConfig) -> str:
    return digest_of((name, tuple(p.shape)) for name, p in build(config).named_parameters())


def _fixed(plan: Plan) -> Iterator[tuple[str, Any]]:
    """Keys of a run that a plan has values for."""
    if not plan.sequence:
        raise OutsizeError("the plan is of inputs that are not tokens; expected a decoder's plan")
    yield "train.sequence", plan.sequence
    yield "train.batch_tokens", plan.rows * plan.sequence
    yield "precision", plan.precision.compute
    yield "mesh", str(plan.mesh) if plan.mesh.size > 1 else None
    yield "plan.approximate", plan.approximate
    for name in _SAME:
        yield f"plan.{name}", getattr(plan, name)
    if plan.mesh.tensor > 1:
        yield "plan.sequence_parallel", plan.sequence_parallel
    for name, one in PLAN_SETTINGS.items():
        if not one.axis or plan.mesh[one.axis] > 1:
            yield f"plan.{name}", one.of(plan)
    if plan.mesh.pipeline > 1:
        yield "plan.pipeline", plan.pipeline.said
    if plan.mesh.data > 1:
        shards = plan.shards
        yield "plan.zero", (shards.parameters, shards.gradients, shards.optimizer)


def _text(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
