"""A zeroth-order step of one worker: each stage is updated ahead of the passes through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from outsize.memory.chunk import ChunkTable, Dtypes
from outsize.plan import Plan
from outsize.schedule.action import Action, Kind
from outsize.schedule.chunks import Chunks
from outsize.schedule.compile.forward import forward
from outsize.schedule.items import Items
from outsize.schedule.kept import Kept
from outsize.schedule.layout import Placement
from outsize.schedule.passes.offload import streamed
from outsize.schedule.schedule import Schedule


def placement_of(plan: Plan, layout: Sequence[ChunkTable], apart: bool = False) -> Placement:
    """Weights alone, in the dtype of the master copy where the plan has one. A stage needs its own
    only: what it computes with of others was copied when they were here. apart: as Items has it."""
    precision = plan.precision
    held = getattr(torch, precision.master or precision.compute)
    bare = tuple(replace(table, trainable=False) for table in layout)
    uses = tuple((i,) for i in range(plan.segments))
    kept = Kept(Dtypes(held, held, None, held), ())
    return Placement(Items(Chunks(replace(plan, order="layer"), bare, uses, kept), apart=apart))


def step_of(placement: Placement, learns: Sequence[bool]) -> Schedule:
    """A step: every stage updated, then forward for all microbatches with either sign. learns: by
    chunk, whether it is trained; stages without such a chunk are read and never written."""
    plan, stages = placement.plan, len(placement.plan.stages)
    pairs = zip(placement.chunks.tables, learns, strict=True)
    moving = {placement.chunks.stage_of[table.segment] for table, trained in pairs if trained}
    actions: list[Action] = []
    for s in range(stages):
        actions += [Action(Kind.UPDATE, s)] if s in moving else []
        actions += [forward(s, m, stages - 1) for m in range(2 * plan.microbatches)]
    made = Schedule(
        stages, 2 * plan.microbatches, (tuple(actions),), first=stages, ahead=frozenset(moving)
    )
    passing = replace(placement.items.residency, fixed=frozenset(range(stages)) - moving)
    return placement.copying(streamed(made, passing, placement.rooms, plan.stream))
