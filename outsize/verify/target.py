"""What the command line names, as a Case: a run's file or directory, a model, a factory.

States rest on the device here whatever the run's tiers are: where they rest changes no number, and
is proved elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from outsize.checkpoint.opened import Checkpoint
from outsize.checkpoint.store import Store as Checkpoints
from outsize.collectives import Mesh, parse_mesh
from outsize.data import Batch, open_data
from outsize.errors import OutsizeError
from outsize.foresight.named import is_factory
from outsize.models.build import shells
from outsize.optim import AdamW
from outsize.plan import Plan, Precision, Rest, from_yaml, zero
from outsize.plan.plan import per_segment
from outsize.runtime.job import Fill
from outsize.train import derive
from outsize.train.model import subject_of
from outsize.train.planned import KEY, with_plan
from outsize.train.prepared.factory import imported
from outsize.train.recipe import data_config, noise_of, options_of, recipe_of, stream_of
from outsize.train.resolve import RUN, Resolved, resolve, values_of
from outsize.train.run import PLAN
from outsize.train.setup import Setup, rate_of, set_up, sharding_of
from outsize.train.state import first_values
from outsize.train.workers import over_workers
from outsize.verify.case import Adopted, Case, Native
from outsize.verify.planned import judging

STEPS = 10  # of a run that does not say how many it makes
EXACT_APPROXIMATE = ("bfloat16-weights",)  # what changes nothing in float64
# Where nothing is named.
SMALL = ("model.name=tiny", "train.sequence=32", "train.dropout=0.1", "plan.microbatch_rows=2")


@dataclass(frozen=True)
class Wanted:
    """What was said. values: of the run; of a factory's module, how it is spread; resume: made anew
    from saved states before the last step; device: where the plan's run is."""

    target: str | None
    values: Resolved
    steps: int
    resume: bool
    device: str

    @property
    def mesh(self) -> Mesh:
        mesh: str | None = self.values.get("mesh")
        return Mesh() if mesh is None else parse_mesh(mesh)


def wanted(
    target: str | None, sets: tuple[str, ...], steps: int, resume: bool, device: str = "auto"
) -> Wanted:
    """What was said. sets: "key=value" of a run; device: as a Case has it. OutsizeError for what
    cannot be."""
    small = () if any(one.startswith(f"{KEY}=") for one in sets) else SMALL
    named = target is not None and not is_factory(target)
    values = values_of(str(target), sets) if named else resolve(None, (*small, *sets))
    return Wanted(target, over_workers(with_plan(values)), steps, resume, device)


def case_of(wanted: Wanted) -> Case:
    """The case that was named."""
    return factory_case(wanted) if is_factory(wanted.target) else run_case(wanted)


def _rows(mesh: Mesh) -> int:
    """Of a step: uneven, of two a microbatch; on a pipeline enough for any schedule."""
    return 4 * mesh.rows * mesh.pipeline - 1 if mesh.pipeline > 1 else 3 * mesh.rows + 1


def _resume_at(wanted: Wanted) -> int:
    if wanted.resume and wanted.steps == 1:
        raise OutsizeError("--resume needs a step before it; expected --steps 2 or more")
    return wanted.steps - 1 if wanted.resume else 0


# -- a run -----------------------------------------------------------------------------------------


def run_case(wanted: Wanted) -> Case:
    """The case of a run; its data, its model, its plan on the mesh that is wanted."""
    resolved = wanted.values
    for name in ("memory", "host_memory", "disk"):
        resolved = resolved.with_value(name, None, "verify")
    resolved = resolved.with_value("tiers", (), "verify").with_value(
        "device", judging(wanted.device, wanted.mesh.size), "verify"
    )
    if wanted.target is None and resolved.get(KEY) is None:
        rows = _rows(wanted.mesh)
        tokens = resolved.get("train.sequence") * rows
        resolved = resolved.derive("train.batch_tokens", tokens, f"{rows} rows")
    _refuse_approximate(resolved)
    found = _checkpoint(wanted.target)
    model = None if found is None else subject_of(found, resolved)
    setup = set_up(resolved, _recorded_plan(wanted.target), model, fit=False)
    recipe = recipe_of(setup.config)
    return Case(
        Native(setup.subject.config, _values(setup, found), options_of(setup.config)),
        _on_device(setup.plan),
        recipe.optimizer,
        _batches(setup),
        wanted.steps,
        recipe.clip,
        _rates(setup),
        _resume_at(wanted),
        wanted.device,
        recipe.rates,
    )


