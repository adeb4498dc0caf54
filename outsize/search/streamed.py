"""Choosing a plan where states may rest below the device: how each candidate is computed, in which
order, and how many segments' states lie below, are weighed together.

Every way of computing is forecast once with all states on the device. What it holds beyond its
states is then known exactly, and how far down its states must go follows by bisection; rates of
the tiers estimate its time. The quickest few are forecast exactly, and the quickest of these that
fits is taken.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from outsize.errors import OutsizeError
from outsize.hardware import Hardware
from outsize.memory import format_bytes
from outsize.memory.tiers import TierSpec
from outsize.plan import DEVICE, Plan, Rest
from outsize.plan.plan import PART
from outsize.runtime.placement import GRADIENTS, PARAMETERS
from outsize.schedule import Kind
from outsize.search.tiers import (
    APART,
    BEHIND,
    OPTIMIZER,
    Passing,
    States,
    every,
    graded,
    levels,
    moved,
    placed,
    pool_bytes,
    shortage,
    states,
    with_rests,
)
from outsize.search.wish import Wish
from outsize.simulate import Forecast
from outsize.simulate.forecast import compose, host_share, rate
from outsize.simulate.rehearse import Costs, Facts

EXACT = 3  # candidates that are forecast exactly
TRIES = 4  # a plan that misses the budget by what an estimate could not know is tried again
WIDE = (2, 4, 8)  # parts of a stage's update in the pool at once that are tried
DEEP = (3, 4)  # stages in the pool at once that are tried once a plan is found, beside two
WORTH = 0.99  # of the time: what is quicker by less is not worth another plan
PAGE = 4096
# How states pass, from what is quickest to what holds least: without a stage ahead nothing hides.
PASSINGS = (Passing(), Passing(2, PART), Passing(1, PART))


class Foretells(Protocol):
    """What is asked for forecasts: a native decoder's `Oracle`, or rehearsals of a module."""

    @property
    def wish(self) -> Wish: ...

    @property
    def hardware(self) -> Hardware: ...

    @property
    def facts(self) -> Facts: ...

    def costs(self, plan: Plan) -> list[Costs]:
        """Of a plan's actions, for each layout of a batch."""

    def forecast(self, plan: Plan) -> Forecast:
        """With the costliest of the layouts."""


@dataclass(frozen=True)
class Way:
    """How a step is computed, whatever its states do.

    plan: its states on the device, stages that spill marked. dynamic: bytes beyond states, at
    most. seconds, updates: of the passes and of the updates. spilled: bytes of activations on
    their tier. layout: which of the wish's layouts holds most.
    """

    plan: Plan
    dynamic: int
    seconds: float
    updates: float
    spilled: int
    layout: int

    @property
    def behind(self) -> bool:
        return self.plan.update == "behind"

    @property
    def kinds(self) -> tuple[str, ...]:
        return BEHIND if self.behind else APART


@dataclass(frozen=True)
class Choice:
    """A way with the tiers of its states. seconds: as estimated."""

    way: Way
    level: int
    passing: Passing
    rests: tuple[Rest, ...]
    spill: str
    seconds: float


def choose_streamed(oracle: Foretells, plans: Sequence[Plan]) -> Forecast:
    """The quickest of the plans with states below that fits wish.budget.

    Raises OutsizeError where none does, with the missing bytes and the nearest budget that works,
    or the bytes that are missing on the tiers.
    """
    assert oracle.wish.budget is not None
    sizes = states(oracle.facts, plans[0])
    search = Search(oracle, sizes, oracle.wish.budget, oracle.wish.tiers)
    found: list[Choice] = []
    ways: list[Way] = []
    for plan in plans:
        mine = [search.way(variant) for variant in _variants(oracle, plan)]
        ways += mine
        best = min((choice.seconds for choice in found), default=float("inf"))
        if min(way.seconds + way.updates for way in mine) > best:
            break  # what follows takes longer still
        found += [choice for way in mine if (choice := search.fitted(way)) is not None]
    made = search.quickest(found)
    return search.least(ways) if made is None else made


