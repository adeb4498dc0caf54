"""A plan that is given to `prepare`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from outsize.errors import OutsizeError
from outsize.memory.tiers import TierSpec
from outsize.models.decoder import Decoder
from outsize.plan import Plan
from outsize.plan.file import PlanFile, digest_of, read_plan
from outsize.train.tiers import named


def plan_given(plan: Plan | str | Path, model: nn.Module) -> Plan:
    """The plan, of a file where a path is given. OutsizeError for that of another model or of
    another number of workers than there are."""
    if not isinstance(plan, (Plan, str, Path)):
        raise OutsizeError(f"plan is a {type(plan).__name__}; expected an outsize.Plan or its file")
    found = PlanFile(plan) if isinstance(plan, Plan) else read_plan(Path(plan))
    source = "plan" if isinstance(plan, Plan) else f"plan file {plan}"
    if isinstance(model, Decoder):
        shapes = ((name, tuple(p.shape)) for name, p in model.named_parameters())
        found.check_model(source, "this model", len(model.blocks) + 2, digest_of(shapes))
    size, started = found.plan.mesh.size, int(os.environ.get("WORLD_SIZE", "1"))
    if size != started:
        raise OutsizeError(
            f"{source} is for {size} worker{'s' * (size != 1)}, and {started} started; start as"
            " many, or plan anew"
        )
    return found.plan


def refuse_said_twice(said: Mapping[str, bool]) -> None:
    """OutsizeError for an argument that the plan has its own of."""
    for name, given in said.items():
        if given:
            raise OutsizeError(f"{name} is given beside plan, which says it; leave it out")


def refuse_missing(plan: Plan, specs: Sequence[TierSpec]) -> None:
    """OutsizeError where a tier of the plan is not there."""
    missing = named(plan) - {spec.name for spec in specs}
    if missing:
        raise OutsizeError(
            f"plan has states on {', '.join(sorted(missing))}; expected where that is: pass disk,"
            " host_memory or tiers"
        )


def check_batch(plan: Plan, segments: int, rows: int, tokens: int) -> None:
    """OutsizeError where a plan is for other batches, or for a model cut otherwise."""
    if plan.segments != segments:
        raise OutsizeError(
            f"plan is of {plan.segments} segments, and this model has {segments}; plan anew for it"
        )
    for name, is_, has in (("rows", plan.rows, rows), ("sequence", plan.sequence, tokens)):
        if is_ != has:
            raise OutsizeError(f"plan is for {name} {is_}, and the batch has {has}; plan anew")
