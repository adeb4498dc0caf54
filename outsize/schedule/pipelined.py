"""A plan's step on one worker of a pipeline: the pipeline's schedule, stage by stage of the plan.

A stage of the pipeline is a run of the plan's stages. Each of its actions stands for theirs; what
they send and receive, and the sums over workers that hold a stage together, are put into the list
when the passes of one worker (offload.py, spread.py) are through with it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

from outsize.errors import OutsizeError, counted
from outsize.plan import Pipelined, Plan
from outsize.plan.approximate import PARTIAL
from outsize.plan.spread import AUTO, share
from outsize.schedule.action import WHOLE, Action, Kind, State
from outsize.schedule.csv import from_csv
from outsize.schedule.ends import Ends, ends_of
from outsize.schedule.pipelines import Costs, Pipeline, Shape, named
from outsize.schedule.pipelines.costs import EndCosts
from outsize.schedule.pipelines.pipeline import with_ends
from outsize.schedule.proof import prove
from outsize.schedule.role import Role

_MOVES = (Kind.SEND, Kind.RECV, Kind.EXCHANGE)
Placed = tuple[int, Action]  # how many computing actions stand before it


@dataclass(frozen=True)
class Pipelining:
    """coarse: the schedule of all workers. bounds: the plan's stages at which the pipeline's begin,
    and their end. first: the first stage of the plan that is trained. uses: by stage of the plan,
    the stages with whose parameters it computes. tables: the stages of whose parameters every
    worker has rows of its own, in order: the embedding's, and the head's where that is another."""

    coarse: Pipeline
    bounds: tuple[int, ...]
    first: int
    uses: tuple[tuple[int, ...], ...]
    tables: tuple[int, ...] = ()

    def run(self, stage: int) -> range:
        """The plan's stages of a stage of the pipeline."""
        return range(self.bounds[stage], self.bounds[stage + 1])

    @property
    def loses(self) -> int:
        """See Schedule.loses."""
        return len(self.uses) - 1 if self.coarse.schedule.ends is None else WHOLE

    @cached_property
    def partial(self) -> bool:
        """Microbatches leave stages out: each ends where its path does, so that the model's last
        stage is on every worker on which one ends."""
        return bool(self.coarse.paths)

    def fine(self, stage: int, microbatch: int) -> tuple[int, ...]:
        """The plan's stages that a microbatch runs through in a stage of the pipeline."""
        if not self.partial:
            return tuple(self.run(stage))
        end = len(self.uses) - 1
        mine = tuple(s for s in self.run(stage) if s != end)
        return (*mine, end) if self.coarse.paths[microbatch][-1] == stage else mine

    def before(self, stage: int, microbatch: int) -> int:
        """The plan's stage whose outputs a stage takes in a step."""
        return self._role.before(stage, microbatch)

    @cached_property
    def _role(self) -> Role:
        return Role(frozenset(), frozenset(), self.paths)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The plan's stages of each microbatch, where they are not all in order."""
        ways = enumerate(self.coarse.paths)
        return tuple(tuple(s for p in path for s in self.fine(p, m)) for m, path in ways)

    def part(self, stage: int) -> int:
        """The pipeline's stage of a stage of the plan."""
        return bisect_right(self.bounds, stage) - 1

    def others(self, worker: int) -> tuple[int, ...]:
        """The workers with other parts of the ends."""
        every = range(self.coarse.placement.workers) if self.tables else ()
        return tuple(other for other in every if other != worker)

    def edge(self, kind: Kind, state: State = State.NONE) -> int:
        """The plan's stage that has the parts of a pass of all workers, or of what is exchanged."""
        first = kind.end == "first" or (kind is Kind.EXCHANGE and state is State.ACTIVATIONS)
        return self.tables[0 if first else -1]

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """By stage of the plan, the workers that have its parameters, rows of their own aside."""
        found: list[set[int]] = [set() for _ in self.uses]
        for stage, uses in enumerate(self.uses):
            for used in (stage, *uses):
                found[used].update(self._players(stage))
        return tuple(tuple(sorted(workers)) for workers in found)

    def _players(self, stage: int) -> tuple[int, ...]:
        """The workers that compute a stage of the plan."""
        place = self.coarse.placement
        ends = {self.part(stage)}
        if self.partial and stage == len(self.uses) - 1:
            ends |= {path[-1] for path in self.coarse.paths}
        return tuple(worker for end in ends for worker in place.holders(end))

    @cached_property
    def merged(self) -> tuple[int, ...]:
        """The trained stages that several workers hold, in the one order in which all of them sum
        their gradients: as their last parts come. They have a lane of their own: the others may
        wait for what this worker's other lanes do."""
        shared = [s for s in range(self.first, len(self.uses)) if len(self.holders[s]) > 1]
        ends = {s: max(self._end(s, worker) for worker in self.holders[s]) for s in shared}
        return tuple(sorted(shared, key=lambda s: (ends[s], s)))

    def _end(self, stage: int, worker: int) -> int:
        """Where in a worker's list gradients of a stage are added last."""
        users = {s for s, uses in enumerate(self.uses) if stage in (s, *uses)}
        actions = enumerate(self.coarse.schedule.workers[worker])
        back = ((i, a) for i, a in actions if a.kind.adds and not a.kind.end)
        adds = (i for i, a in back if users.intersection(self.fine(a.stage, a.microbatch)))
        return max(adds, default=-1)

    def route(self, worker: int) -> frozenset[int]:
        """The plan's stages of a worker on the way that evaluations take."""
        route = self.coarse.placement.routes[0]
        mine = (p for p, w in enumerate(route) if w == worker)
        return frozenset(s for p in mine for s in self.run(p))

    def role(self, worker: int) -> Role:
        """What a worker has of a step."""
        actions = self.coarse.schedule.workers[worker]
        mine = [(a.stage, a.microbatch) for a in actions if a.kind is Kind.FORWARD]
        plays = frozenset((s, m) for stage, m in mine for s in self.fine(stage, m))
        holds = (s for s, workers in enumerate(self.holders) if worker in workers)
        return Role(plays, frozenset((*holds, *self.tables)), self.paths, self.others(worker))

    def order(self, worker: int) -> tuple[list[Action], list[Placed]]:
        """A worker's actions of the pipeline, and its moves with their places."""
        actions, moves = list[Action](), list[Placed]()
        for action in self.coarse.schedule.workers[worker]:
            if action.kind in _MOVES:
                moves.append((len(actions), action))
            else:
                actions.append(action)
        return actions, moves


