"""Weaving: sends and receives into compute orders, so that links with few buffers do not block.

Every tensor is sent as soon as it is made. It is received when it is used, or before where a later
one from the same worker is used first, or where it would fill its link while the receiver waits for
something else: then nobody could go on.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from outsize.schedule.action import Action, Kind, Lane, State
from outsize.schedule.prove import BUFFERS

_BACK = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
_Key = tuple[bool, int, int]  # of an action: whether a backward, stage, microbatch


@dataclass(frozen=True)
class Move:
    """A tensor that one worker's action makes and another's uses."""

    tensor: tuple[State, int, int]
    sender: int
    receiver: int
    made: _Key
    used: _Key

    def action(self, kind: Kind) -> Action:
        """Either end of the move."""
        state, stage, microbatch = self.tensor
        return Action(kind, stage, microbatch, Lane.NETWORK, state=state)


class _Worker:
    """One worker's steps to come, what it still has to send, and its list so far."""

    def __init__(self, steps: Sequence[Sequence[Action]]) -> None:
        self.steps = deque(steps)
        self.leaving: deque[Move] = deque()
        self.here: set[_Key | None] = set()  # users whose tensor has been received
        self.links: dict[int, deque[Move]] = defaultdict(deque)  # what is on its way, by sender
        self.actions: list[Action] = []

    def receive(self, sender: int) -> None:
        """Take the first tensor off a link."""
        move = self.links[sender].popleft()
        self.here.add(move.used)
        self.actions.append(move.action(Kind.RECV))


def woven(
    orders: Sequence[Sequence[Action]], moves: Sequence[Move], together: frozenset[tuple[int, int]]
) -> list[list[Action]]:
    """Each worker's actions. Orders that wait for each other are given as far as they go, and then
    as they are, for the prover to refuse."""
    workers = [_Worker(_steps(order, together)) for order in orders]
    making: dict[_Key | None, list[Move]] = defaultdict(list)
    for move in moves:
        making[move.made].append(move)
    using: dict[_Key | None, Move] = {move.used: move for move in moves}

    def advance(w: int) -> bool:
        """The next send, receive or step of a worker; False where it must wait."""
        worker = workers[w]
        if worker.leaving:
            link = workers[worker.leaving[0].receiver].links[w]
            if len(link) >= BUFFERS:
                return False
            worker.actions.append(worker.leaving[0].action(Kind.SEND))
            link.append(worker.leaving.popleft())
            return True
        if not worker.steps:
            return False
        for key in map(_key, worker.steps[0]):
            if key in using and key not in worker.here:
                sender = using[key].sender
                if worker.links[sender]:
                    worker.receive(sender)
                    return True
                return False
        for action in worker.steps.popleft():
            worker.actions.append(action)
            worker.leaving.extend(making.get(_key(action), ()))
        return True

    while any([advance(w) for w in range(len(workers))]) or _relieved(workers):
        pass
    for worker in workers:
        worker.actions += [action for step in worker.steps for action in step]
    return [worker.actions for worker in workers]


def _relieved(workers: Sequence[_Worker]) -> bool:
    """Nobody can go on: let receivers of full links take one tensor each; False if none is."""
    full = [
        (worker, sender)
        for worker in workers
        for sender, link in worker.links.items()
        if len(link) >= BUFFERS
    ]
    for worker, sender in full:
        worker.receive(sender)
    return bool(full)


def _key(action: Action) -> _Key | None:
    """What names a tensor's maker or user; none for weight gradients."""
    if action.kind is Kind.BACKWARD_WEIGHT:
        return None
    return (action.kind in _BACK, action.stage, action.microbatch)


def _steps(order: Sequence[Action], together: frozenset[tuple[int, int]]) -> list[list[Action]]:
    """Actions one by one, but those that run as one in a pair."""
    steps: list[list[Action]] = []
    joins = False
    for action in order:
        if joins:
            steps[-1].append(action)
        else:
            steps.append([action])
        pair = (action.stage, action.microbatch)
        joins = action.kind is Kind.FORWARD and pair in together
    return steps
