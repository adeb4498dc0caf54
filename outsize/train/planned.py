"""Plans that are made before a run: `outsize.plan` and `outsize.simulate`, the planner and the
simulator from Python, and `outsize train --plan FILE`. What a plan fixes are values of the run;
what is said besides must be the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.config import DecoderConfig
from outsize.plan import Plan
from outsize.plan.file import PlanFile, digest_of, read_plan
from outsize.plan.settings import PLAN_SETTINGS
from outsize.trace.trace import Trace
from outsize.train.resolve import Resolved, as_sets, values_of

if TYPE_CHECKING:
    from outsize.collectives import Mesh
    from outsize.hardware import Hardware

KEY = "plan_file"
_SAME = ("microbatch_rows", "loss_chunk", "mlp_tile", "split_backward")


def plan(
    model: str | Path = "mini",
    *,
    memory: str | int | None = None,
    host_memory: str | int | None = None,
    disk: str | None = None,
    tiers: Sequence[str] = (),
    mesh: str | Mesh | None = None,
    settings: Mapping[str, object] | None = None,
    hardware: Hardware | None = None,
) -> Plan:
    """The quickest plan that trains a model within the memory that there is; nothing is allocated.

    model: a preset, a Hugging Face directory, or a run's file (YAML). memory, host_memory, disk,
    tiers, mesh: as `outsize plan` has them. settings: other keys of a run by name, as
    {"train.sequence": 512}. hardware: another machine's; this one is probed where none is given.
    Raises OutsizeError where no plan fits, with what is missing.
    """
    from outsize.train.setup import set_up

    given = {
        "memory": memory, "host_memory": host_memory, "disk": disk, "tiers": list(tiers) or None,
        "mesh": None if mesh is None else str(mesh),
    }  # fmt: skip
    resolved = _values(model, {**(settings or {}), **given})
    return set_up(resolved, fit=False, hardware=_machine(resolved, hardware)).plan


def simulate(
    model: str | Path,
    plan: Plan,
    *,
    settings: Mapping[str, object] | None = None,
    hardware: Hardware | None = None,
) -> Trace:
    """One step of a plan as it is predicted: when each action runs and what memory holds. model,
    settings, hardware: as for `plan`. Raises OutsizeError for the plan of another model."""
    from outsize.train.model import subject
    from outsize.train.setup import set_up

    if not isinstance(plan, Plan):
        raise OutsizeError(f"plan is a {type(plan).__name__}; expected an outsize.Plan")
    resolved = laid_over(_values(model, settings or {}), plan, "the plan")
    resolved, found = subject(resolved)
    _check(PlanFile(plan), "the plan", resolved, found.config)
    machine = _machine(resolved, hardware)
    return set_up(resolved, plan, fit=False, hardware=machine, exact=True).forecast.trace


def _values(model: str | Path, settings: Mapping[str, object]) -> Resolved:
    from outsize.train.workers import over_workers

    return over_workers(values_of(str(model), as_sets(settings)))


def _machine(resolved: Resolved, hardware: Hardware | None) -> Hardware | None:
    """A machine that was given, with the tiers of this one and what its workers share."""
    if hardware is None:
        return None
    from outsize.hardware.shared import shared
    from outsize.train.setup import near
    from outsize.train.tiers import declared, with_tiers

    count = near(resolved.config)
    return shared(with_tiers(hardware, declared(resolved.config, count), count), count)


def with_plan(resolved: Resolved) -> Resolved:
    """The values of a run and those that its plan file fixes; the plan's model where none is said.
    OutsizeError naming the first that was said otherwise."""
    path = resolved.get(KEY)
    if path is None:
        return resolved
    found = read_plan(Path(path))
    if found.model and not resolved.given("model.name"):
        resolved = resolved.with_value("model.name", found.model, f"--plan {path}")
    return laid_over(resolved, found.plan, str(path))


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
    yield "precision", plan.precision.name
    yield "mesh", str(plan.mesh) if plan.mesh.size > 1 else None
    yield "plan.approximate", plan.approximate
    for name in _SAME:
        yield f"plan.{name}", getattr(plan, name)
    if plan.mesh.tensor > 1:
        yield "plan.sequence_parallel", plan.sequence_parallel
    for name, one in PLAN_SETTINGS.items():
        if one.run and (not one.axis or plan.mesh[one.axis] > 1):
            yield f"plan.{name}", one.of(plan)
    if plan.mesh.pipeline > 1:
        yield "plan.pipeline", plan.pipeline.said
    if plan.mesh.data > 1:
        shards = plan.shards
        yield "plan.zero", (shards.parameters, shards.gradients, shards.optimizer)


def _text(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