def _variants(oracle: Foretells, plan: Plan) -> Iterator[Plan]:
    """A candidate in each order, with updates apart or behind, its activations here or below."""
    wish = oracle.wish
    orders: tuple[Literal["layer", "microbatch"], ...]
    orders = ("layer", "microbatch") if plan.microbatches > 1 else ("layer",)
    orders = orders if wish.order is None else (wish.order,)
    whole = [stage.whole for stage in plan.stages[1:-1]]
    spills = (False, True) if all(whole) or not any(whole) else (False,)
    for order in orders:
        for spill in spills:
            made = replace(plan, order=order)
            if spill:
                made = spilling(made, wish.tiers[0].name)
            if wish.clip is None:
                yield replace(made, update="behind")
            if wish.clip is not None or any(tier.medium == "memory" for tier in wish.tiers):
                yield made


def spilling(plan: Plan, tier: str) -> Plan:
    """The plan with the activations of all its stages on a tier."""
    stages = (replace(stage, rest=Rest(activations=tier)) for stage in plan.stages)
    return replace(plan, stages=tuple(stages))


def _beside(computing: float, moving: float, ahead: bool) -> float:
    """Seconds of both: at once, or one after the other where nothing is fetched ahead."""
    return max(computing, moving) if ahead else computing + moving


