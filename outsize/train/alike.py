"""What the workers of `prepare` must do alike: stop where one is refused, and plan as the first of
them finds. Where the stages of a pipeline begin, and where states rest, follow from rates that each
measures itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TypeVar

import torch

from outsize.collectives import World, everyone
from outsize.collectives.joined import stay_away
from outsize.errors import Everywhere, OutsizeError
from outsize.hardware.probe import probe
from outsize.plan import Pipelined, Plan, from_yaml, to_yaml
from outsize.search.settled import settled
from outsize.simulate.costs import Costs
from outsize.torch_private import DataDependentOutputException, DynamicOutputShapeException

T = TypeVar("T")


def alike(work: Callable[[], T], world: World, device: torch.device) -> T:
    """What a worker's own part gives. Where it is refused on one of them, all are refused in the
    words of the first of these. Every worker calls it; `work` says nothing to others unless all of
    them come to say it."""
    if world.mesh.size == 1:
        return work()
    refused: OutsizeError | None = None
    try:
        found = work()
    except OutsizeError as error:
        refused = error
    group = everyone(world)
    mark = 0.0 if refused is None else float(group.size - group.rank)
    first = int(group.all_reduce(torch.tensor([mark], dtype=torch.float64, device=device), "max"))
    if not first:
        return found
    line = _told(str(refused or ""), world, device, group.size - first)
    raise refused if refused is not None and str(refused) == line else OutsizeError(line)


@contextmanager
def leaving(abort: Callable[[str], str]) -> Iterator[None]:
    """Inside, workers wait for each other. One that cannot go on ends that for all of them, in its
    own words; they do not work together again. abort: as outsize.collectives.Joined has it."""
    try:
        yield
    except Everywhere:
        raise
    except BaseException as error:
        name = "" if isinstance(error, OutsizeError) else f"{type(error).__name__}: "
        mine = f"{name}{error}"
        first = abort(mine)
        if first != mine:
            raise OutsizeError(first) from error
        raise


def refused_alone(environment: Mapping[str, str], error: OutsizeError) -> None:
    """`prepare` has refused on this worker: those that would wait for it are refused too."""
    with suppress(OutsizeError):  # nobody waits where there is no meeting point
        if environment.get("WORLD_SIZE", "1") != "1":
            stay_away(environment, str(error))


def balanced(
    plan: Plan, rehearsed: Callable[[Plan], Costs], world: World, device: torch.device
) -> Pipelined:
    """The plan's pipeline with cuts that balance the workers, by the predicted costs of the model's
    stages; without cuts, which makes equal numbers of stages, where a forward that depends on
    values cannot be predicted."""
    if world.mesh.pipeline == 1 or plan.pipeline.cuts:
        return plan.pipeline

    def balance() -> Pipelined:
        try:
            return settled(plan, rehearsed(plan), probe()).pipeline
        except (DataDependentOutputException, DynamicOutputShapeException):
            return plan.pipeline

    found = alike(balance, world, device)
    # Clocks differ between machines, and so might cuts.
    return agreed(replace(plan, pipeline=found), world, device).pipeline


def agreed(plan: Plan, world: World, device: torch.device) -> Plan:
    """The first worker's plan; all call this."""
    if world.mesh.size == 1:
        return plan
    return from_yaml(_told(to_yaml(plan), world, device))


def _told(text: str, world: World, device: torch.device, source: int = 0) -> str:
    """What one worker has to say."""
    group, said = everyone(world), text.encode()
    size = torch.tensor([float(len(said))], dtype=torch.float64, device=device)
    size = group.broadcast(size, source)
    flat = torch.zeros(int(size), dtype=torch.uint8)
    if group.rank == source and said:
        flat.copy_(torch.frombuffer(bytearray(said), dtype=torch.uint8))
    return bytes(group.broadcast(flat.to(device), source).cpu().tolist()).decode()
