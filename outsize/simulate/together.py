"""Workers of a pipeline by the clock: each plays its list (replay.py), what comes from another
worker is there when that one has sent it, and sums begin when the last has come to them.

Every worker has a core of its own here; outsize/simulate/shared_cores.py is for those that share.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from outsize.schedule import Action, Kind, Lane, State
from outsize.simulate.replay import Player
from outsize.trace.trace import Trace

_Message = tuple[State, int, int, int]
_Sum = tuple[Kind, State, int, int]
SUMS = (Kind.NORM, Kind.MERGE, Kind.EXCHANGE)  # what several places of the pipeline axis do as one


def play_together(
    players: Sequence[Player], seconds: Sequence[Callable[[int, Action], float]]
) -> Trace:
    """The predicted trace of all workers. seconds: by worker, of the action at a place of its list
    when it waits for nobody."""
    board = _Board(players)
    lanes = [_Lane(player, by, deque(indices)) for player, by, indices in _lanes(players, seconds)]
    moved = True
    while moved:
        moved = any([board.advance(lane) for lane in lanes])
    assert not any(lane.left for lane in lanes), "workers wait for each other in a circle"
    events = [event for player in players for event in player.events()]
    return Trace("predicted", tuple(sorted(events, key=lambda e: (e.worker, e.start))))


@dataclass
class _Lane:
    """A lane of a worker. left: places of its actions that have no times yet."""

    player: Player
    seconds: Callable[[int, Action], float]
    left: deque[int]


def _lanes(
    players: Sequence[Player], seconds: Sequence[Callable[[int, Action], float]]
) -> Iterator[tuple[Player, Callable[[int, Action], float], list[int]]]:
    for player, by in zip(players, seconds, strict=True):
        found: dict[Lane, list[int]] = {}
        for index, action in enumerate(player.actions):
            found.setdefault(action.lane, []).append(index)
        for indices in found.values():
            yield player, by, indices


class _Board:
    """What has been sent, and who has come to which sum."""

    def __init__(self, players: Sequence[Player]) -> None:
        self._sent: dict[_Message, float] = {}
        self._come: dict[_Sum, dict[int, float]] = {}
        actions = (a for player in players for a in player.actions)
        self._parts: Counter[_Sum] = Counter(_sum(a) for a in actions if a.kind in SUMS)

    def advance(self, lane: _Lane) -> bool:
        """Run a lane as far as it is known; gives whether that was anywhere."""
        moved = False
        while lane.left:
            index = lane.left[0]
            action, start = lane.player.actions[index], lane.player.start(index)
            since = None if start is None else self._since(lane.player, action, start)
            if start is None or since is None:
                break
            lane.player.end(index, start, since + lane.seconds(index, action))
            lane.left.popleft()
            moved = True
        return moved

    def _since(self, player: Player, action: Action, start: float) -> float | None:
        """When an action has what it needs of others, from its start on; None while unknown."""
        if action.kind is Kind.SEND:
            self._sent[_message(action)] = start
        if action.kind is Kind.RECV:
            sent = self._sent.get(_message(action))
            return None if sent is None else max(start, sent)
        return self._last(player, action, start) if action.kind in SUMS else start

    def _last(self, player: Player, action: Action, start: float) -> float | None:
        """When the last has come to a sum; None where somebody is missing."""
        name = _sum(action)
        come = self._come.setdefault(name, {})
        come[id(player)] = start
        return max(come.values()) if len(come) == self._parts[name] else None


def _message(action: Action) -> _Message:
    return action.state, action.stage, action.microbatch, action.part


def _sum(action: Action) -> _Sum:
    return action.kind, action.state, action.stage, action.microbatch
