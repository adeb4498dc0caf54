"""A layout as a Plan that this runtime carries out: mesh, stages, shards, schedule and cuts."""

from __future__ import annotations

from outsize.collectives.axes import AXES, axis_of
from outsize.collectives.mesh import Mesh, parse_mesh
from outsize.errors import OutsizeError
from outsize.foresight.layout import Layout
from outsize.foresight.module import blocks_of
from outsize.foresight.planning.asked import value_of
from outsize.foresight.shape import Shape
from outsize.plan import Pipelined, Plan, Precision, Rest, Sharding, Stage, Stream
from outsize.plan.plan import DEVICE

PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # as plans call them


def mesh_said(lay: Layout) -> str:
    """A layout's mesh in a line, as --mesh takes it."""
    sizes = {
        "rows": lay.data // lay.expert, "weights": lay.tensor, "stages": lay.pipeline,
        "tokens": lay.context,
    }  # fmt: skip
    axes = [axis_of(name) for name in AXES.names()]
    found = {axis.name: lay.expert if axis.parts else sizes[axis.cuts] for axis in axes}
    return ",".join(f"{name}={size}" for name, size in found.items() if size > 1) or "1"


def plan_of(
    shape: Shape, lay: Layout, blocks: tuple[int, ...] = (), shares: tuple[int, ...] = ()
) -> Plan:
    """What `outsize train --plan` takes. blocks: of each stage of a pipeline, as equal as they can
    be where none are given; shares: of the rows of a step, by worker of the data axis. Raises
    OutsizeError for what this runtime has not."""
    if lay.precision not in PRECISIONS:
        raise OutsizeError(
            f"precision {lay.precision} is foretold only; expected {', '.join(PRECISIONS)} for a"
            " plan that is written"
        )
    said = mesh_said(lay)
    blocks = blocks or blocks_of(shape.layers, lay)
    chunks = f"interleaved:{lay.chunks}" if lay.chunks > 1 else "1f1b"
    return Plan(
        shape.layers + 2,
        _stages(shape.layers, lay, blocks),
        lay.batch,
        lay.rows,
        lay.sequence if shape.module is None or shape.module.native else 0,  # as `prepare` has it
        Precision.named(PRECISIONS[lay.precision]),
        mesh=Mesh() if said == "1" else parse_mesh(said),
        shards=_shards(lay),
        sequence_parallel=lay.sequence_parallel,
        pipeline=Pipelined(chunks, _cuts(blocks)) if lay.pipeline > 1 else Pipelined(),
        row_shares=shares,
        stream=Stream(host=lay.resting.host, over=lay.resting.over),
    )


def _shards(lay: Layout) -> Sharding:
    zero, over = value_of(lay, "zero"), int(value_of(lay, "shards"))
    if zero == 3:
        return Sharding(over, over, over)
    return Sharding(1, 1, over)


def _cuts(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Stages at which the second and further chunks begin; the prologue is the first stage."""
    found, at = [], 1
    for count in blocks[:-1]:
        at += count
        found.append(at)
    return tuple(found)


def _stages(layers: int, lay: Layout, blocks: tuple[int, ...]) -> tuple[Stage, ...]:
    """A stage a segment. Of every worker's blocks the first `whole` are recomputed: what they keep
    lives longest."""
    left = dict.fromkeys(range(lay.pipeline), lay.whole)
    again = set[int]()
    first = 1
    for chunk, count in enumerate(blocks):
        place = chunk % lay.pipeline
        taken = count if lay.recompute == "full" else min(count, left[place])
        left[place] -= taken
        again.update(range(first, first + taken))
        first += count
    return tuple(
        Stage(i, i + 1, ("block",) if i in again else (), _rest(lay, 0 < i <= lay.resting.layers))
        for i in range(layers + 2)
    )


def _rest(lay: Layout, first: bool) -> Rest:
    """Of a stage. first: whether it is one of those that have below what is there in part."""
    at = lay.resting
    below = at.parts(1.0 if first or not at.layers else 0.0)
    tiers = (
        tier if part else ""
        for tier, part in zip((at.weights, at.summed, at.optimizer), below, strict=True)
    )
    return Rest(*(tier or DEVICE for tier in (*tiers, at.activations)))
