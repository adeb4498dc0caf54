"""A plan's step on one worker of a pipeline: the pipeline's schedule, stage by stage of the plan.

A stage of the pipeline is a run of the plan's stages. Each of its actions stands for theirs; what
they send and receive, and the sums over workers that hold a stage together, are put into the list
when the passes of one worker (offload.py, spread.py) are through with it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

from outsize.errors import OutsizeError
from outsize.plan import Plan
from outsize.plan.approximate import PARTIAL
from outsize.plan.spread import share
from outsize.schedule.action import WHOLE, Action, Kind, Lane, State
from outsize.schedule.compiler import backward_of, updates_of
from outsize.schedule.pipelines import Costs, Pipeline, Shape, named
from outsize.schedule.pipelines.costs import VocabularyCosts
from outsize.schedule.pipelines.vocabulary import with_vocabulary
from outsize.schedule.prove import prove
from outsize.schedule.role import Role
from outsize.schedule.schedule import Schedule
from outsize.schedule.spread import adds
from outsize.schedule.vocabulary import INPUT, PASSES
from outsize.schedule.vocabulary_here import exchange_of

_BACK = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
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
        """The workers with other rows of a cut vocabulary."""
        every = range(self.coarse.placement.workers) if self.tables else ()
        return tuple(other for other in every if other != worker)

    def edge(self, kind: Kind, state: State = State.NONE) -> int:
        """The plan's stage that has the rows of a vocabulary's pass, or of what is exchanged."""
        first = kind in INPUT or (kind is Kind.EXCHANGE and state is State.ACTIVATIONS)
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
        back = ((i, a) for i, a in actions if a.kind in _BACK)
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
    said, devices = plan.pipeline, plan.mesh.pipeline
    shape = Shape(devices, plan.microbatches, Costs(*said.costs))
    return _proved(said.schedule, shape, said.vocabulary, VocabularyCosts(*said.head))


@lru_cache(maxsize=16)
def _proved(name: str, shape: Shape, variant: int, head: VocabularyCosts) -> Pipeline:
    """Kept, since forecasts ask for it again for every worker."""
    made = named(name, shape)
    if variant:
        made = with_vocabulary(made, variant, shape.costs, head)
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


def computing(
    line: Pipelining, plan: Plan, worker: int, parts: Mapping[int, Sequence[Lane]]
) -> Schedule:
    """What a worker computes in a step."""
    role = line.role(worker)
    actions = [a for coarse in line.order(worker)[0] for a in _fine(line, plan, coarse)]
    for s in sorted(role.holds):
        actions += updates_of(s, parts) if s >= line.first else ()
    again = frozenset(s for s in role.holds if s >= line.first and plan.stages[s].whole)
    return Schedule(
        len(plan.stages), plan.microbatches, (tuple(actions),), again, line.first,
        vocabulary=plan.pipeline.vocabulary, role=role,
    )  # fmt: skip


def _fine(line: Pipelining, plan: Plan, coarse: Action) -> Iterator[Action]:
    """The plan's actions that an action of the pipeline stands for."""
    kind, m = coarse.kind, coarse.microbatch
    if kind is Kind.NORM:
        yield coarse
    elif kind is Kind.FORWARD:
        yield from (Action(kind, s, m) for s in line.fine(coarse.stage, m))
    elif kind in _BACK:
        for s in reversed(line.fine(coarse.stage, m)):
            yield from backward_of(plan, s, m, kind) if s >= line.first else ()
    elif kind in PASSES:
        yield Action(kind, line.edge(kind), m)


def linked(schedule: Schedule, line: Pipelining, plan: Plan, worker: int) -> Schedule:
    """A worker's schedule with its sends, receives and sums of stages that others hold too.

    A tensor is received while the action before the one that uses it computes.
    """
    coarse, moves = line.order(worker)
    ends = [0]
    for action in coarse:
        ends.append(ends[-1] + sum(1 for _ in _fine(line, plan, action)))
    named = ((ends[_turn(place, move)], _named(line, move)) for place, move in moves)
    wanted = [(place, move) for place, move in named if _wanted(line, move)]
    made = placed(schedule, wanted)
    return replace(made, workers=(tuple(_merging(made, line, worker)),))


def _turn(place: int, move: Action) -> int:
    return max(0, place - 1) if move.kind is Kind.RECV else place


def placed(schedule: Schedule, moves: Sequence[Placed]) -> Schedule:
    """A worker's schedule with sends and receives behind so many of its computing actions."""
    after: dict[int, list[Action]] = {}
    for place, move in moves:
        after.setdefault(place, []).append(move)
    actions, count = list(after.get(0, ())), 0
    for action in schedule.workers[0]:
        actions.append(action)
        if action.lane is Lane.COMPUTE:
            count += 1
            actions += after.get(count, ())
    return replace(schedule, workers=(tuple(actions),))


def _wanted(line: Pipelining, move: Action) -> bool:
    """Gradients of what is frozen go nowhere."""
    return move.state is not State.GRADIENTS or move.stage >= line.first


