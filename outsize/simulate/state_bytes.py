"""Bytes that a plan holds between its actions: by segment, and by tier below the device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from outsize.memory import KINDS
from outsize.memory.chunk import ChunkTable, Slot, is_layer
from outsize.memory.ledger import in_grains
from outsize.plan import DEVICE, FILES, Plan
from outsize.schedule import Kind, Schedule, State
from outsize.schedule.kept import GRADIENTS, MASTER, PARAMETERS
from outsize.schedule.layout import Placement
from outsize.schedule.staying import bytes_below, stays
from outsize.simulate.costs import Costs


def held_of(placement: Placement, grain: int = 1) -> list[dict[str, int]]:
    """By segment, bytes by kind of the states that the device holds throughout. grain: of which
    each takes whole multiples."""
    made: list[dict[str, int]] = [{} for _ in placement.chunks.uses]
    for index, table in enumerate(placement.chunks.tables):
        for what, _ in placement.chunks.held(index):
            if placement.chunks.tier(index, what) == DEVICE:
                kind = what if what in KINDS else "optimizer"
                mine = made[table.segment]
                size = in_grains(placement.chunks.nbytes(index, what), grain)
                mine[kind] = mine.get(kind, 0) + size
    return made


def copied(placement: Placement, frozen: float | None, grain: int = 1) -> int:
    """Bytes of the weights that a worker copies in a step to see how far they move, which are those
    that it updates of all layers but the share that is frozen: at most, of its largest ones."""
    if frozen is None:
        return 0
    chunks, sizes = placement.chunks, list[int]()
    every = sum(len(_layers(table)) for table in chunks.every)
    for index, table in enumerate(chunks.tables):
        wide, (first, last) = dict(chunks.held(index)), chunks.extent(index, MASTER)
        width = wide[MASTER if MASTER in wide else PARAMETERS].itemsize
        for slot in _layers(table):
            numel = min(slot.offset + slot.numel, last) - max(slot.offset, first)
            sizes.append(in_grains(max(0, numel) * width, grain))
    still = int(frozen * every) - (every - len(sizes))  # at least, of those that are here
    return sum(sorted(sizes)[max(0, still) :])


def _layers(table: ChunkTable) -> list[Slot]:
    return [s for s in table.slots if table.trainable and is_layer(s.name, len(s.shape))]


def spilled(schedule: Schedule, costs: Costs) -> dict[int, int]:
    """By stage, the most bytes of its activations that are on their tier at once."""
    now: dict[int, int] = {}
    most: dict[int, int] = {}
    for action in schedule.workers[0]:
        cost = costs.of(action)
        moves = action.kind in (Kind.FETCH, Kind.EVICT) and action.state is State.ACTIVATIONS
        if not moves or cost is None:
            continue
        size, stage = cost.moves, action.stage
        now[stage] = now.get(stage, 0) + (size if action.kind is Kind.EVICT else -size)
        most[stage] = max(most.get(stage, 0), now[stage])
    return most


def below(
    placement: Placement, spilled: Mapping[int, int], segments: Collection[int] = ()
) -> dict[str, int]:
    """By tier below the device, bytes of the states and activations that rest there; by FILES,
    those that stay in the files of the model. segments: those that count; all, where none are
    named."""
    found: dict[str, int] = {}
    for stage, size in spilled.items():
        tier = placement.plan.stages[stage].rest.activations
        found[tier] = found.get(tier, 0) + size
    for index, table in enumerate(placement.chunks.tables):
        counts = not segments or table.segment in segments
        for what, _ in placement.chunks.held(index) if counts else ():
            tier = placement.chunks.tier(index, what)
            if tier != DEVICE and (what != GRADIENTS or placement.leaves(table.segment)):
                size = placement.chunks.nbytes(index, what)
                if what == PARAMETERS and stays(placement.chunks, index):
                    tier, span = FILES, placement.chunks.extent(index, what)
                    size = bytes_below(placement.chunks, index, what, *span)
                found[tier] = found.get(tier, 0) + size
    return found


def segments_of(
    plan: Plan, costs: Costs, held: Sequence[Sequence[Mapping[str, int]]]
) -> tuple[tuple[str, Mapping[str, int]], ...]:
    """By segment, its bytes as a Forecast has them. held: by worker and segment; of several that
    have a segment, the first counts."""
    made = [dict(next(filter(None, kinds), {})) for kinds in zip(*held, strict=True)]
    for (kind, _, stage), cost in costs.actions.items():
        here = made[plan.stages[stage].first]
        if kind in (Kind.SEND, Kind.RECV):
            continue
        if kind.way == "forward":
            kept = cost.allocates.get("activations", 0)
            here["activations"] = here.get("activations", 0) + kept
        here["workspace"] = max(here.get("workspace", 0), cost.workspace)
    return tuple(zip(costs.segments, made, strict=True))
