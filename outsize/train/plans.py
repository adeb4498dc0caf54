"""`outsize.plan` and `outsize.simulate`: the planner and the simulator from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outsize.errors import OutsizeError
from outsize.plan import Plan
from outsize.trace.trace import Trace
from outsize.train.resolve import Resolved, as_sets, resolve

if TYPE_CHECKING:
    from outsize.collectives import Mesh
    from outsize.hardware import Hardware


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
    from outsize.train.planned import check, laid_over
    from outsize.train.setup import set_up

    if not isinstance(plan, Plan):
        raise OutsizeError(f"plan is a {type(plan).__name__}; expected an outsize.Plan")
    resolved = laid_over(_values(model, settings or {}), plan, "the plan")
    resolved, found = subject(resolved)
    check(plan, "the plan", resolved, found.config)
    machine = _machine(resolved, hardware)
    return set_up(resolved, plan, fit=False, hardware=machine, exact=True).forecast.trace


def _values(model: str | Path, settings: Mapping[str, object]) -> Resolved:
    sets = as_sets(settings)
    path = Path(str(model))
    if path.is_file() or path.suffix in (".yaml", ".yml"):
        return _with_workers(resolve(path, sets))
    return _with_workers(resolve(None, [f"model.name={model}", *sets]))


def _with_workers(resolved: Resolved) -> Resolved:
    from outsize.train.workers import mesh_of, with_workers

    mesh = mesh_of(resolved, None, None)
    return with_workers(resolved, mesh, mesh.size)


def _machine(resolved: Resolved, hardware: Hardware | None) -> Hardware | None:
    """A machine that was given, with the tiers of this one and what its workers share."""
    if hardware is None:
        return None
    from outsize.hardware.shared import shared
    from outsize.train.setup import near
    from outsize.train.tiers import declared, with_tiers

    count = near(resolved.config)
    return shared(with_tiers(hardware, declared(resolved.config, count), count), count)
