"""Where states rest: how many blocks' optimizer states, gradients and parameters lie below, and on
which tier; what that holds on the device and what it moves.

Graded, never all or nothing. Each kind goes below for the first n segments, the kind that moves the
fewest bytes for each byte saved first: optimizer states and gradients are read and written once a
step, parameters are read twice at least. Estimates here only narrow the choice; what is chosen is
forecast exactly (outsize/simulate).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

from outsize.memory.store import rounded
from outsize.memory.tiers import TierSpec
from outsize.plan import DEVICE, DISK, Plan, Rest
from outsize.plan.plan import PART
from outsize.schedule.kept import GRADIENTS, MASTER, PARAMETERS
from outsize.schedule.layout import Placement
from outsize.schedule.staying import may_stay
from outsize.simulate.costs import Facts
from outsize.simulate.rehearse import stacked

OPTIMIZER, ACTIVATIONS = "optimizer", "activations"
APART = (OPTIMIZER, GRADIENTS, PARAMETERS)
BEHIND = (GRADIENTS, OPTIMIZER, PARAMETERS)  # gradients that are used at once never leave the pool
# What takes the first tier that has room: what moves most bytes for each byte held; or what moves
# while nothing is computed, which is the updates.
NEAR_FIRST = (ACTIVATIONS, PARAMETERS, GRADIENTS, OPTIMIZER)
UPDATES_FIRST = (OPTIMIZER, GRADIENTS, PARAMETERS, ACTIVATIONS)

Below = Mapping[str, frozenset[int]]  # by kind, the segments whose state of that kind rests below


@dataclass(frozen=True)
class States:
    """Bytes of a model's states by kind and segment, as a plan's precision holds them; of what the
    data axis cuts, this worker's shares.

    chunks: by segment, of each of its chunks the elements, the bytes of optimizer states, and the
    elements that are updated together at least. own: the parameters are their own master copy, so
    an update reads them. shared: by kind and segment, bytes that are put together in the pool of
    what workers have shares of; of other kinds none. places: by segment, runs of optimizer states
    that begin a page each on a tier, where parts of an update do not. lying: by segment, bytes of
    parameters that take nothing of a disk, since they stay in the files of their model.
    """

    bytes: Mapping[str, tuple[int, ...]]
    chunks: tuple[tuple[tuple[int, int, int], ...], ...]
    uses: tuple[tuple[int, ...], ...]
    own: bool
    shared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    places: Mapping[int, int] = field(default_factory=dict)
    lying: Mapping[int, int] = field(default_factory=dict)

    @property
    def segments(self) -> int:
        return len(self.uses)

    @cached_property
    def total(self) -> int:
        """Bytes of all of them."""
        return sum(map(sum, self.bytes.values()))

    def of(self, below: Below) -> int:
        """Bytes that rest below."""
        return sum(self.bytes[kind][i] for kind, segments in below.items() for i in segments)


def states(facts: Facts, plan: Plan) -> States:
    """Those of a model under a plan's precision, whichever workers of a pipeline have them; each
    segment is a stage."""
    return states_of(facts.placement(stacked(plan)))


def states_of(placement: Placement) -> States:
    """Those of the chunks that are placed; other segments have none."""
    count, whole = placement.plan.segments, placement.chunks.shards
    held = {kind: [0] * count for kind in APART}
    degrees = {PARAMETERS: whole.parameters, GRADIENTS: whole.gradients}
    shared = {kind: [0] * count for kind, degree in degrees.items() if degree > 1}
    chunks: list[list[tuple[int, int, int]]] = [[] for _ in range(count)]
    places: dict[int, int] = {}
    lying: dict[int, int] = {}
    for index, table in enumerate(placement.chunks.tables):
        mine = 0
        runs = -(-table.numel // PART) * sum(
            not s.shaped for s in placement.chunks.kept.specs(table)
        )
        places[table.segment] = places.get(table.segment, 0) + runs
        for what, dtype in placement.chunks.held(index):
            kind = what if what in (PARAMETERS, GRADIENTS) else OPTIMIZER
            size = placement.chunks.nbytes(index, what)
            held[kind][table.segment] += size
            if kind == PARAMETERS and may_stay(placement.chunks, index):
                lying[table.segment] = lying.get(table.segment, 0) + size
            mine += size if kind == OPTIMIZER else 0
            if kind in shared:
                shared[kind][table.segment] += table.numel * dtype.itemsize
        if mine:
            span = placement.chunks.extent(index, MASTER)
            least = (
                max(b - a for a, b in pairwise(table.cuts(PART, PART, span)))
                if table.grain != 1
                else 1
            )
            chunks[table.segment].append((span[1] - span[0], mine, least))
    own = placement.plan.precision.master is None
    sizes, pooled = ({k: tuple(v) for k, v in by.items()} for by in (held, shared))
    return States(
        sizes, tuple(map(tuple, chunks)), placement.chunks.uses, own, pooled, places, lying
    )


def in_order(mine: Iterable[int], count: int) -> tuple[int, ...]:
    """Some of so many segments in the order in which their states go below."""
    found = set(mine)
    order = (*range(1, count - 1), 0, count - 1) if count > 1 else (0,)
    return tuple(i for i in order if i in found)


def graded(order: Sequence[int], level: int, kinds: Sequence[str]) -> Below:
    """Level 0: all on the device. Each level more puts one segment's state below, in this order: of
    the first kind, then of the next. Of kinds that are not said nothing rests below."""
    count = len(order)
    made = {
        kind: frozenset(order[: max(0, min(count, level - place * count))])
        for place, kind in enumerate(kinds)
    }
    return dict.fromkeys(APART, frozenset[int]()) | made


class OnTiers(NamedTuple):
    """rests: by segment, where its states rest. activations: the tier of those that are spilled.
    short: bytes by which the last tier is too small; 0 or less where all have room."""

    rests: tuple[Rest, ...]
    activations: str
    short: int


def placed(
    states: States,
    below: Below,
    spilled: int,
    tiers: Sequence[TierSpec],
    order: Sequence[str] = NEAR_FIRST,
) -> OnTiers:
    """What rests below on tiers: each kind in its turn takes the first one that still has room, and
    the last where none has."""
    free = {tier.name: tier.bytes for tier in tiers}
    where = {(kind, i): DEVICE for kind in APART for i in range(states.segments)}
    activations = DEVICE
    for kind in order:
        if kind == ACTIVATIONS:
            activations = _take(free, *(spilled for _ in tiers)) if spilled else DEVICE
            continue
        for i in sorted(below[kind]):
            where[kind, i] = _take(free, *(on_tier(states, kind, i, t.name) for t in tiers))
    rests = (
        Rest(*(where[kind, i] for kind in (PARAMETERS, GRADIENTS, OPTIMIZER)))
        for i in range(states.segments)
    )
    return OnTiers(tuple(rests), activations, -free[tiers[-1].name])


def _take(free: dict[str, int], *sizes: int) -> str:
    """sizes: on each of the tiers."""
    needs = dict(zip(free, sizes, strict=True))
    name = next((name for name in free if needs[name] <= free[name]), [*free][-1])
    free[name] -= needs[name]
    return name


def on_tier(states: States, kind: str, segment: int, tier: str) -> int:
    """Bytes of a state on a tier, where each of its tensors begins a page."""
    lying = states.lying.get(segment, 0) if (kind, tier) == (PARAMETERS, DISK) else 0
    pages = 4 * max(1, len(states.chunks[segment])) + states.places.get(segment, 0)
    return rounded(states.bytes[kind][segment] - lying) + pages * rounded(1)


# -- the pool -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passing:
    """How states that rest below pass through the pool, as far as its size depends on it."""

    resident: int = 2
    part: int = 1 << 22
    behind: bool = False


def pool_bytes(states: States, below: Below, passing: Passing) -> int:
    """The fullest window of `resident` visits: about the least pool that a plan can have."""
    runs = [visit for visit in _visits(states, below, passing) if visit]
    ahead = [*runs, *runs[: passing.resident - 1]]
    most = 0
    for start in range(len(runs)):
        window: dict[str, int] = {}
        for visit in ahead[start : start + passing.resident]:
            window |= visit
        most = max(most, sum(map(rounded, window.values())))
    return most


def _visits(states: States, below: Below, passing: Passing) -> Iterator[dict[str, int]]:
    """Bytes by item of what is needed together, in the order of a step of one microbatch."""
    last = states.segments - 1
    for i in range(last):
        yield _needed(states, below, i, (PARAMETERS,))
    for i in range(last, -1, -1):
        yield _needed(states, below, i, (PARAMETERS, GRADIENTS))
        if passing.behind:
            yield from _updates(states, below, i, passing)
    if not passing.behind:
        yield from chain.from_iterable(_updates(states, below, i, passing) for i in range(last + 1))


def _needed(states: States, below: Below, segment: int, kinds: Sequence[str]) -> dict[str, int]:
    uses = dict.fromkeys((segment, *states.uses[segment]))
    return {
        f"{kind} {i}": states.shared.get(kind, states.bytes[kind])[i]
        for kind in kinds
        for i in uses
        if kind in states.shared or i in below[kind]
    }


def _updates(
    states: States, below: Below, segment: int, passing: Passing
) -> Iterator[dict[str, int]]:
    """Visits of a segment's update; of its parts, which are alike, as many as a window may hold."""
    both = {
        f"{kind} {segment}": states.bytes[kind][segment]
        for kind in (PARAMETERS, GRADIENTS)
        if segment in below[kind] and kind not in states.shared
    }
    if segment not in below[OPTIMIZER] or not states.chunks[segment]:
        yield both
        return
    for chunk, (numel, size, least) in enumerate(states.chunks[segment]):
        step = min(numel, max(passing.part, least))
        taken = size + sum(
            states.bytes[kind][segment] * numel // _numel(states, segment)
            for kind in (PARAMETERS, GRADIENTS)
            if segment in below[kind] and (not passing.behind or kind in states.shared)
        )
        for part in range(min(-(-numel // step), passing.resident + 1)):
            share = min(step, numel - part * step)
            name = f"optimizer {segment}#{chunk}.{part}"
            yield {name: taken * share // numel} | (both if passing.behind else {})


def _numel(states: States, segment: int) -> int:
    return sum(numel for numel, *_ in states.chunks[segment])


# -- what moves -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moved:
    """Bytes of a step by tier: read and written during the passes, and during the updates."""

    passes: tuple[Mapping[str, int], Mapping[str, int]]
    updates: tuple[Mapping[str, int], Mapping[str, int]]


def moved(states: States, rests: Sequence[Rest], behind: bool, rounds: int) -> Moved:
    """What a step moves where nothing stays in the pool. rounds: times that the passes go through
    the model: 1 in layer order, else the number of microbatches."""
    books: list[dict[str, int]] = [{}, {}, {}, {}]  # read, written; the same of the updates

    def add(book: int, tier: str, size: int) -> None:
        if tier != DEVICE:
            books[book][tier] = books[book].get(tier, 0) + size

    late = 0 if behind else 2
    for i, rest in enumerate(rests):
        parameters, gradients, optimizer = (
            states.bytes[kind][i] for kind in (PARAMETERS, GRADIENTS, OPTIMIZER)
        )
        add(0, rest.parameters, 2 * rounds * parameters)
        if gradients:  # frozen parameters are not updated
            add(late + 1, rest.parameters, parameters)
            if states.own and not behind:
                add(2, rest.parameters, parameters)
        add(0, rest.gradients, (rounds - 1) * gradients)
        add(1, rest.gradients, (rounds - behind) * gradients)
        if not behind:
            add(2, rest.gradients, gradients)
        add(late, rest.optimizer, optimizer)
        add(late + 1, rest.optimizer, optimizer)
    return Moved((books[0], books[1]), (books[2], books[3]))