def pipelining_of(
    plan: Plan, first: int, uses: Sequence[Sequence[int]], tables: Sequence[int] = ()
) -> Pipelining:
    """How a plan is played over the pipeline axis; OutsizeError says what does not hold."""
    coarse = coarse_of(plan)
    if coarse.approximate and PARTIAL not in plan.approximate:
        raise OutsizeError(
            f"plan: pipeline.schedule is {plan.pipeline.schedule!r}, which changes the maths"
            f" ({coarse.approximate}); name {PARTIAL} under approximate, or choose another schedule"
        )
    bounds = bounds_of(plan, coarse.placement.stages)
    if coarse.paths and bounds[-1] - bounds[-2] < 2:
        raise OutsizeError(
            f"plan: pipeline.cuts is {list(plan.pipeline.cuts)}, which leaves the last stage of the"
            f" pipeline nothing but the head, while microbatches of"
            f" {plan.pipeline.schedule!r} end anywhere; give it a block"
        )
    return Pipelining(coarse, bounds, first, tuple(map(tuple, uses)), tuple(sorted(tables)))


def coarse_of(plan: Plan) -> Pipeline:
    """The schedule of all workers, proved."""
    said = plan.pipeline
    return _proved(said, plan.mesh.pipeline, plan.microbatches, ends_of(said), EndCosts(*said.head))


