"""Choosing a plan where states may rest below the device: how each candidate is computed, in which
order, and how many segments' states lie below, are weighed together.

Every variant of computing is forecast once with all states on the device. What it holds beyond its
states is then known exactly, and how far down its states must go follows by bisection; rates of
the tiers estimate its time. The quickest few are forecast exactly, and the quickest of these that
fits is taken.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from outsize.errors import OutsizeError, counted
from outsize.memory import format_bytes
from outsize.memory.tiers import TierSpec
from outsize.plan import DEVICE, Plan, Rest, Stream
from outsize.plan.interleaved import shared
from outsize.plan.plan import PART
from outsize.schedule.kept import GRADIENTS, PARAMETERS
from outsize.search.pipeline_cuts import composed
from outsize.search.tiers import (
    NEAR_FIRST,
    OPTIMIZER,
    UPDATES_FIRST,
    Below,
    Passing,
    States,
    moved,
    states,
)
from outsize.search.variants import Predicts, Variant, variant_of, variants
from outsize.search.worker_states import rests_of, with_rests
from outsize.simulate import Forecast
from outsize.simulate.forecast import host_share, rate

EXACT = 3  # candidates that are forecast exactly
TRIES = 4  # a plan that misses the budget by what an estimate could not know is tried again
WIDE = (2, 4, 8)  # parts of a stage's update in the pool at once that are tried
DEEP = (3, 4)  # stages in the pool at once that are tried once a plan is found, beside two
WORTH = 0.99  # of the time: what is quicker by less is not worth another plan
# How states pass, from what is quickest to what holds least: without a stage ahead nothing hides.
PASSINGS = (Passing(), Passing(2, PART), Passing(1, PART))


@dataclass(frozen=True)
class Choice:
    """A variant with the tiers of its states. levels: of each worker. seconds: as estimated."""

    variant: Variant
    levels: tuple[int, ...]
    passing: Passing
    rests: tuple[Rest, ...]
    spill: str
    seconds: float


def choose_offloaded(
    forecaster: Predicts, plans: Sequence[Plan], *others: Sequence[Plan]
) -> Forecast:
    """The quickest of the plans with states below that fits request.budget. others: the same plans
    with states cut otherwise over the data axis; each of these comes in order of rising time.

    Raises OutsizeError where none does, with the missing bytes and the nearest budget that works,
    or the bytes that are missing on the tiers.
    """
    assert forecaster.request.budget is not None
    sizes = states(forecaster.facts, plans[0])
    search = Search(forecaster, sizes, forecaster.request.budget, forecaster.request.tiers)
    found: list[Choice] = []
    ways: list[list[Variant]] = []
    for some in (plans, *others):
        ways.append([])
        for plan in some:
            mine = [variant_of(forecaster, variant) for variant in variants(forecaster, plan)]
            ways[-1] += mine
            best = min((choice.seconds for choice in found), default=float("inf"))
            if min(variant.seconds for variant in mine) > best:
                break  # what follows takes longer still
            found += [choice for variant in mine if (choice := search.fitted(variant)) is not None]
    made = search.quickest(found)
    return search.least(ways) if made is None else made


def _below(variant: Variant, levels: Sequence[int]) -> list[Below]:
    """What rests below of each worker."""
    each = zip(variant.places, levels, strict=True)
    return [place.below(level, variant.kinds) for place, level in each]


def _where(made: Forecast) -> str:
    """The worker of a pipeline that has the highest peak."""
    return f" on worker {made.peaks.index(made.peak)}" if made.ranks else ""


def _beside(computing: float, moving: float, ahead: bool) -> float:
    """Seconds of both: at once, or one after the other where nothing is fetched ahead."""
    return max(computing, moving) if ahead else computing + moving


class Search:
    """One search: the model's states, the bytes of the device and of the tiers."""

    def __init__(
        self, forecaster: Predicts, sizes: States, budget: int, tiers: Sequence[TierSpec]
    ) -> None:
        self.forecaster, self.sizes = forecaster, sizes
        self.budget, self.tiers = budget, tiers
        self.short: int | None = None  # fewest bytes that were missing on the tiers

    # -- estimates ----------------------------------------------------------------------------

    def fitted(self, variant: Variant) -> Choice | None:
        """The variant with as little below as the budget allows; None where that is too much."""
        for passing in self.passings(variant):
            found = self.down(variant, passing)
            if found is not None:
                return found
        return None

    def passings(self, variant: Variant) -> list[Passing]:
        """PASSINGS; where weights are cut, with as many stages of them at once as are said."""
        found = [replace(one, behind=variant.behind) for one in PASSINGS]
        if not self._said(variant):
            return found
        return [replace(one, resident=self.forecaster.request.gathered) for one in found]

    def _said(self, variant: Variant) -> bool:
        cut = variant.plan.shards.parameters > 1
        return cut and self.forecaster.request.gathered != Stream().resident

    def down(
        self, variant: Variant, passing: Passing, budgets: Sequence[int] = ()
    ) -> Choice | None:
        """The same with a given passing. budgets: of each worker, where not all have the
        request's."""
        goals = budgets or (self.budget,) * len(variant.places)
        found = [self._level(variant, i, passing, goal) for i, goal in enumerate(goals)]
        if None in found:
            return None
        return self.choice(variant, [level for level in found if level is not None], passing)

    def _level(self, variant: Variant, place: int, passing: Passing, budget: int) -> int | None:
        """The least of a worker that fits. None below needs no pool, so that it may fit where a
        little below does not."""
        top = variant.levels[place]
        if variant.held(place, 0, passing) <= budget:
            return 0
        if variant.held(place, top, passing) > budget:
            return None
        levels = range(top)
        return bisect_left(levels, True, key=lambda n: variant.held(place, n, passing) <= budget)

    def choice(self, variant: Variant, levels: Sequence[int], passing: Passing) -> Choice | None:
        """A variant with each worker at a level, None where the tiers are too small."""
        below = _below(variant, levels)
        found: list[Choice] = []
        for order in (NEAR_FIRST, UPDATES_FIRST)[: len(self.tiers)]:
            rests, spill, short = rests_of(
                variant.places, below, variant.spilled, self.tiers, order
            )
            if short > 0:
                self.short = short if self.short is None else min(short, self.short)
                continue
            seconds = self.seconds(variant, rests, spill, passing.resident > 1)
            found.append(Choice(variant, tuple(levels), passing, rests, spill, seconds))
        return min(found, key=lambda choice: choice.seconds, default=None)

    def seconds(self, variant: Variant, rests: Sequence[Rest], spill: str, ahead: bool) -> float:
        """About a step's time: what the passes and the updates of the busiest worker compute, or
        move if that is more; both where nothing is fetched ahead."""
        each = (self._busy(variant, i, rests, spill, ahead) for i in range(len(variant.places)))
        return variant.waits + max(each)

    def _busy(
        self, variant: Variant, place: int, rests: Sequence[Rest], spill: str, ahead: bool
    ) -> float:
        rounds = 1 if variant.plan.order == "layer" else variant.plan.microbatches
        traffic = moved(variant.places[place].sizes, rests, variant.behind, rounds)
        moving, late = (
            max(sum(size / rate(self.forecaster.hardware, tier, fetch)
                    for tier, size in book.items())  # one lane brings from all tiers
                for fetch, book in zip((True, False), phase, strict=True))
            for phase in (traffic.passes, traffic.updates)
        )  # fmt: skip
        if spill != DEVICE:
            moving += variant.spilled[place] / rate(self.forecaster.hardware, spill, True)
        passes, updates = variant.passes[place], variant.updates[place]
        if variant.behind:
            return _beside(passes + updates, moving, ahead)
        return _beside(passes, moving, ahead) + _beside(updates, late, ahead)

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
        return self.forecaster.forecast(self.improved(best, taken.variant).plan)

    def fitting(self, choice: Choice) -> Forecast | None:
        """The choice forecast; with more below where an estimate was too low."""
        goals, tried = [self.budget] * len(choice.variant.places), choice
        for _ in range(TRIES):
            made = self.compose(self.plan(tried), tried.variant)
            if made.peak <= self.budget:
                return made
            again: Choice | None = tried
            for place, peak in enumerate(made.peaks):
                goals[place] -= max(0, peak - self.budget)
            while again is not None and again.levels == tried.levels:
                again = self.down(choice.variant, choice.passing, goals)
                goals = [goal - (self.budget - goal) for goal in goals]
            if again is None:
                return None
            tried = again
        return None

    def plan(self, choice: Choice, pool: int | None = None) -> Plan:
        """The plan of a choice, with a pool of all that is left, or of `pool` bytes."""
        variant, passing = choice.variant, choice.passing
        if pool is None:
            pool = self.pool(choice)
        stream = replace(
            variant.plan.stream, resident=passing.resident, part=passing.part, pool=pool
        )
        host, over = self.share(choice)
        stream = replace(stream, host=host, over=over)
        made = replace(variant.plan, stream=stream, budget=self.forecaster.request.budget)
        alone = not any(choice.levels) and choice.spill == DEVICE and made.microbatches == 1
        if alone and self.forecaster.request.order is None:
            made = replace(made, order="microbatch")
        return with_rests(made, choice.rests, choice.spill)

    def pool(self, choice: Choice) -> int:
        """Bytes that every worker with something below has left; 0, the least that there is, where
        nothing streams."""
        variant, below = choice.variant, _below(choice.variant, choice.levels)
        rooms = [
            # A room for everything is enough.
            min(self.budget - held - place.resident(mine), 2 * place.sizes.total)
            for place, held, mine, level in zip(
                variant.places, variant.dynamic, below, choice.levels, strict=True
            )
            if level
        ]
        return max(0, min(rooms, default=0))

    def share(self, choice: Choice) -> tuple[int, int]:
        """`stream.host` and `stream.over`, by the rates of the device and of the host."""
        memories, variant = self.forecaster.facts.host, choice.variant
        mine = [r for r in choice.rests if {r.optimizer, r.gradients} <= memories]
        if variant.behind or not mine:
            return 0, 1
        hardware, sizes = self.forecaster.hardware, self.sizes
        tier = mine[0].optimizer
        gradients, optimizer = sum(sizes.bytes[GRADIENTS]), sum(sizes.bytes[OPTIMIZER])
        weights = sum(
            p for p, g in zip(sizes.bytes[PARAMETERS], sizes.bytes[GRADIENTS], strict=True) if g
        )
        come = gradients + optimizer + (weights if sizes.own else 0)
        updates = sum(variant.updates)
        over = max(
            come / rate(hardware, tier, True),
            (optimizer + weights) / rate(hardware, tier, False),
            updates,
        )
        resting = updates * host_share(hardware, tier) + weights / rate(hardware, tier, True)
        return shared(over, resting)

    def compose(self, plan: Plan, variant: Variant) -> Forecast:
        """With the variant's costliest layout; of a pipeline with all of them, since workers may
        differ in that. Where the pool is too small, the least there is."""
        costs = self.forecaster.costs(plan)
        costs = costs if len(variant.places) > 1 else [costs[variant.layout]]
        try:
            return composed(plan, costs, self.forecaster.hardware)
        except OutsizeError:
            if not plan.stream.pool:
                raise
        least = replace(plan, stream=replace(plan.stream, pool=0))
        return composed(least, costs, self.forecaster.hardware)

    def improved(self, best: Forecast, variant: Variant) -> Forecast:
        """With more stages in the pool at once: more overlaps, for more that rests below. Then with
        more parts of an update there: disk and updates no longer take turns. Then without updates
        at rest, which few parts, or lanes that wait, may make slower. Each as long as there is room
        and it is quicker."""
        changes = (
            *((partial(self._deeper, variant, resident), "deeper", WORTH) for resident in DEEP),
            *((partial(self._streaming, variant, parts=parts), "wider", WORTH) for parts in WIDE),
            (partial(self._streaming, variant, host=0, over=1), "no host", 1.0),
        )
        over = ""  # which kind of change helps no more
        for change, kind, worth in changes:
            made = None if kind == over else change(best)
            if made is None or made.peak > self.budget or made.seconds >= worth * best.seconds:
                over = kind
            else:
                best = made
        return best

    def _deeper(self, variant: Variant, resident: int, best: Forecast) -> Forecast | None:
        if best.plan.stream.resident < 2 or not best.below or self._said(variant):
            return None
        choice = self.down(variant, replace(PASSINGS[0], resident=resident, behind=variant.behind))
        return None if choice is None else self.fitting(choice)

    def _streaming(self, variant: Variant, best: Forecast, **changes: Any) -> Forecast | None:
        """With what streams passing otherwise; None where nothing does, or would change."""
        stream = replace(best.plan.stream, **changes)
        if not best.below or stream == best.plan.stream:
            return None
        return self.compose(replace(best.plan, stream=stream), variant)

    # -- what cannot work ---------------------------------------------------------------------

    def least(self, ways: Sequence[Sequence[Variant]]) -> Forecast:
        """The plan that needs the least of all, if that fits. OutsizeError with what is missing.
        ways: by how states are cut over the data axis."""

        def tight(variant: Variant) -> Passing:
            return self.passings(variant)[-1]

        def lowest(variant: Variant) -> tuple[int, ...]:  # a pool may take more than it spares
            return tuple(
                min(range(top, -1, -1), key=lambda n: variant.held(place, n, tight(variant)))
                for place, top in enumerate(variant.levels)
            )

        def least(some: Sequence[Variant]) -> list[Variant]:
            return sorted(some, key=lambda one: one.peak(lowest(one), tight(one)))[:2]

        found: list[Forecast] = []
        for variant in (variant for some in ways for variant in least(some)):
            choice = self.choice(variant, lowest(variant), tight(variant))
            if choice is not None:
                found.append(self.forecaster.forecast(self.plan(choice, pool=0)))
        if not found:
            raise _tiers_short(self.short or 0, self.budget, self.tiers)
        smallest = min(found, key=lambda made: made.peak)
        if smallest.peak <= self.budget:
            return smallest
        raise _budget_short(smallest, self.budget)


def _budget_short(smallest: Forecast, budget: int) -> OutsizeError:
    below = ", ".join(f"{format_bytes(n)} on {tier}" for tier, n in smallest.below.items())
    below = below or "nothing below the device"
    return OutsizeError(
        f"memory budget of {format_bytes(budget)} ({budget} bytes) is too small:"
        f" {counted(smallest.peak - budget, 'byte')} missing{_where(smallest)}; the"
        " smallest plan"
        f" needs {format_bytes(smallest.peak)} ({smallest.peak} bytes) with {below}: set memory"
        f" to {-(-smallest.peak // 2**20)}MiB, or use fewer tokens at once or a smaller model"
    )


def _tiers_short(short: int, budget: int, tiers: Sequence[TierSpec]) -> OutsizeError:
    sizes = ", ".join(f"{tier.name} {format_bytes(tier.bytes)}" for tier in tiers)
    last = tiers[-1]
    return OutsizeError(
        f"tiers below the device are too small ({sizes}): {counted(short, 'byte')}"
        " missing for a"
        f" memory budget of {format_bytes(budget)}; give {last.name}"
        f" {-(-(last.bytes + short) // 2**20)}MiB, or the device more memory"
    )
