"""A zeroth-order step of one worker: each stage is updated ahead of the passes through it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from outsize.memory.chunk import ChunkTable, Dtypes
from outsize.plan import Plan
from outsize.schedule.action import Action, Kind
from outsize.schedule.chunks import Chunks
from outsize.schedule.compile.evaluate import edges
from outsize.schedule.compile.forward import forward
from outsize.schedule.items import Items
from outsize.schedule.kept import Kept
from outsize.schedule.layout import Placement
from outsize.schedule.passes.offload import streamed
from outsize.schedule.passes.pipeline import placed
from outsize.schedule.pipelined import Placed
from outsize.schedule.role import Role
from outsize.schedule.schedule import Schedule


def placement_of(
    plan: Plan,
    layout: Sequence[ChunkTable],
    uses: Sequence[Sequence[int]],
    places: tuple[int, int] = (0, 0),
    apart: bool = False,
) -> Placement:
    """Weights alone, in the dtype of the master copy where the plan has one. uses: by segment, the
    segments with whose parameters it computes; on one worker a stage needs its own only: what it
    computes with of others was copied when they were here. places: of the worker, on the data and
    on the pipeline axis; apart: as Items has it."""
    precision, alone = plan.precision, plan.mesh.pipeline == 1
    held = getattr(torch, precision.master or precision.compute)
    bare = tuple(replace(table, trainable=False) for table in layout)
    own = tuple((i,) for i in range(plan.segments))
    kept = Kept(Dtypes(held, held, None, held), ())
    ordered = replace(plan, order="layer") if alone else plan
    chunks = Chunks(ordered, bare, own if alone else tuple(map(tuple, uses)), kept, *places)
    return Placement(Items(chunks, apart=apart))


def step_of(placement: Placement, learning: Collection[str]) -> Schedule:
    """A step: every stage updated, then forward for all microbatches with either sign; NORM sums
    the losses over the workers. learning: the parameters that are trained; stages without one are
    read and never written. A stage is updated right ahead of its passes; what others compute with,
    and what this worker only holds, before all of them."""
    chunks, plan, stages = placement.chunks, placement.plan, len(placement.plan.stages)
    line, turn, count = chunks.pipelining, chunks.turn, 2 * plan.microbatches
    tables = (t for t in chunks.tables if t.slots[0].name in learning)
    moving = frozenset(chunks.stage_of[table.segment] for table in tables)
    played = list(range(stages)) if line is None else sorted(line.route(turn))
    used = {other for s in played for other in chunks.stage_uses(s) if other != s}
    early = moving - frozenset(played) | moving & used
    actions, moves = [Action(Kind.UPDATE, s) for s in sorted(early)], list[Placed]()
    for s in played:
        actions += [Action(Kind.UPDATE, s)] if s in moving - early else []
        for m in range(count):
            before, after = ([], []) if line is None else edges(line, turn, s, m)
            moves += [(len(actions), move) for move in before]
            actions.append(forward(s, m, stages - 1))
            moves += [(len(actions), move) for move in after]
    role = None
    if line is not None:
        plays = frozenset((s, m) for s in played for m in range(count))
        role = Role(plays, line.role(turn).holds, (), line.others(turn))
    made = Schedule(
        stages, count, ((*actions, Action(Kind.NORM)),), first=stages, ahead=moving, role=role
    )
    passing = replace(placement.items.residency, fixed=frozenset(range(stages)) - moving)
    return placement.copying(placed(streamed(made, passing, placement.rooms, plan.stream), moves))
