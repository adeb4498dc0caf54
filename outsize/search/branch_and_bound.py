"""The search behind a partition: branch and bound over the cuts of a chain of fine stages.

Stages are placed in order of the route. Fine stages that are alike leave few different loads, and
what cannot lead to anything better is left out: where the workers' rooms together are too small for
what is left, where it does not even fit with every worker's last stage filled to the brim, and,
before anything is placed, where it does not fit in any order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from operator import mul

from outsize.errors import OutsizeError
from outsize.schedule.place import Placement

_ROUNDED = 65  # blocks a worker, up to which alike ones are told apart from time
_CLOSE = 1e-9  # relative: loads nearer to each other than this are the same
_EXACT = 1e-12  # a target lies further than this below the load that it is to beat

Counts = tuple[int, ...]  # microbatches, by stage of the pipeline
Held = tuple[tuple[Counts, ...], ...]  # by worker, the counts that no other moment exceeds
Ends = Sequence[int]  # the fine stage behind each stage placed so far
Fits = Callable[[Ends], bool]


@dataclass(frozen=True)
class Cost:
    """Of one fine stage. seconds: forward and backward of a microbatch. static: bytes of its
    states. activations: bytes that a microbatch keeps between the two. starting: bytes beside the
    states of a worker while the first values of this stage are written, before any step."""

    seconds: float
    static: int = 0
    activations: int = 0
    starting: int = 0

    def __post_init__(self) -> None:
        least = min(self.static, self.activations, self.starting)
        if not 0 <= self.seconds < float("inf") or least < 0:
            raise OutsizeError(f"partition: {self}; expected seconds and bytes, not negative")


def plays_of(placement: Placement) -> list[Counts]:
    """By worker, how many microbatches it plays of each stage."""
    counts = [[0] * placement.stages for _ in range(placement.workers)]
    for microbatch in range(placement.microbatches):
        for stage in range(placement.stages):
            counts[placement.worker(stage, microbatch)][stage] += 1
    return [tuple(one) for one in counts]


@dataclass(frozen=True)
class Task:
    """The costs on the placement. `ends` are the fine stages behind the stages placed so far."""

    costs: tuple[Cost, ...]
    placement: Placement
    held: Held
    plays: tuple[Counts, ...] = field(init=False)
    sums: tuple[tuple[float, int, int], ...] = field(init=False)  # of the fine stages before
    holds: tuple[tuple[int, ...], ...] = field(init=False)  # by worker, its stages

    def __post_init__(self) -> None:
        sums = [(0.0, 0, 0)]
        for cost in self.costs:
            time, static, kept = sums[-1]
            sums.append((time + cost.seconds, static + cost.static, kept + cost.activations))
        object.__setattr__(self, "sums", tuple(sums))
        object.__setattr__(self, "plays", tuple(plays_of(self.placement)))
        mine: list[list[int]] = [[] for _ in self.held]
        for stage in range(self.placement.stages):
            for worker in self.placement.holders(stage):
                mine[worker].append(stage)
        object.__setattr__(self, "holds", tuple(map(tuple, mine)))

    def seconds(self, first: int, last: int) -> float:
        """Of fine stages [first, last)."""
        return self.sums[last][0] - self.sums[first][0]

    def loads(self, ends: Ends) -> tuple[float, ...]:
        """Seconds of each worker."""
        spans = [self.seconds(a, b) for a, b in zip((0, *ends), ends, strict=False)]
        return tuple(sum(map(mul, plays, spans)) for plays in self.plays)

    def bytes(self, ends: Ends) -> tuple[int, ...]:
        """Of each worker, with the stages placed so far."""
        spans = list(zip((0, *ends), ends, strict=False))
        static = [self.sums[b][1] - self.sums[a][1] for a, b in spans]
        kept = [self.sums[b][2] - self.sums[a][2] for a, b in spans]
        found = []
        for mine, moments in zip(self.holds, self.held, strict=True):
            here = [s for s in mine if s < len(spans)]
            peak = max((sum(counts[s] * kept[s] for s in here) for counts in moments), default=0)
            begun = (c.starting for s in here for c in self.costs[slice(*spans[s])])
            found.append(max(peak, max(begun, default=0)) + sum(static[s] for s in here))
        return tuple(found)

    def most(self, ends: Ends) -> int:
        """Bytes of the worker that holds most."""
        return max(self.bytes(ends))

    def bound(self) -> float:
        """Seconds that no partition is below: the average, and the longest fine stage's."""
        share = self.placement.microbatches * self.seconds(0, len(self.costs))
        rarest = min(max(plays[s] for plays in self.plays) for s in range(self.placement.stages))
        longest = max(cost.seconds for cost in self.costs)
        return max(share / self.placement.workers, longest * rarest)

    def crowded(self, target: float) -> bool:
        """Whether the fine stages do not go below a target even in any order. Sizes are rounded so
        that what fits in a bin still does (a dual feasible function of Fekete and Schepers, 2001):
        of 64 blocks on 8 workers and a head, somebody has a ninth."""
        bins = set(self.plays)  # workers with the same stages fill up together
        plays = {n for counts in bins for n in counts if n}
        shared = [sum(map(bool, counts)) for counts in zip(*bins, strict=True)]
        if len(plays) > 1 or max(shared) > 1:
            return False
        parts = [cost.seconds * min(plays) / target for cost in self.costs]
        return any(
            sum(_rounded(part, k) for part in parts) > len(bins) * (1 + _CLOSE)
            for k in range(1, _ROUNDED)
        )


