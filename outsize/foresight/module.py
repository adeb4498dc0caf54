"""A module of blocks that nobody here wrote, as a planner counts it: what its rehearsals found.

A microbatch of it was played on fake tensors by the runtime itself: operators with their shapes,
the bytes that stay and that are needed meanwhile, what workers of a tensor axis say. Stages of a
pipeline are sums over their own blocks, unlike ones too. Segment 0 is the code before the blocks,
the last one the code behind them and the loss.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from outsize.errors import OutsizeError
from outsize.foresight.layout import Layout, stored
from outsize.foresight.links import seconds
from outsize.foresight.resting import RESIDENT, ROOM, room
from outsize.plan.spread import share

if TYPE_CHECKING:  # which has torch, as a shape by name has not
    from outsize.foresight.work import Lanes, Work
    from outsize.simulate.costs import ActionCost

DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "bf16"}  # as a source calls them
CAST = 5.0  # bytes of an element that enters a product in 8 bits or fewer: read, written twice


@dataclass(frozen=True)
class Played:
    """One microbatch, by segment. again: what is computed again before a backward pass; sums:
    collectives of the tensor axis in a forward pass; data: bytes of the batch."""

    forward: Sequence[ActionCost]
    again: Sequence[ActionCost]
    backward: Sequence[ActionCost]
    sums: Sequence[int]
    data: int


@dataclass(frozen=True, eq=False)
class Module:
    """blocks: how many. rehearsed: of so many rows and workers of the tensor axis, with every
    block's activations kept or computed again. parameters: by segment those that are trained and
    those that are frozen, on one of so many workers of the tensor axis. uses: segments whose
    parameters a segment reads. crossing: bytes of a row that go on behind each segment. left: why
    an axis is not taken, by its name. note: what was assumed of the module; digest: of its
    parameters, as plan files have it; tensors: how many these are. native: a decoder of this
    package with frozen parts, whose segments are gathered in turn; buffers: that parameters of a
    segment lie in, beside one of those that are trained and one of those that are frozen."""

    name: str
    blocks: int
    rehearsed: Callable[[int, int, bool], Played]
    parameters: Callable[[int], Sequence[tuple[int, int]]]
    uses: Sequence[Sequence[int]]
    crossing: Sequence[int]
    left: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    digest: str = ""
    tensors: int = 0
    native: bool = False
    buffers: int = 0

    # -- a worker ----------------------------------------------------------------------------------

    def segments(self, lay: Layout, place: int) -> list[tuple[int, bool]]:
        """Those of a place on the pipeline axis, and whether each is computed again."""
        found, first, left = ([(0, False)] if place == 0 else []), 1, lay.whole
        for chunk, count in enumerate(blocks_of(self.blocks, lay)):
            if chunk % lay.pipeline == place:
                taken = count if lay.recompute == "full" else min(count, left)
                left -= taken
                found += [(i, i < first + taken) for i in range(first, first + count)]
            first += count
        return [*found, (self.blocks + 1, False)] if place == lay.pipeline - 1 else found

    def held(self, lay: Layout, place: int) -> tuple[int, int]:
        """Parameters of a place that are trained, and that are frozen."""
        sizes, mine = self.parameters(lay.tensor), {i for i, _ in self.segments(lay, place)}
        if lay.pipeline > 1:
            mine |= {used for i in mine for used in self.uses[i]}
        return sum(sizes[i][0] for i in mine), sum(sizes[i][1] for i in mine)

    def most(self, lay: Layout) -> tuple[int, int]:
        """The same of the place with most of them."""
        return max((self.held(lay, place) for place in range(lay.pipeline)), key=sum)

    def largest(self, lay: Layout) -> tuple[int, int, int]:
        """Parameters of the largest block, and of what lies before and behind the blocks."""
        sizes = [sum(each) for each in self.parameters(lay.tensor)]
        return max(sizes[1:-1]), sizes[0], sizes[-1]

    def gathered(self, lay: Layout) -> int:
        """Bytes of weights, and of gradients of those that are trained, that are whole for a while
        where workers cut them: of two segments at once, or of two blocks and all around them, whose
        code may read its own at any time."""
        parts = self.parameters(lay.tensor)
        weights = [sum(room(stored(lay) * n) for n in each) + self.buffers * ROOM for each in parts]
        gradients = [room(lay.stack.gradients * own) for own, _ in parts]
        found = 0
        for first, *blocks, last in (weights, gradients):
            if self.native:
                found += max(map(sum, pairwise((first, *blocks, last))))
            else:
                found += RESIDENT * max(blocks) + first + last
        return found

    def activations(self, lay: Layout, place: int) -> tuple[list[int], int]:
        """Bytes that a microbatch leaves for its backward pass in each of a worker's chunks, and
        those beyond while it is computed."""
        mine = self.segments(lay, place)
        cost = {again: self.rehearsed(lay.rows, lay.tensor, again) for _, again in mine}
        kept = [0] * lay.chunks
        kept[0] = cost[mine[0][1]].data
        if place:  # what comes, and what the code around the blocks makes of the batch
            plain = self.rehearsed(lay.rows, lay.tensor, False)
            kept[0] += self.crossing[mine[0][0] - 1] * lay.rows + _left(plain.forward[0])
        peak = sum(kept)
        chunk_of = self._chunks(lay)
        for segment, again in mine:
            each = cost[again].forward[segment]
            peak = max(peak, sum(kept) + each.workspace)
            kept[chunk_of(segment)] += _left(each)
        now = sum(kept)
        if lay.pipeline > 1:  # the gradient that comes, and the one that goes
            ends = (mine[0][0] - 1 if place else None, mine[-1][0])
            now += sum(self.crossing[i] * lay.rows for i in ends if i is not None)
        for segment, again in reversed(mine):
            for each in (cost[again].again[segment], cost[again].backward[segment]):
                peak, now = max(peak, now + each.workspace), now + _left(each)
        if lay.pipeline == 1:  # its loss stays to the end of the step
            peak += (now - cost[mine[0][1]].data) * (lay.microbatches - 1)
        return kept, max(0, peak - sum(kept))

    def _chunks(self, lay: Layout) -> Callable[[int], int]:
        """Which of its worker's chunks a segment is in."""
        ends = [*accumulate(blocks_of(self.blocks, lay))]
        return lambda segment: min(bisect_left(ends, segment), len(ends) - 1) // lay.pipeline

    def crossed(self, lay: Layout, place: int, live: float) -> int:
        """Bytes beside these that a pipeline asks for: a number for each parameter of others, and
        what is on its way over borders. What is sent stays until LIMIT more of its kind are, what
        comes is taken in while the one before is computed. live: microbatches under way, whose
        outputs are counted."""
        from outsize.collectives.channel import LIMIT

        if lay.pipeline == 1:
            return 0
        absent = self.tensors * stored(lay)
        if lay.microbatches == 1:
            return absent
        mine = {i for i, _ in self.segments(lay, place)}
        ahead = [self.crossing[i - 1] for i in mine if i - 1 not in mine and i]
        behind = [self.crossing[i] for i in mine if i + 1 not in mine and i <= self.blocks]
        gradients = min(lay.microbatches - 1, LIMIT)
        outputs = 1 + max(0, min(lay.microbatches, LIMIT + 1) - int(live))
        most = gradients * max(ahead, default=0) + outputs * max(behind, default=0)
        return absent + lay.rows * most

    def batch(self, lay: Layout) -> int:
        """Bytes of a worker's rows of a step, whole microbatches."""
        return self.rehearsed(lay.rows, lay.tensor, False).data * lay.microbatches

    def lanes(self, work: Work) -> tuple[Lanes, Lanes]:
        """Of a microbatch on the busiest stage before the last, and on the last."""
        every = [_stage(self, work, place) for place in range(work.layout.pipeline)]
        return max(every[:-1] or every, key=_computing), every[-1]

    def flops(self, lay: Layout) -> float:
        """Operations of a step in products and attention, nothing computed again."""
        one = self.rehearsed(lay.rows, 1, False)
        every = [cost.work for cost in (*one.forward, *one.backward)]
        apart = 1 - lay.attended / lay.sequence  # scores of other documents
        each = sum(done.flops() - apart * sum(done.attention.values()) for done in every)
        return each * lay.batch / lay.rows

    def sent(self, lay: Layout) -> float:
        """Bytes of a microbatch over the widest border of two stages."""
        ends = [self.segments(lay, place)[-1][0] for place in range(lay.pipeline - 1)]
        return float(max(self.crossing[i] for i in ends) * lay.rows)