def _named(line: Pipelining, move: Action) -> Action:
    """A move by the plan's stage whose output it carries; a part of a gradient by the stage of
    whose input that is."""
    if move.kind is Kind.EXCHANGE:
        return _exchange(line, move.state, move.microbatch)
    fine = line.fine(move.stage, move.microbatch)
    begins = move.part != WHOLE and move.state is State.GRADIENTS
    lane = Lane.SEND if move.kind is Kind.SEND else Lane.RECEIVE
    return replace(move, stage=fine[0 if begins else -1], lane=lane)


def _exchange(line: Pipelining, state: State, microbatch: int) -> Action:
    return exchange_of(state, line.edge(Kind.EXCHANGE, state), microbatch)


def _merging(schedule: Schedule, line: Pipelining, worker: int) -> Iterator[Action]:
    """The list with a MERGE behind the last part of each sum, in the order of all workers."""
    actions = schedule.workers[0]
    trained = frozenset[int]() if schedule.residency is None else schedule.residency.merged
    mine = [s for s in line.merged if worker in line.holders[s] and s in trained]
    last = dict.fromkeys(mine, -1)
    for index, action in enumerate(actions):
        if action.kind is Kind.REDUCE and action.stage in last:
            last[action.stage] = index
        elif adds(action, schedule.stages, schedule.first):
            last |= {s: index for s in line.uses[action.stage] if s in last}
    at, after = -1, dict[int, list[Action]]()
    for stage in mine:
        at = max(at, last[stage])
        merge = Action(Kind.MERGE, stage, lane=Lane.MERGE, state=State.GRADIENTS)
        after.setdefault(at, []).append(merge)
    yield from after.get(-1, ())
    for index, action in enumerate(actions):
        yield action
        yield from after.get(index, ())


def forwards(line: Pipelining, worker: int, microbatches: int) -> tuple[Schedule, list[Placed]]:
    """So many microbatches forward, one behind the other through the stages, and what is sent and
    received behind how many actions.

    Every worker's list is a part of one order of everything, in which each tensor is received right
    behind its sending: so it can run, however few may be under way. Of a cut vocabulary, embeddings
    are made ahead, and losses a turn behind the last stage.
    """
    route, turns = line.coarse.placement.routes[0], list[tuple[int, int, int, int]]()
    for m in range(microbatches):
        turns += ((m + p, -p, m, p) for p in range(len(route)))
        if line.tables:
            turns += [(m - _AHEAD, 0, m, _EMBED), (m + len(route), 1, m, _OUTPUT)]
    actions, moves = list[Action](), list[Placed]()
    for _, _, m, part in sorted(turns):
        take = _stage if part >= 0 else _passes
        before, more, behind = take(line, worker, m, part)
        moves += ((len(actions), move) for move in before)
        actions += more
        moves += ((len(actions), move) for move in behind)
    plays = frozenset((a.stage, a.microbatch) for a in actions if a.kind is Kind.FORWARD)
    role = Role(plays, line.role(worker).holds, (), line.others(worker))
    stages, variant = len(line.uses), line.coarse.schedule.vocabulary
    made = Schedule(
        stages, microbatches, (tuple(actions),), first=stages, vocabulary=variant, role=role
    )
    return made, moves


_AHEAD = 2  # turns before its first stage's at which a microbatch's embedding is made
_EMBED, _OUTPUT = -2, -1  # what of a cut vocabulary a turn of an evaluation is for
_Turn = tuple[list[Action], list[Action], list[Action]]  # moves before, actions, moves behind


def _stage(line: Pipelining, worker: int, m: int, part: int) -> _Turn:
    """A stage of the pipeline forward."""
    route = line.coarse.placement.routes[0]
    actions = [Action(Kind.FORWARD, s, m) for s in line.run(part)] if route[part] == worker else []
    behind = list[Action]()
    if part + 1 < len(route) and route[part] != route[part + 1]:
        if worker == route[part]:
            behind.append(_move(Kind.SEND, line.run(part)[-1], m))
        elif worker == route[part + 1]:
            behind.append(_move(Kind.RECV, line.run(part)[-1], m))
    return [], actions, behind


def _passes(line: Pipelining, worker: int, m: int, part: int) -> _Turn:
    """A worker's part of the embedding, or of the losses."""
    if part == _EMBED:
        embed = Action(Kind.EMBED, line.edge(Kind.EMBED), m)
        return [], [embed], [_exchange(line, State.ACTIVATIONS, m)]
    last, root = len(line.uses) - 1, line.coarse.placement.routes[0][-1]
    moves = [_move(Kind.RECV, last, m, worker)]
    if root == worker:
        moves = [_move(Kind.SEND, last, m, other) for other in line.others(worker)]
    score = Action(Kind.OUTPUT_S, line.edge(Kind.OUTPUT_S), m)
    return moves, [score], [_exchange(line, State.SUMS, m)]


def _move(kind: Kind, stage: int, microbatch: int, part: int = WHOLE) -> Action:
    lane = Lane.SEND if kind is Kind.SEND else Lane.RECEIVE
    return Action(kind, stage, microbatch, lane, state=State.ACTIVATIONS, part=part)


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
