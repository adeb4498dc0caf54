"""verify: a plan's run against the plain one, in float64 and in the plan's own precision."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from outsize import accelerator
from outsize.collectives import World
from outsize.collectives.threads import play
from outsize.plan import Precision
from outsize.verify import plain, planned
from outsize.verify.bounds import Bounds, Over, numbers, trained
from outsize.verify.case import Case
from outsize.verify.compare import LIMIT, ROUGH, Comparison, compare
from outsize.verify.planned import Run, Sent, judging

EXACT = Precision.named("float64")
MOVED = 5  # plain runs from which the least distance that can be asked for is known


@dataclass(frozen=True)
class Verdict:
    """exact: in float64. own, usual: in the plan's own precision, how far the plan and plain
    PyTorch are from plain float64; None where that is the plan's. sent: bytes of the last step, in
    float64. narrow: modules that compute in float32 inside, by which the two may differ in float64,
    looked for where they do. bounds, over: how far the plan's own precision may be, and what of it
    is farther. device: the kind on which the plan's run was. unjudged: the plan's own precision,
    where it is not run: a step that loss scaling skips has no twin in float64."""

    exact: Comparison
    sent: Sent
    own: Comparison | None = None
    usual: Comparison | None = None
    narrow: tuple[str, ...] = ()
    bounds: Bounds | None = None
    over: tuple[Over, ...] = ()
    device: str = "cpu"
    unjudged: str = ""

    @property
    def limit(self) -> float:
        """What float64 may differ by."""
        return ROUGH if self.narrow else LIMIT

    @property
    def holds(self) -> bool:
        """Within the limit in float64, in its own precision as near to it as rounding allows, and
        the same on every worker."""
        alike = self.own is None or not self.own.differ
        return self.exact.holds(self.limit) and alike and not self.over


@dataclass(frozen=True)
class Runs:
    """What a worker has of the plan's runs: in float64, and in the plan's own precision."""

    exact: Run
    own: Run | None


def verify(case: Case, own: bool = True) -> Verdict:
    """Train both ways, the workers as threads of this process, and compare. own: in the plan's
    precision too. OutsizeError for a plan that is refused."""
    mesh = case.plan.mesh
    here = replace(case, device=judging(case.device, mesh.size))

    def work(world: World) -> Runs:
        accelerator.take(here.device, world.rank, mesh.size)
        return planned_runs(here, world, own)

    return judged(here, play(mesh, work)[0])


def planned_runs(case: Case, world: World, own: bool = True) -> Runs:
    """What one worker does."""
    exact = planned.run(case.within(EXACT), world)
    other = own and case.plan.precision != EXACT and not case.plan.precision.scaled
    return Runs(exact, planned.run(case, world) if other else None)


def judged(case: Case, runs: Runs) -> Verdict:
    """The first worker's runs against plain ones, which are made here."""
    batches = [case.batch(step) for step in range(case.steps)]
    exact = case.within(EXACT)
    truth = plain.train(exact.plain(EXACT), exact.recipe, batches)
    found = compare(runs.exact.steps, truth, "float64", runs.exact.differ)
    narrow = () if found.holds() else case.subject.narrow(batches[0])
    precision = case.plan.precision
    if runs.own is None:
        unjudged = precision.compute if precision.scaled else ""
        return Verdict(found, runs.exact.sent, narrow=narrow, device=case.device, unjudged=unjudged)
    own = compare(runs.own.steps, truth, precision.compute, runs.own.differ)
    usual = plain.train(case.plain(precision), case.recipe, batches)
    bounds, over = trained(case, truth, batches).judge(numbers(own))
    other = compare(usual, truth, precision.compute)
    return Verdict(found, runs.exact.sent, own, other, narrow, bounds, over, case.device)


def own_rounding(case: Case) -> float:
    """How far the plain run comes from itself in float64 when each of its first values is moved by
    one rounding, up or down: what no other order of the same sums can be asked to stay within. The
    farthest of MOVED ways to move them, which differ by as much as tenfold."""
    exact = case.within(EXACT)
    batches = [case.batch(step) for step in range(case.steps)]
    usual = plain.train(exact.plain(EXACT), exact.recipe, batches)
    generator, worst = torch.Generator().manual_seed(0), 0.0
    for _ in range(MOVED):
        moved = exact.plain(EXACT)
        for value in moved.model.parameters():
            way = torch.randint(0, 2, value.shape, generator=generator).to(value.dtype)
            value.data = torch.nextafter(value.data, torch.where(way > 0, torch.inf, -torch.inf))
        other = plain.train(moved, exact.recipe, batches)
        worst = max(worst, compare(other, usual, "float64").worst)
    return worst
