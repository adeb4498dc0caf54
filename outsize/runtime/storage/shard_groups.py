"""ShardGroups: how a worker's states travel to and from the workers with which it shares them.

All of it runs on the network lane, in the order of the Schedule, so that every worker calls the
same collectives in the same order. Sums go from inner groups to outer ones, each over the shares of
the one before (hierarchical partitioning), and at the end, where they are smallest, over the other
axes whose workers have parts of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outsize.collectives import Collective, Span, World
from outsize.memory import Chunk
from outsize.parallel.messages import Way, code_of
from outsize.parallel.shards import Shards
from outsize.schedule.chunks import Chunks
from outsize.schedule.kept import GRADIENTS, MASTER, PARAMETERS
from outsize.schedule.talk import Groups, Neighbours


class ShardGroups:
    """The groups of one worker."""

    def __init__(self, world: World, chunks: Chunks) -> None:
        self.chunks, self._world = chunks, world
        self.shards: Shards = chunks.shards
        groups = Groups(chunks, world.rank)
        self.gathering = self._group(groups.gathering)
        self.gathers = self._coded(self.gathering[0], "gather")
        self.reducing = self._group(groups.reducing)
        self.outer = self._group(groups.outer)
        self.reduces, self.reduces_outer = (
            self._coded(group, "reduce") for group, _ in (self.reducing, self.outer)
        )
        self.replicas = self._group(groups.replicas)
        self.collecting = self._group(groups.collecting)
        self.collects = self._coded(self.collecting[0], "collect")
        self.whole = self._group(groups.of_data(self.shards.optimizer))
        self.summing = [world.group(groups.summing(t), "network") for t in chunks.tables]
        mine = sorted({chunks.holders(table) for table in chunks.tables if table.trainable})
        several = [turns for turns in mine if len(turns) > 1]
        self.merging = {turns: world.group(groups.of_stages(turns), "merge") for turns in several}

    def _group(self, said: Neighbours) -> tuple[Collective, tuple[int, ...]]:
        """A collective, and its workers' places on the data axis."""
        return self._world.group(said.ranks, "network"), said.places

    def _coded(self, group: Collective, way: Way) -> Collective:
        """The collective as the plan has its messages written."""
        code = code_of(self.chunks.plan, way)
        return group if code is None or group.size == 1 else code.over(group, way)

    def _spans(self, index: int, what: str, places: Sequence[int], base: int = 0) -> list[Span]:
        """What of a chunk's state each worker has, counted from the element `base`."""
        spans = (self.chunks.share(index, what, place) for place in places)
        return [(first - base, last - base) for first, last in spans]

    def gather(self, index: int, mine: Tensor, whole: Tensor) -> None:
        """A chunk's whole parameters from their shards."""
        spans = self._spans(index, PARAMETERS, self.gathering[1])
        exact = self.chunks.tables[index].codes  # bytes are numbers to nobody
        (self.gathering[0] if exact else self.gathers).all_gather(mine, spans, whole)

    def reduce(self, index: int, chunk: Chunk, last: bool) -> None:
        """Sum a chunk's gradients over those that have parts of the sum. last: no more will come
        in this step: what this worker updates has its whole sum then."""
        assert chunk.gradients is not None
        here, (first, end) = chunk.gradients, self.chunks.extent(index, GRADIENTS)
        if self.shards.gradients > 1:
            part = here[first:end]
            spans = self._spans(index, GRADIENTS, self.reducing[1])
            self.reduces.reduce_scatter(here, spans, part)
            # A share that rests below came into the room before, with what was summed until then.
            here = chunk.shards[GRADIENTS].add_(part) if GRADIENTS in chunk.shards else part
        if last:
            self._finish(index, chunk, here, first)

    def _finish(self, index: int, chunk: Chunk, here: Tensor, base: int) -> None:
        """The rest of the sum. here: gradients from the element `base` on."""
        first, end = self.chunks.extent(index, MASTER)
        part = here[first - base : end - base]
        group, places = self.outer
        if group.size > 1:
            spans = self._spans(index, MASTER, places, base)
            self.reduces_outer.reduce_scatter(here, spans, part)
        if self.replicas[0].size > 1:
            self.replicas[0].all_reduce(part)
        if self.summing[index].size > 1:
            self.summing[index].all_reduce(part)

    def merge(self, index: int, gradients: Tensor) -> None:
        """Sum what this worker updates of a chunk over the workers of a pipeline that have it."""
        turns = self.chunks.holders(self.chunks.tables[index])
        if len(turns) > 1:
            self.merging[turns].all_reduce(gradients)

    def collect(self, index: int, chunk: Chunk) -> None:
        """Updated parameters from the workers that updated them."""
        base, _ = self.chunks.extent(index, PARAMETERS)
        first, end = self.chunks.extent(index, MASTER)
        held = chunk.shards.get(PARAMETERS, chunk.parameters)
        mine = held[first - base : end - base]
        self.collects.all_gather(mine, self._spans(index, MASTER, self.collecting[1], base), held)

    def complete(self, index: int, what: str, mine: Tensor) -> Tensor:
        """A whole state of a chunk, where this worker holds a part. Every worker calls it."""
        numel = self.chunks.numel(index, what)
        group, places = self.gathering if what == PARAMETERS else self.whole
        if group.size == 1:
            return mine
        whole = mine.new_empty(numel)
        group.all_gather(mine, self._spans(index, what, places), whole)
        return whole
