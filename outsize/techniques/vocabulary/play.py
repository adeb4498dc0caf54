"""The play that finds places for the passes of a cut vocabulary in a pipeline's orders."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate, count, islice

from outsize.schedule.action import Action, Kind, Lane, State
from outsize.schedule.ends import Barrier, Ends, exchange
from outsize.schedule.pipelines.costs import Costs, EndCosts
from outsize.schedule.pipelines.pipeline import Pair, Pipeline, plain_paths
from outsize.schedule.role import neighbours
from outsize.techniques.vocabulary.ends import EMBED, EMBED_BACKWARD, OUTPUT_S, OUTPUT_T

Step = Sequence[Action]  # one action, or two that run as one
_BACK = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
_AHEAD = 2  # embeddings that are made before the first stage asks for them


@dataclass
class _Worker:
    """steps: forwards and backwards to come. passes: those that others wait for, with when they
    may start; late: those that nobody waits for. held: forwards that were not undone, and most:
    what its order as it stands comes to."""

    steps: deque[Step]
    most: int
    held: int = 0
    passes: deque[tuple[float, Action]] = field(default_factory=deque)
    late: deque[tuple[float, Action]] = field(default_factory=deque)
    busy: bool = False
    order: list[Action] = field(default_factory=list)


_HOLDS = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}


def _holds(step: Step) -> int:
    return sum(_HOLDS.get(action.kind, 0) for action in step)


class Play:
    """The orders played with the vocabulary's passes, each as soon as it can be.

    window: steps of its order from which a worker takes one that can run. pending: passes for
    which nobody waits that each worker may put off. ended: seconds of the play. apart: forwards
    that no longer run as one with the backward behind them.
    """

    def __init__(
        self,
        made: Pipeline,
        orders: Sequence[Sequence[Step]],
        ends: Ends,
        costs: Costs,
        priced: EndCosts,
        window: int,
        pending: int,
    ) -> None:
        self.window, self.pending, self.ended = window, pending, 0.0
        self.place, self.cut = made.placement, ends
        self.costs, self.priced = costs, priced
        self.paths = made.paths or plain_paths(made.placement)
        self.around = [neighbours(path) for path in self.paths]
        self.workers = [
            _Worker(deque(steps), max(accumulate(map(_holds, steps)))) for steps in orders
        ]
        self.ends: dict[tuple[bool, int, int], tuple[float, int]] = {}
        self.arrived: dict[Barrier, int] = {}
        self.open: dict[Barrier, float] = {}  # when what is exchanged is there
        self.events: list[tuple[float, int, int, Step]] = []  # when, turn, worker, what has ended
        self.turns = count()
        self.apart: set[Pair] = set()
        self.entering = self._entering(orders)

    def _entering(self, orders: Sequence[Sequence[Step]]) -> dict[int, int]:
        """For each microbatch the one that enters its route _AHEAD later, whose embedding is made
        when it has entered; those of the beginning are made at once."""
        after: dict[int, int] = {}
        for steps in orders:
            here = [
                action.microbatch
                for step in steps
                for action in step
                if action.kind is Kind.FORWARD and action.stage == self.paths[action.microbatch][0]
            ]
            after |= dict(zip(here, here[_AHEAD:], strict=False))
            for m in here[:_AHEAD]:
                self._all(EMBED, self.paths[m][0], m, 0.0, -1)
        return after

    def go(self) -> Play:
        """Play to the end."""
        for w in range(len(self.workers)):
            self._wake(0.0, w)
        while self.events:
            now, _, w, step = heappop(self.events)
            if step:
                self.workers[w].busy = False
                self._ended(now, w, step)
            self._start(now, w)
            if not self.events and any(worker.steps for worker in self.workers):
                self._wake(now, self._overtake())
            self.ended = now
        return self

    @property
    def peak(self) -> float:
        """Units of activations that the fullest worker holds, its parts of logits among them."""
        share, logits = self.place.share, self.priced.held
        taking, giving = self.cut.holds
        units = {kind: held * share for kind, held in _HOLDS.items()} | {
            taking: logits,
            giving: -logits,
        }
        return max(
            max(accumulate(units.get(action.kind, 0.0) for action in worker.order))
            for worker in self.workers
        )

    def _wake(self, when: float, w: int) -> None:
        heappush(self.events, (when, next(self.turns), w, ()))

    def _overtake(self) -> int:
        """All wait for each other: somebody does first what can be done already. Gives who.

        Where turns are not the same for every microbatch, delayed orders may come to this.
        """
        able = (
            (at, w)
            for w, worker in enumerate(self.workers)
            for at, step in enumerate(worker.steps)
            if self._ready(step[0], w) < float("inf") and self._whole(w, step[0])
        )
        at, w = min(able)
        worker = self.workers[w]
        step = worker.steps[at]
        del worker.steps[at]
        if len(step) > 1:
            worker.steps.insert(at, step[1:])
            self.apart.add((step[0].stage, step[0].microbatch))
        worker.steps.appendleft(step[:1])
        worker.most = max(worker.most, worker.held + _holds(step[:1]))
        return w

    def _whole(self, w: int, action: Action) -> bool:
        """Whether what an action needs of its own worker has run."""
        before = {Kind.BACKWARD_WEIGHT: True, Kind.BACKWARD: False, Kind.BACKWARD_INPUT: False}
        if action.kind not in before:
            return True
        return (before[action.kind], action.stage, action.microbatch) in self.ends

    # What runs next

    def _start(self, now: float, w: int) -> None:
        worker = self.workers[w]
        step = None if worker.busy else self._best(now, w)
        if step is None:
            return
        worker.busy = True
        seconds = sum(map(self._seconds, step))
        for action in step:
            worker.order.append(action)
            barrier = self.cut.behind(action)
            if barrier is not None:
                worker.order.append(exchange(*barrier, Lane.NETWORK))
        heappush(self.events, (now + seconds, next(self.turns), w, step))

    def _best(self, now: float, w: int) -> Step | None:
        worker = self.workers[w]
        if worker.passes and worker.passes[0][0] <= now:
            return (worker.passes.popleft()[1],)
        pending = sum(when <= now for when, _ in worker.late)
        if pending > self.pending:
            return (worker.late.popleft()[1],)
        for at, step in enumerate(islice(worker.steps, self.window)):
            fits = worker.held + _holds(step) <= worker.most
            if fits and all(self._ready(a, w) <= now and self._whole(w, a) for a in step):
                del worker.steps[at]
                worker.held += _holds(step)
                return step
        return (worker.late.popleft()[1],) if pending else None

    def _ready(self, action: Action, w: int) -> float:
        """When what an action needs from elsewhere is there; infinite where nobody knows yet."""
        never = (float("inf"), w)
        if action.kind not in (Kind.FORWARD, *_BACK):
            return 0.0
        path = self.paths[action.microbatch]
        barrier = self.cut.before(action, path)
        opened = 0.0 if barrier is None else self.open.get(barrier, never[0])
        back = action.kind in _BACK
        source = self.around[action.microbatch][back].get(action.stage)
        if source is None:
            return opened
        when, maker = self.ends.get((back, source, action.microbatch), never)
        return max(opened, when + (0.0 if maker == w else self.costs.transfer))

    def _seconds(self, action: Action) -> float:
        if action.kind.end:
            return self.priced.of_pass(action.kind, self.cut, len(self.workers))
        forward, of_input, of_weight = self.costs.each
        seconds = {
            Kind.FORWARD: forward,
            Kind.BACKWARD: of_input + of_weight,
            Kind.BACKWARD_INPUT: of_input,
            Kind.BACKWARD_WEIGHT: of_weight,
        }
        return seconds[action.kind] * self.place.share

    # What follows from an end

    def _ended(self, now: float, w: int, step: Step) -> None:
        for action in step:
            if action.kind in (Kind.FORWARD, *_BACK):
                self._layer(now, w, action)
            barrier = self.cut.behind(action)
            if barrier is not None:
                self._arrive(now, barrier)

    def _layer(self, now: float, w: int, action: Action) -> None:
        s, m, back = action.stage, action.microbatch, action.kind in _BACK
        self.ends[back, s, m] = (now, w)
        path = self.paths[m]
        to = self.around[m][not back].get(s)
        if to is not None:
            self._wake(now + self.costs.transfer, self.place.worker(to, m))
        if not back and s == path[0] and m in self.entering:
            later = self.entering[m]
            self._all(EMBED, self.paths[later][0], later, now, w)
        if not back and s == path[-1]:
            self._all(OUTPUT_S, s, m, now, w)
        if back and s == path[0]:
            self._all(EMBED_BACKWARD, s, m, now, w)

    def _arrive(self, now: float, barrier: Barrier) -> None:
        self.arrived[barrier] = self.arrived.get(barrier, 0) + 1
        if self.arrived[barrier] < len(self.workers):
            return
        when = self.open[barrier] = now + self.costs.transfer
        for w in range(len(self.workers)):
            self._wake(when, w)
        if barrier[0] is State.SUMS:
            self._all(OUTPUT_T, barrier[1], barrier[2], when, -1)

    def _all(self, kind: Kind, stage: int, m: int, now: float, root: int) -> None:
        """A pass becomes possible on every worker; on others than the root a transfer later."""
        late = kind is EMBED_BACKWARD or (kind is OUTPUT_T and OUTPUT_T not in self.cut.makes)
        for w, worker in enumerate(self.workers):
            when = now if root in (w, -1) else now + self.costs.transfer
            (worker.late if late else worker.passes).append((when, Action(kind, stage, m)))
            self._wake(when, w)