def _rounded(part: float, k: int) -> float:
    whole = part * (k + 1)
    return part if abs(whole - round(whole)) < _EXACT else int(whole) / k


def within(task: Task, memory: int) -> Fits:
    """What fits in so many bytes a worker."""
    return lambda ends: task.most(ends) <= memory


@dataclass
class Search:
    """Depth first over the cuts, what is next to an equal share first.

    fits: whether stages placed so far fit. target: seconds that every worker stays below.
    """

    task: Task
    left: int  # tries of a cut
    fits: Fits | None = None
    target: float = float("inf")
    found: tuple[int, ...] = ()
    failed: set[tuple[int, int, tuple[float, ...]]] = field(default_factory=set)

    def below(self, target: float) -> bool:
        """Whether a partition below a target was found in the tries that are left."""
        self.target = target
        return self._step(0, 0, [0.0] * self.task.placement.workers, [])

    def quickest(self, ends: Ends) -> tuple[tuple[int, ...], float]:
        """(the best ends, seconds that no partition is below), from ends that fit."""
        task = self.task
        while True:  # what failed for a higher target fails for a lower one: `failed` is kept
            ends = shifted(ends, task.loads, self.fits)
            best = max(task.loads(ends))
            target = best * (1 - _CLOSE)
            if task.bound() >= target or task.crowded(target):
                return tuple(ends), best
            if not self.below(target):
                return tuple(ends), best if self.left > 0 else task.bound()
            ends = (*self.found, len(task.costs))

    def _step(self, stage: int, at: int, loads: list[float], ends: list[int]) -> bool:
        """Place the stages from `stage` on, from fine stage `at` on."""
        if stage == self.task.placement.stages:
            self.found = tuple(ends[:-1])
            return True
        key = self._key(stage, at, loads)
        if key in self.failed or not self._can(stage, at, loads):
            return False
        for end in self._ends(stage, at, loads):
            if self.left <= 0:
                return False
            self.left -= 1
            span, placed = self.task.seconds(at, end), [*ends, end]
            pairs = zip(loads, self.task.plays, strict=True)
            more = [load + plays[stage] * span for load, plays in pairs]
            fits = self.fits is None or self.fits(placed)
            if fits and self._step(stage + 1, end, more, placed):
                return True
        if self.left > 0 and (self.fits is None or self._apart(stage)):
            self.failed.add(key)
        return False

    def _apart(self, stage: int) -> bool:
        """Whether no worker has stages on both sides, so that what fits does not depend on both."""
        return not any(any(n[:stage]) and any(n[stage:]) for n in self.task.plays)

    def _key(
        self, stage: int, at: int, loads: Sequence[float]
    ) -> tuple[int, int, tuple[float, ...]]:
        """What the rest depends on: loads of the workers that have stages still."""
        whole = self.task.sums[-1][0] * self.task.placement.microbatches or 1.0
        pairs = zip(loads, self.task.plays, strict=True)
        return stage, at, tuple(round(load / whole, 12) for load, n in pairs if any(n[stage:]))

    def _room(self, stage: int, loads: Sequence[float]) -> float:
        """Seconds of a microbatch that a stage may have still."""
        pairs = zip(loads, self.task.plays, strict=True)
        return min((self.target - load) / plays[stage] for load, plays in pairs if plays[stage])

    def _furthest(self, stage: int, at: int, loads: Sequence[float]) -> int:
        """Where a stage that begins at a fine stage can end at the latest."""
        top = self.task.sums[at][0] + self._room(stage, loads)
        stop = bisect_right(self.task.sums, (top, float("inf"), 0)) - 1
        return min(stop, len(self.task.costs) - (self.task.placement.stages - stage - 1))

    def _ends(self, stage: int, at: int, loads: Sequence[float]) -> Ends:
        """Where a stage may end, the most even first."""
        task, stages, count = self.task, self.task.placement.stages, len(self.task.costs)
        stop = self._furthest(stage, at, loads)
        if stage == stages - 1:
            return [count] if stop == count else []
        even = task.seconds(at, count) / (stages - stage)
        return sorted(range(at + 1, stop + 1), key=lambda end: abs(task.seconds(at, end) - even))

    def _can(self, stage: int, at: int, loads: Sequence[float]) -> bool:
        """Whether what is left could go below the target: by the sum of all rooms, and with every
        worker's last stage filled to the brim one after another."""
        task, place = self.task, self.task.placement
        left = place.microbatches * task.seconds(at, len(task.costs))
        if sum(self.target - load for load in loads) < left * (1 - _CLOSE):
            return False
        rest = place.routes[0][stage:]
        if len(place.routes) > 1 or len(set(rest)) < len(rest):
            return True
        for s in range(stage, place.stages):
            at = self._furthest(s, at, loads)
        return at >= len(task.costs)


