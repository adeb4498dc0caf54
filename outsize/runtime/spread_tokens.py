"""Generation through a decoder whose parts lie on the workers of a mesh: the actions of a job that
generates, without a job; each worker has a run of segments for ever.

Who has handed on a slice of a long prompt begins with the next one while the others have the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from outsize.collectives import World, everyone
from outsize.memory.chunk import Dtypes
from outsize.models.decoder import Decoder
from outsize.plan import Pipelined, Plan
from outsize.plan.plan import per_segment
from outsize.runtime.engine import Engine, Handler, Hook, Loaded
from outsize.runtime.generating import TokenSteps, drawer, proved
from outsize.runtime.handlers.links import Links
from outsize.runtime.handlers.passes import Forward, nothing_comes
from outsize.runtime.handlers.sample import Sample
from outsize.runtime.microbatches import Microbatches, nothing_leaves
from outsize.runtime.native import NativeFlow
from outsize.runtime.points import Points
from outsize.runtime.stage_links import StageLinks
from outsize.runtime.watch import Watch
from outsize.schedule import Schedule
from outsize.schedule.chunks import Chunks
from outsize.schedule.items import Items
from outsize.schedule.kept import Kept
from outsize.schedule.layout import Placement


class SpreadTokens:
    """One worker's part: `steps`. All workers take the same ones.

    turns: by segment (prologue, blocks, epilogue) the place on the pipeline axis that has it, from
    the first to the last. Close it, or use it in a `with`, to end the threads that send.
    """

    def __init__(self, model: Decoder, world: World, turns: Sequence[int]) -> None:
        count, mesh = len(turns), world.mesh
        assert count == len(model.blocks) + 2, f"{count} turns"
        cuts = tuple(s + 1 for s, (here, after) in enumerate(pairwise(turns)) if here != after)
        pipeline = Pipelined("gpipe", cuts)  # whose stages lie one behind the other
        plan = Plan(count, per_segment(count), mesh.pipeline, mesh=mesh, pipeline=pipeline)
        flow, watch = NativeFlow(model, plan), Watch()
        placement = _bare(plan, world)
        self._passing: StageLinks | None = None
        if mesh.pipeline > 1:
            self._passing = StageLinks(world, placement.chunks, flow.device, watch.kind)
        several = self._passing is not None
        microbatches = Microbatches(flow, watch, nothing_leaves, sent=several)
        hand = nothing_comes if self._passing is None else self._passing.hand
        root, everybody = drawer(placement), everyone(world, "agreement")
        sample = Sample(
            lambda m: microbatches.of(m).loss,
            world.rank == root,
            lambda numbers: everybody.broadcast(numbers, root),
        )
        handlers: list[Handler] = [Forward(microbatches, count, hand), sample]
        before: list[Hook] = []
        if self._passing is not None:
            links = Links(self._passing, microbatches)
            handlers.append(links)
            before.append(links.sweep)
        self._engine = Engine(handlers, flow.device, watch, before, [microbatches.ending])
        uses = tuple((s,) for s in range(count))

        def load(made: Schedule) -> Loaded:
            return self._engine.load(made, Points(made, uses))

        playable = proved(placement, load)
        self.steps = TokenSteps(flow, self._engine, sample, playable, microbatches.carry)

    def close(self) -> None:
        """End its threads, once everything has gone; raises what went wrong there."""
        self._engine.close()
        if self._passing is not None:
            self._passing.close()

    def __enter__(self) -> SpreadTokens:
        return self

    def __exit__(self, *fault: object) -> None:
        if fault[0] is None:
            self.close()


def _bare(plan: Plan, world: World) -> Placement:
    """Of weights that stay where they are and are no job's: there is no chunk."""
    place, turn = (plan.mesh.index(axis, world.rank) for axis in ("data", "pipeline"))
    uses = tuple((s,) for s in range(plan.segments))
    kept = Kept(Dtypes(torch.float32, torch.float32, None, torch.float32), ())
    return Placement(Items(Chunks(plan, (), uses, kept, place, turn)))
