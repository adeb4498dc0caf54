"""What the workers of `prepare` must do alike: stop where one is refused, begin with the same
weights, and plan as the first of them finds. Where the stages of a pipeline begin, and where states
rest, follow from the rates that it measures; what it rehearses, the others need not.

A step over a tensor axis is the one that one worker would make only if all neighbours there have
the same rows and draw the same random numbers, so both are seen to before each step.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from outsize import accelerator
from outsize.collectives import Collective, World, everyone
from outsize.collectives.joined import stay_away
from outsize.errors import Everywhere, OutsizeError
from outsize.hardware.probe import probe
from outsize.plan import Pipelined, Plan, from_yaml, to_yaml
from outsize.search.pipeline_cuts import with_cuts
from outsize.simulate.costs import Costs
from outsize.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    tree_leaves,
)

T = TypeVar("T")
_PLAIN = (bool, int, float, str, bytes, Tensor, type(None))


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
    """The plan's pipeline with cuts that balance the workers, by the costs that the first of them
    predicts of the model's stages; without cuts, which makes equal numbers of stages, where a
    forward that depends on values cannot be predicted."""
    if world.mesh.pipeline == 1 or plan.pipeline.cuts:
        return plan.pipeline

    def balance() -> Pipelined:
        if world.rank:
            return plan.pipeline
        try:
            return with_cuts(plan, rehearsed(plan), probe(device.type)).pipeline
        except (DataDependentOutputException, DynamicOutputShapeException):
            return plan.pipeline

    found = alike(balance, world, device)
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


def begin_alike(model: nn.Module, world: World, rows: int, device: torch.device) -> None:
    """See that all workers have as many rows, and give them the first one's weights."""
    least, most = _bounds(rows, everyone(world), device)
    if most != least:
        raise OutsizeError(
            f"batch: the workers have {least:g} to {most:g} rows; expected as many on each: give"
            " every worker equal shares"
        )
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            everyone(world).broadcast(tensor.data)


def _bounds(number: int, group: Collective, device: torch.device) -> tuple[float, float]:
    """The least and the most that a worker of a group has of a number."""
    both = torch.tensor([-number, number], dtype=torch.float64, device=device)
    least, most = group.all_reduce(both, "max").tolist()
    return -least, most


def meet(axis: Collective, name: str, batch: Any, device: torch.device) -> None:
    """See that neighbours on an axis, who compute with the same rows or with tokens of the same
    ones, have the same batch."""
    least, most = _bounds(_mark(batch), axis, device)
    if most != least:
        raise OutsizeError(
            f"batch: neighbours on the {name} axis have different rows; expected the same: give"
            " workers rows by their place on the data axis, rank // tensor % data"
        )


def draw_alike(axis: Collective, device: torch.device) -> None:
    """Give all neighbours the first one's random numbers."""
    torch.set_rng_state(axis.broadcast(torch.get_rng_state().to(device)).cpu())
    if accelerator.queues(device):
        state = axis.broadcast(accelerator.random_state(device).to(device))
        accelerator.set_random_state(state.cpu(), device)


def _mark(batch: Any) -> int:
    """A number that differs where batches do."""
    mark = 0
    for item in _items(batch):
        mark = zlib.crc32(item, mark)
    return mark


def _items(batch: Any) -> Iterator[bytes]:
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            yield str(tuple(leaf.shape)).encode()
            flat = leaf.detach().cpu().contiguous().flatten()
            yield flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        elif isinstance(leaf, _PLAIN):
            yield repr(leaf).encode()
        elif is_dataclass(leaf):
            yield from _items([getattr(leaf, field.name) for field in fields(leaf)])