def shifted(
    ends: Ends,
    measure: Callable[[Ends], Sequence[float]],
    fits: Fits | None = None,
    together: int = 2,
) -> tuple[int, ...]:
    """Ends improved by moving one cut or more by one, as long as the worst measure falls."""
    best, worst = tuple(ends), sorted(measure(ends), reverse=True)
    moved = True
    while moved:
        moved = False
        for other in _neighbours(best, together):
            after = sorted(measure(other), reverse=True)
            if after < worst and (fits is None or fits(other)):
                best, worst, moved = other, after, True
                break
    return best


def _neighbours(ends: tuple[int, ...], together: int) -> Iterator[tuple[int, ...]]:
    """Ends with one to `together` cuts moved by one, none of them into another."""
    count = len(ends) - 1
    one = [(i, by) for i in range(count) for by in (-1, 1)]
    for moves in (m for n in range(1, together + 1) for m in combinations(one, n)):
        other = list(ends)
        for i, by in moves:
            other[i] += by
        if all(a < b for a, b in zip((0, *other), other, strict=False)):
            yield tuple(other)


def smallest(task: Task, starts: Sequence[Ends], limit: int) -> tuple[int, ...]:
    """The ends whose worker with most bytes has fewest, as far as the tries go."""
    best = min((shifted(ends, task.bytes) for ends in starts), key=task.most)
    search = Search(task, limit, within(task, task.most(best) - 1))
    while search.below(float("inf")):
        best = shifted((*search.found, len(task.costs)), task.bytes)
        search = Search(task, search.left, within(task, task.most(best) - 1))
    return best