def blocks_of(layers: int, lay: Layout) -> tuple[int, ...]:
    """Blocks of each chunk of the pipeline, in order: equal as they can be; where the ends count
    as blocks (outsize/foresight/step.py, layers_of), the first and the last have one less."""
    parts = lay.pipeline * lay.chunks
    if parts > 1 and layers % parts and not (layers + 2) % parts:
        each = (layers + 2) // parts
        return (each - 1, *[each] * (parts - 2), each - 1)
    spans = [share(layers, parts, i) for i in range(parts)]
    return tuple(stop - start for start, stop in spans)


def most_live(lay: Layout, place: int, kept: Sequence[int], live: float) -> float:
    """The most bytes that microbatches keep on a worker at once, of which each has so many in each
    of its chunks. live: of one chunk, how many these are; interleaved chunks take turns, as many
    microbatches of each as there are stages (outsize/schedule/pipelines/interleaved.py)."""
    p, v, m = lay.pipeline, lay.chunks, lay.microbatches
    if v == 1:
        return live * kept[0]

    def through(turns: int, chunk: int) -> int:
        rounds, more = divmod(turns, p * v)
        return min(m, rounds * p + min(p, max(0, more - chunk * p)))

    ahead = 2 * (p - 1 - place) + (v - 1) * p + 1  # turns forward before the first one back
    steady = min(p * v, max(0, -(-m // p) * p * v - ahead))
    return max(
        sum(n * (through(ahead + k, c) - through(k, v - 1 - c)) for c, n in enumerate(kept))
        for k in range(steady + 1)
    )


def _left(cost: ActionCost) -> int:
    return sum(cost.allocates.values())


# -- seconds ---------------------------------------------------------------------------------------


def _computing(stage: Mapping[str, float]) -> float:
    return sum(value for lane, value in stage.items() if lane != "launch")


def _stage(module: Module, work: Work, place: int) -> Lanes:
    lay = work.layout
    alike: dict[tuple[int, int, bool], list[ActionCost]] = {}
    for segment, again in module.segments(lay, place):
        played = module.rehearsed(lay.rows, lay.tensor, again)
        inside = 0 < segment <= module.blocks
        for cost in (played.forward[segment], played.again[segment], played.backward[segment]):
            alike.setdefault((id(cost), played.sums[segment], inside), []).append(cost)
    found = work.none()
    for (_, sums, inside), costs in alike.items():
        for lane, value in _lanes(work, costs[0], inside, sums).items():
            found[lane] += value * len(costs)
    return found


def _lanes(work: Work, cost: ActionCost, inside: bool, sums: int) -> Lanes:
    """What an action does. inside: a block, whose products are in fewer bits where that is asked;
    sums: collectives of a forward pass, as many as a backward pass has."""
    lay, done, found = work.layout, cost.work, work.none()
    for (m, k, n, dtype), times in done.products.items():
        narrow = lay.narrow and inside and dtype == "bfloat16"
        lane = "narrow" if narrow else "matmul"
        found[lane] += times * _product(work, (m, n, k), lay.precision if narrow else dtype)
        if narrow:
            found["cast"] += times * work.source.traffic(CAST / 3 * (m * k + k * n + m * n)).seconds
    for (direction, _), operations in done.attention.items():
        size = done.widest
        back = direction == "backward"
        if lay.seen:
            operations, size = operations * lay.seen / lay.sequence, (lay.seen, size[1])
        found["attention"] += work.source.attention(operations, size, lay.attention, back).seconds
    found["traffic"] += work.source.traffic(done.moved).seconds
    work.launch(found, done.calls)
    t = lay.tensor
    for said in cost.said:
        if said.axis == "tensor":  # each has 2 (t - 1) / t of the bytes from the others
            whole = said.bytes * t / (2 * (t - 1))
            found["tensor"] += seconds("all_reduce", whole, work.tensor, work.machines, sums)
    return found


def _product(work: Work, size: tuple[int, int, int], dtype: str) -> float:
    """float32 inside a run of 16 bits has its own rate where the device says one."""
    name = DTYPES.get(dtype, dtype)
    wide = work.layout.precision if not work.layout.narrow else "bf16"
    if name == "bf16":
        return work.source.product(*size, wide).seconds
    try:
        return work.source.product(*size, name).seconds
    except OutsizeError:
        return work.source.product(*size, wide).seconds