class Search:
    """One search: the model's states, the bytes of the device and of the tiers."""

    def __init__(
        self, oracle: Foretells, sizes: States, budget: int, tiers: Sequence[TierSpec]
    ) -> None:
        self.oracle, self.sizes = oracle, sizes
        self.budget, self.tiers = budget, tiers
        self.short: int | None = None  # fewest bytes that were missing on the tiers

    def way(self, plan: Plan) -> Way:
        """What a plan's computation holds and takes."""
        hardware = self.oracle.hardware
        made = [compose(plan, costs, hardware) for costs in self.oracle.costs(plan)]
        layout = max(range(len(made)), key=lambda i: made[i].peak)
        top = made[layout]
        passes = updates = 0.0
        for event in top.trace.events:
            if event.lane == "compute":
                took = event.end - event.start
                updates += took if event.kind == Kind.UPDATE else 0.0
                passes += 0.0 if event.kind == Kind.UPDATE else took
        resident = sum(top.static.values()) - top.static.get("data", 0)
        spilled = sum(top.below.values())  # nothing else is below yet
        return Way(plan, top.peak - resident, passes, updates, spilled, layout)

    # -- estimates ----------------------------------------------------------------------------

    def held(self, way: Way, level: int, passing: Passing) -> int:
        """About the peak at a level."""
        below = graded(self.sizes.segments, level, way.kinds)
        pool = pool_bytes(self.sizes, below, passing)
        return way.dynamic + self.sizes.total - self.sizes.of(below) + pool

    def fitted(self, way: Way, budget: int | None = None) -> Choice | None:
        """The way with as little below as the budget allows; None where that is too much."""
        for passing in (replace(one, behind=way.behind) for one in PASSINGS):
            found = self.down(way, passing, budget)
            if found is not None:
                return found
        return None

    def down(self, way: Way, passing: Passing, budget: int | None = None) -> Choice | None:
        """The same with a given passing."""
        budget = self.budget if budget is None else budget
        top = levels(self.sizes.segments)
        if self.held(way, top, passing) > budget:
            return None
        level = bisect_left(range(top), True, key=lambda n: self.held(way, n, passing) <= budget)
        return self.choice(way, level, passing)

    def choice(self, way: Way, level: int, passing: Passing) -> Choice | None:
        """A way at a level, None where the tiers are too small."""
        below = graded(self.sizes.segments, level, way.kinds)
        found = placed(self.sizes, below, way.spilled, self.tiers)
        if found is None:
            missing = shortage(self.sizes, below, way.spilled, self.tiers)
            self.short = missing if self.short is None else min(missing, self.short)
            return None
        rests, spill = found
        seconds = self.seconds(way, rests, spill, passing.resident > 1)
        return Choice(way, level, passing, rests, spill, seconds)

    def seconds(self, way: Way, rests: Sequence[Rest], spill: str, ahead: bool) -> float:
        """About a step's time: what the passes and the updates compute, or move if that is more;
        both where nothing is fetched ahead."""
        rounds = 1 if way.plan.order == "layer" else way.plan.microbatches
        traffic = moved(self.sizes, rests, way.behind, rounds)
        passes, updates = (
            max((size / rate(self.oracle.hardware, tier, fetch)
                 for fetch, book in zip((True, False), phase, strict=True)
                 for tier, size in book.items()), default=0.0)
            for phase in (traffic.passes, traffic.updates)
        )  # fmt: skip
        if spill != DEVICE:
            passes += way.spilled / rate(self.oracle.hardware, spill, True)
        if way.behind:
            return _beside(way.seconds + way.updates, passes, ahead)
        return _beside(way.seconds, passes, ahead) + _beside(way.updates, updates, ahead)

    # -- exact --------------------------------------------------------------------------------

    def quickest(self, found: Sequence[Choice]) -> Forecast | None:
        """The quickest of the most promising choices that fits, forecast exactly."""
        best: Forecast | None = None
        taken: Choice | None = None
        for tried, choice in enumerate(sorted(found, key=lambda choice: choice.seconds)):
            # An estimate is about what nothing is quicker than.
            if best is not None and (tried >= EXACT or choice.seconds >= best.seconds):
                break
            made = self.fitting(choice)
            if made is not None and (best is None or made.seconds < WORTH * best.seconds):
                best, taken = made, choice
        if best is None or taken is None:
            return None
        best = self.wider(self.deeper(best, taken.way), taken.way)
        best = self.settled(best, taken.way)
        return self.oracle.forecast(best.plan)

    def fitting(self, choice: Choice) -> Forecast | None:
        """The choice forecast; with more below where an estimate was too low."""
        goal, tried = self.budget, choice
        for _ in range(TRIES):
            made = self.compose(self.plan(tried), tried.way)
            if made.peak <= self.budget:
                return made
            goal -= made.peak - self.budget
            again = self.down(choice.way, choice.passing, goal)
            while again is not None and again.level == tried.level:
                goal -= self.budget - goal
                again = self.down(choice.way, choice.passing, goal)
            if again is None:
                return None
            tried = again
        return None

    def plan(self, choice: Choice, pool: int | None = None) -> Plan:
        """The plan of a choice, with a pool of all that is left, or of `pool` bytes."""
        way, passing = choice.way, choice.passing
        below = graded(self.sizes.segments, choice.level, way.kinds)
        if pool is None:
            left = self.budget - (way.dynamic + self.sizes.total - self.sizes.of(below))
            # A room for everything is enough; nothing streams where nothing is below.
            pool = max(0, min(left, 2 * self.sizes.total)) if choice.level else 0
        stream = replace(way.plan.stream, resident=passing.resident, part=passing.part, pool=pool)
        stream = replace(stream, host=self.share(choice))
        made = replace(way.plan, stream=stream, budget=self.oracle.wish.budget)
        alone = not choice.level and choice.spill == DEVICE and made.microbatches == 1
        if alone and self.oracle.wish.order is None:
            made = replace(made, order="microbatch")
        return with_rests(made, choice.rests, choice.spill)

    def share(self, choice: Choice) -> int:
        """`stream.host`, by the rates of the device and of the host."""
        memories, way = self.oracle.facts.host, choice.way
        mine = [r for r in choice.rests if {r.optimizer, r.gradients} <= memories]
        if way.behind or not mine:
            return 0
        hardware, sizes = self.oracle.hardware, self.sizes
        tier = mine[0].optimizer
        gradients, optimizer = sum(sizes.bytes[GRADIENTS]), sum(sizes.bytes[OPTIMIZER])
        weights = sum(
            p for p, g in zip(sizes.bytes[PARAMETERS], sizes.bytes[GRADIENTS], strict=True) if g
        )
        come = gradients + optimizer + (weights if sizes.own else 0)
        over = max(
            come / rate(hardware, tier, True),
            (optimizer + weights) / rate(hardware, tier, False),
            way.updates,
        )
        resting = way.updates * host_share(hardware) + weights / rate(hardware, tier, True)
        return every(over, resting)

    def compose(self, plan: Plan, way: Way) -> Forecast:
        """With the costliest layout of the way; where the pool is too small, the least there is."""
        costs = self.oracle.costs(plan)[way.layout]
        try:
            return compose(plan, costs, self.oracle.hardware)
        except OutsizeError:
            if not plan.stream.pool:
                raise
        return compose(replace(plan, stream=replace(plan.stream, pool=0)), costs,
                       self.oracle.hardware)  # fmt: skip

    def deeper(self, best: Forecast, way: Way) -> Forecast:
        """With more stages in the pool at once, where that is quicker: more overlaps, for more that
        rests below."""
        for resident in DEEP:
            if best.plan.stream.resident < 2 or not best.below:
                break
            choice = self.down(way, replace(PASSINGS[0], resident=resident, behind=way.behind))
            made = None if choice is None else self.fitting(choice)
            if made is None or made.seconds >= WORTH * best.seconds:
                break
            best = made
        return best

    def wider(self, best: Forecast, way: Way) -> Forecast:
        """With more parts of an update in the pool at once, where there is room and it is quicker:
        disk and updates no longer take turns."""
        for parts in WIDE:
            if not best.below:
                break
            plan = replace(best.plan, stream=replace(best.plan.stream, parts=parts))
            made = self.compose(plan, way)
            if made.peak > self.budget or made.seconds >= WORTH * best.seconds:
                break
            best = made
        return best

    def settled(self, best: Forecast, way: Way) -> Forecast:
        """Without updates at rest where few parts, or lanes that wait, make them slower."""
        if not best.plan.stream.host:
            return best
        plan = replace(best.plan, stream=replace(best.plan.stream, host=0))
        alone = self.compose(plan, way)
        return alone if alone.peak <= self.budget and alone.seconds < best.seconds else best

    # -- what cannot work ---------------------------------------------------------------------

    def least(self, ways: Sequence[Way]) -> Forecast:
        """The plan that needs the least of all, if that fits. OutsizeError with what is missing."""
        tight, most = PASSINGS[-1], levels(self.sizes.segments)

        def peak(way: Way) -> int:
            return self.held(way, most, replace(tight, behind=way.behind))

        found: list[Forecast] = []
        for way in sorted(ways, key=peak)[:2]:
            choice = self.choice(way, most, replace(tight, behind=way.behind))
            if choice is not None:
                found.append(self.oracle.forecast(self.plan(choice, pool=0)))
        if not found:
            raise self._tiers_short()
        smallest = min(found, key=lambda made: made.peak)
        if smallest.peak <= self.budget:
            return smallest
        raise self._budget_short(smallest)

    def _budget_short(self, smallest: Forecast) -> OutsizeError:
        below = ", ".join(f"{format_bytes(n)} on {tier}" for tier, n in smallest.below.items())
        return OutsizeError(
            f"memory budget of {format_bytes(self.budget)} ({self.budget} bytes) is too small:"
            f" {smallest.peak - self.budget} bytes missing; the smallest plan needs"
            f" {format_bytes(smallest.peak)} ({smallest.peak} bytes) with {below}: set memory to"
            f" {-(-smallest.peak // 2**20)}MiB, or use fewer tokens at once or a smaller model"
        )

    def _tiers_short(self) -> OutsizeError:
        assert self.short is not None
        sizes = ", ".join(f"{tier.name} {format_bytes(tier.bytes)}" for tier in self.tiers)
        last = self.tiers[-1]
        return OutsizeError(
            f"tiers below the device are too small ({sizes}): {self.short} bytes missing for a"
            f" memory budget of {format_bytes(self.budget)}; give {last.name}"
            f" {-(-(last.bytes + self.short) // 2**20)}MiB, or the device more memory"
        )