def _rates(setup: Setup) -> Callable[[int], float]:
    """The run's own; a step beyond those of the run has the last one's."""
    resolved = setup.resolved
    if resolved.get("train.steps") is None:
        resolved = resolved.with_value("train.steps", STEPS, "verify")
    config = derive.after_plan(resolved, setup.forecast.seconds or 1.0).config
    return lambda step: rate_of(config, step)


def _refuse_approximate(resolved: Resolved) -> None:
    for name in resolved.get("plan.approximate"):
        if name not in EXACT_APPROXIMATE:
            raise OutsizeError(
                f"verify: plan.approximate holds {name}, whose numbers are not the plain ones;"
                " leave it out to verify the rest"
            )


def _on_device(plan: Plan) -> Plan:
    stages = tuple(replace(stage, rest=Rest(), spill=()) for stage in plan.stages)
    return replace(plan, stages=stages, budget=None)


def _checkpoint(target: str | None) -> Checkpoint | None:
    """The last of a run's directory."""
    if target is None or not (Path(target) / RUN).is_file():
        return None
    store = Checkpoints(Path(target), None)
    return None if store.latest() is None else store.load()


def _recorded_plan(target: str | None) -> Plan | None:
    path = Path(target or "") / PLAN
    if target is None or not path.is_file():
        return None
    return from_yaml(path.read_text(encoding="utf-8"))


def _values(setup: Setup, found: Checkpoint | None) -> Callable[[], Fill]:
    """First values: a checkpoint's, a model directory's, or drawn."""
    model = shells(setup.subject.config, torch.float32, "cpu")
    return lambda: first_values(model, setup.config, found)


def _batches(setup: Setup) -> Callable[[int], Batch]:
    """The run's own batches."""
    data = open_data(data_config(setup.config, setup.subject.text), setup.subject.config.vocab)
    stream = stream_of(setup.config, data, setup.plan)

    @cache
    def batch(step: int) -> Batch:
        return replace(stream.batch(step), noise=noise_of(setup.config, step))

    return batch


# -- somebody's own module -------------------------------------------------------------------------


def factory_case(wanted: Wanted) -> Case:
    """The case of "import.path:factory", whose factory gives an Adopted."""
    assert wanted.target is not None
    torch.manual_seed(0)
    made = imported(wanted.target)()
    if not isinstance(made, Adopted):
        raise OutsizeError(
            f"verify: {wanted.target} gives a {type(made).__name__}; expected an"
            " outsize.verify.Adopted(model, batch, loss, count)"
        )
    mesh = wanted.mesh
    if mesh.tensor > 1:
        raise OutsizeError(
            f"mesh: tensor is {mesh.tensor}, but {type(made.model).__name__} is an adopted module,"
            " for which verify runs the data axis alone; set tensor to 1"
        )
    rows, segments = _rows(mesh), len(made.named_blocks(made.model)) + 2
    precision = Precision.named(_dtype(made))
    shards = sharding_of(wanted.values.config) or zero(0, mesh.data)
    plan = Plan(
        segments, per_segment(segments), rows, 2, precision=precision, mesh=mesh, shards=shards
    )
    return Case(
        made, plan, AdamW(1e-3), lambda step: made.batch(step, rows), wanted.steps, 1.0,
        resume_at=_resume_at(wanted), device=wanted.device,
    )  # fmt: skip


def _dtype(made: Adopted) -> str:
    dtype = next(made.model.parameters()).dtype
    return str(dtype).removeprefix("torch.")