def order_of(said: Pipelined, workers: int, microbatches: int) -> Pipeline:
    """What a plan's pipeline says that all workers play, its ends aside: a schedule of that name,
    or the orders that were found for the plan."""
    if said.schedule != AUTO:
        return named(said.schedule, Shape(workers, microbatches, Costs(*said.costs)))
    if not said.orders:
        raise OutsizeError(
            f"plan: pipeline.schedule is {AUTO!r} and pipeline.orders is empty: the planner finds"
            " them; make the plan with `outsize plan`, or name a schedule"
        )
    made = from_csv("\n".join(said.orders), "plan: pipeline.orders")
    place = made.placement
    if (place.workers, place.microbatches) != (workers, microbatches):
        raise OutsizeError(
            f"plan: pipeline.orders are of {counted(place.workers, 'worker')} and"
            f" {counted(place.microbatches, 'microbatch')}, and the plan has {workers} and"
            f" {microbatches}: make the plan anew with `outsize plan`, or name a schedule"
        )
    return replace(made, name=AUTO)


@lru_cache(maxsize=16)
def _proved(
    said: Pipelined, workers: int, microbatches: int, ends: Ends | None, head: EndCosts
) -> Pipeline:
    """Kept, since forecasts ask for it again for every worker."""
    made = order_of(said, workers, microbatches)
    if ends is not None:
        made = with_ends(made, ends, Costs(*said.costs), head)
    prove(made.schedule, paths=made.paths)
    return made


def bounds_of(plan: Plan, stages: int) -> tuple[int, ...]:
    """Where the pipeline's stages begin among the plan's, and the end."""
    count, cuts = len(plan.stages), plan.pipeline.cuts
    if stages > count:
        raise OutsizeError(
            f"plan: pipeline.schedule {plan.pipeline.schedule!r} on {plan.mesh.pipeline} workers"
            f" has {stages} stages, the plan {count}: a stage without blocks cannot run; take fewer"
            " workers or stages of a worker"
        )
    if not cuts:
        return (*(share(count, stages, i)[0] for i in range(stages)), count)
    if len(cuts) != stages - 1 or cuts[-1] >= count:
        raise OutsizeError(
            f"plan: pipeline.cuts is {list(cuts)}; expected {stages - 1} numbers below {count}, for"
            f" {stages} stages of the pipeline"
        )
    return (0, *cuts, count)


def channels(line: Pipelining) -> tuple[tuple[int, int], ...]:
    """(sender, receiver) of every pair of workers of the pipeline that hand tensors on."""
    found, place = set[tuple[int, int]](), line.coarse.placement
    partial = [[place.worker(p, m) for p in path] for m, path in enumerate(line.coarse.paths)]
    for route in (*place.routes, *partial):
        found |= {(a, b) for a, b in pairwise(route) if a != b}
        found |= {(b, a) for a, b in pairwise(route) if a != b}
        for root in (route[0], route[-1]):
            found |= {(root, other) for other in line.others(root)}
    return tuple(sorted(found))


def peer(line: Pipelining, move: Action, evaluating: bool = False) -> int:
    """The worker at the other end of a SEND or RECV of a worker's schedule."""
    stage = line.part(move.stage)
    ahead = (move.kind is Kind.SEND) == (move.state is State.ACTIVATIONS)
    place, m = line.coarse.placement, move.microbatch
    if move.part != WHOLE:
        if move.kind is Kind.SEND:
            return move.part
        return place.routes[0][-1] if evaluating else place.worker(_end(line, move), m)
    route = place.routes[0 if evaluating else place.route[m]]
    after = stage + 1
    if line.partial and not evaluating:
        path = line.coarse.paths[m]
        after = path[path.index(stage) + 1]
    return route[after] if ahead else route[stage]


def _end(line: Pipelining, move: Action) -> int:
    """The pipeline's stage at the end of a microbatch's path from which parts come."""
    at = -1 if move.state is State.ACTIVATIONS else 0
    return (
        line.coarse.paths[move.microbatch][at] if line.partial else range(len(line.bounds) - 1)[at]
    )
