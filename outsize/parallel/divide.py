"""What a worker keeps of a decoder, as a plan's mesh says: one call for all axes that cut it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from outsize.collectives import Collective, World, along
from outsize.models.cuts import Cut
from outsize.models.decoder import Decoder
from outsize.parallel.tensor.beside import beside_of
from outsize.parallel.tensor.decoder import split
from outsize.plan import Plan
from outsize.registry import Registry

# By axis whose workers hold different parts of some weights, or by what cuts a pipeline's ends:
# leaves of a decoder those of a worker; gives how what was there of these weights was cut, by name.
# Ends have a second collective, of the tensor axis, beside what that says while it computes.
DIVISIONS: Registry[Callable[..., dict[str, Cut]]] = Registry("division")


def divide(
    model: Decoder,
    world: World,
    plan: Plan,
    line: Collective | None = None,
) -> dict[str, Cut]:
    """Leave of a decoder this worker's part; gives how each parameter was cut, by name.

    line: the workers of the pipeline, where they are not the world's (a forecast plays one).
    """
    beside = beside_of(world, plan.settings)
    axis = along(world, "tensor")
    cuts = split(model, axis, plan.sequence_parallel, beside, plan.by_rows)
    over: list[tuple[str, tuple[Collective, ...]]] = [
        (axis.name, (along(world, axis.name),)) for axis in world.mesh.axes if axis.parts
    ]
    if plan.pipeline.ends is not None:
        across = along(world, "tensor", "exchange")
        over.append((plan.pipeline.ends[0], (line or along(world, "pipeline", "exchange"), across)))
    for name, workers in over:
        further = DIVISIONS.get(name)(model, *workers)
        cuts |= {name: replace(cut, outer=cuts.get(name)) for name, cut in further.items()}
    return cuts
