"""Replay: a schedule with its actions' costs, played by the clock and the byte count alone."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace

from outsize.schedule import Action, Kind, Lane, Schedule, State
from outsize.schedule.waits import settled, waits
from outsize.simulate.costs import ActionCost, Costs
from outsize.trace.trace import Event, Trace

SUMS = (Kind.NORM, Kind.MERGE, Kind.EXCHANGE)  # what several places of the pipeline axis do as one
_NOTHING = ActionCost({}, 0, None)  # type: ignore[arg-type]


def annotate(schedule: Schedule, costs: Costs) -> Schedule:
    """The schedule with every action's bytes filled in."""
    return replace(
        schedule,
        workers=tuple(tuple(filled(a, costs.of(a)) for a in w) for w in schedule.workers),
    )


def filled(action: Action, cost: ActionCost | None) -> Action:
    """An action with the bytes that it costs, if it has any."""
    cost = cost or _NOTHING
    allocates = tuple((f"device/{kind}", count) for kind, count in cost.allocates.items())
    return replace(action, allocates=allocates, workspace=cost.workspace)


def play(
    schedule: Schedule, static: Mapping[str, int], seconds: Callable[[int, Action], float]
) -> Trace:
    """The predicted trace of an annotated schedule of one worker. seconds: of the action at a
    place.

    Lanes run beside each other as the engine's do (outsize/runtime/engine.py): each in the order of
    the list, waiting for what it needs; bytes come and go where the computing thread says.
    """
    player = Player(schedule, static)
    for index, action in enumerate(player.actions):
        start = player.start(index)
        assert start is not None, "a list is one order in which everything can run alone"
        player.end(index, start, start + seconds(index, action))
    return Trace("predicted", tuple(sorted(player.events(), key=lambda event: event.start)))


def play_together(
    players: Sequence[Player], seconds: Sequence[Callable[[int, Action], float]]
) -> Trace:
    """The predicted trace of all workers of a pipeline: what comes from another worker is there
    when that one has sent it, and sums begin when the last has come to them. Every worker has a
    core of its own here; outsize/simulate/shared_cores.py is for those that share.

    seconds: by worker, of the action at a place of its list when it waits for nobody.
    """
    sent: dict[Hashable, float] = {}
    come: dict[Hashable, dict[int, float]] = defaultdict(dict)  # to a sum, by worker
    parts = Counter(_sum(a) for player in players for a in player.actions if a.kind in SUMS)

    def since(worker: int, action: Action, start: float) -> float | None:
        """When an action has what it needs of others, from its start on; None while unknown."""
        if action.kind in (Kind.SEND, Kind.RECV):
            message = (action.state, action.stage, action.microbatch, action.part)
            if action.kind is Kind.SEND:
                sent[message] = start
            return max(start, sent[message]) if message in sent else None
        if action.kind not in SUMS:
            return start
        here = come[_sum(action)]
        here[worker] = start
        return max(here.values()) if len(here) == parts[_sum(action)] else None

    lanes = [(w, deque(left)) for w, player in enumerate(players) for left in player.lanes()]
    moved = True
    while moved:
        moved = False
        for worker, left in lanes:
            player = players[worker]
            while left:
                index = left[0]
                action, start = player.actions[index], player.start(index)
                ready = None if start is None else since(worker, action, start)
                if start is None or ready is None:
                    break
                player.end(index, start, ready + seconds[worker](index, action))
                left.popleft()
                moved = True
    assert not any(left for _, left in lanes), "workers wait for each other in a circle"
    events = [event for player in players for event in player.events()]
    return Trace("predicted", tuple(sorted(events, key=lambda e: (e.worker, e.start))))


def _sum(action: Action) -> Hashable:
    return action.kind, action.state, action.stage, action.microbatch


class Player:
    """One worker's list: when its actions run, as it becomes known, and the bytes that are live."""

    def __init__(self, schedule: Schedule, static: Mapping[str, int], worker: int = 0) -> None:
        self.actions, self._worker, self._static = schedule.workers[0], worker, static
        self._waiting, self._due = waits(schedule), settled(schedule)
        self._free: dict[Lane, float] = {}
        self._times: dict[int, tuple[float, float]] = {}

    def lanes(self) -> Collection[list[int]]:
        """Places of its actions, by lane."""
        found: dict[Lane, list[int]] = defaultdict(list)
        for index, action in enumerate(self.actions):
            found[action.lane].append(index)
        return found.values()

    def start(self, index: int) -> float | None:
        """When an action can begin, the next of its lane; None while that is not known."""
        needed = (*self._waiting[index], *self._due.get(index, ()))
        if any(place not in self._times for place in needed):
            return None
        free = self._free.get(self.actions[index].lane, 0.0)
        return max(free, *(self._times[place][1] for place in needed), 0.0)

    def end(self, index: int, start: float, end: float) -> None:
        """An action runs then."""
        self._times[index] = start, end
        self._free[self.actions[index].lane] = end

    def events(self) -> Iterator[Event]:
        """Every action as it runs, once all are known; bytes come and go in the list's order."""
        live = {f"device/{kind}": count for kind, count in self._static.items()}
        for index, action in enumerate(self.actions):
            for place in self._due.get(index, ()):
                _apply(live, self.actions[place])
            before = sum(live.values())
            if not _leaves(action):
                _apply(live, action)
            computes = action.lane is Lane.COMPUTE
            peak = max(before + action.workspace, sum(live.values())) if computes else 0
            start, end = self._times[index]
            yield Event(
                self._worker, action.lane.value, action.label, action.stage, action.microbatch,
                start, end, dict(live) if computes else {}, peak, action.part,
            )  # fmt: skip


def _leaves(action: Action) -> bool:
    """Bytes of activations that leave go later, where the runtime lets go of them."""
    return action.kind is Kind.EVICT and action.state is State.ACTIVATIONS


def _apply(live: dict[str, int], action: Action) -> None:
    for where, count in action.allocates:
        live[where] = live.get(where, 0) + count


def kinds_at_peak(trace: Trace, static: Mapping[str, int], worker: int = 0) -> dict[str, int]:
    """Bytes by kind at the highest moment of a worker; what the action itself needed is workspace.

    static: bytes by kind that are there before the first action.
    """
    mine = (event for event in trace.events if event.worker == worker)
    computing = [event for event in mine if event.lane == Lane.COMPUTE]
    top = max(computing, key=lambda event: event.peak)
    index = computing.index(top)
    start = {f"device/{kind}": count for kind, count in static.items()}
    before = computing[index - 1].live if index else start
    kinds = {where.partition("/")[2]: count for where, count in before.items() if count}
    kinds["workspace"] = kinds.get("workspace", 0) + top.peak - sum(before.values())
    return kinds
