"""Weaving: sends and receives into compute orders, so that links with few buffers do not block.

Every tensor is sent as soon as it is made. It is received when it is used, or before where a later
one from the same worker is used first, or where it would fill its link while the receiver waits for
something else: then nobody could go on.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outsize.schedule.action import WHOLE, Action, Kind, Lane, State
from outsize.schedule.ends import Barrier
from outsize.schedule.program import BUFFERS

Key = tuple[Kind, int, int, int]  # of a layer's forward or backward, or of one worker's pass


@dataclass(frozen=True)
class Move:
    """A tensor that one worker's action makes and another's uses. part: the receiver, where it is
    for its part of an end."""

    tensor: tuple[State, int, int]
    sender: int
    receiver: int
    made: Key
    used: Key
    part: int = WHOLE

    def action(self, kind: Kind) -> Action:
        """Either end of the move."""
        state, stage, microbatch = self.tensor
        return Action(kind, stage, microbatch, Lane.NETWORK, state=state, part=self.part)


class _Worker:
    """One worker's steps to come, what it still has to send, and its list so far."""

    def __init__(self, steps: Sequence[Sequence[Action]]) -> None:
        self.steps = deque(steps)
        self.leaving: deque[Move] = deque()
        self.here: set[Key | None] = set()  # users whose tensor has been received
        self.links: dict[int, deque[Move]] = defaultdict(deque)  # what is on its way, by sender
        self.actions: list[Action] = []

    def receive(self, sender: int) -> None:
        """Take the first tensor off a link."""
        move = self.links[sender].popleft()
        self.here.add(move.used)
        self.actions.append(move.action(Kind.RECV))


def woven(
    orders: Sequence[Sequence[Action]],
    moves: Sequence[Move],
    together: frozenset[tuple[int, int]],
    before: Callable[[Action], Barrier | None] = lambda action: None,
) -> list[list[Action]]:
    """Each worker's actions. before: the exchange that an action waits for.

    Orders that wait for each other are given as far as they go, and then as they are, for the
    prover to refuse."""
    workers = [_Worker(steps_of(order, together)) for order in orders]
    making: dict[Key | None, list[Move]] = defaultdict(list)
    for move in moves:
        making[move.made].append(move)
    using: dict[Key | None, Move] = {move.used: move for move in moves}
    arrived: Counter[Barrier] = Counter()  # workers that have begun an exchange

    def held(action: Action) -> bool:
        barrier = before(action)
        return barrier is not None and arrived[barrier] < len(workers)

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
        if any(map(held, worker.steps[0])):
            return False
        for key in (key_of(action, w) for action in worker.steps[0]):
            if key in using and key not in worker.here:
                sender = using[key].sender
                if worker.links[sender]:
                    worker.receive(sender)
                    return True
                return False
        for action in worker.steps.popleft():
            worker.actions.append(action)
            worker.leaving.extend(making.get(key_of(action, w), ()))
            if action.kind is Kind.EXCHANGE:
                arrived[action.state, action.stage, action.microbatch] += 1
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


def key_of(action: Action, worker: int) -> Key | None:
    """What names a tensor's maker or user; none for what makes and uses nothing that moves."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind.way:
        kind = Kind.FORWARD if action.kind.way == "forward" else Kind.BACKWARD
        return (kind, stage, microbatch, WHOLE)
    return (action.kind, stage, microbatch, worker) if action.kind.end else None


def steps_of(order: Sequence[Action], together: frozenset[tuple[int, int]]) -> list[list[Action]]:
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
