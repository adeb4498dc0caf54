"""Links between workers, for the prover: what has been sent and not received, in order."""

from __future__ import annotations

from collections import deque

from outsize.schedule.action import WHOLE, Action, Kind, State
from outsize.schedule.form import MOVES
from outsize.schedule.schedule import Schedule
from outsize.schedule.vocabulary import Tensor

BUFFERS = 2  # tensors that one worker may have sent to another before they are received


class Links:
    """Every pair's tensors on their way. Each link holds as many as it has buffers."""

    def __init__(self, schedule: Schedule, buffers: int) -> None:
        self.first, self.buffers = schedule.first, buffers
        self.links: dict[tuple[int, int], deque[Tensor]] = {}
        self.ends: dict[tuple[Kind, Tensor], int] = {}  # the worker of either end
        for worker, actions in enumerate(schedule.workers):
            for action in actions:
                if action.kind in MOVES:
                    self.ends.setdefault((action.kind, _tensor(action)), worker)

    def _other(self, action: Action) -> int | None:
        """The worker of the other end."""
        kind = Kind.RECV if action.kind is Kind.SEND else Kind.SEND
        return self.ends.get((kind, _tensor(action)))

    def waits(self, worker: int, action: Action) -> bool:
        """Whether the other end must do something first."""
        other = self._other(action)
        if other is None or other == worker:
            return False  # a fault that `step` names
        if action.kind is Kind.SEND:
            return len(self.links.get((worker, other), ())) >= self.buffers
        return not self.links.get((other, worker))

    def step(
        self,
        worker: int,
        action: Action,
        here: set[tuple[int, Tensor]],
        unused: set[tuple[int, Tensor]],
    ) -> str:
        """Play a move; gives the reason why it cannot run, or nothing.

        here: tensors by worker. unused: those received, and not used so far.
        """
        tensor, part, other = _tensor(action), action.part, self._other(action)
        sends = action.kind is Kind.SEND
        if other is None:
            return f"no worker {'receives' if sends else 'sends'} it"
        if other == worker:
            return "both of its ends are on this worker"
        if part not in (WHOLE, other if sends else worker):
            return f"is of worker {part}'s part; expected it to be received there"
        if sends:
            if (worker, tensor if part == WHOLE else (*tensor[:3], worker)) not in here:
                return f"what it sends is not on worker {worker}"
            self.links.setdefault((worker, other), deque()).append(tensor)
            return ""
        head = self.links[other, worker].popleft()
        if head != tensor:
            state, stage, microbatch, _ = head
            return f"worker {other} sent {state.value} {stage} {microbatch} before it"
        if action.state is State.GRADIENTS and action.stage < self.first:
            return f"stage {action.stage} is frozen and has no use for it"
        here.add((worker, tensor))
        unused.add((worker, tensor))
        return ""

    def stuck(self, action: Action) -> str:
        """Why a move that waits can never run."""
        other = self._other(action)
        if action.kind is Kind.SEND:
            return (
                f"worker {other} does not receive what fills the {self.buffers} buffers: deadlock"
            )
        return f"waits for worker {other}, which does not send it: deadlock"


def _tensor(action: Action) -> Tensor:
    """What a SEND or a RECV moves."""
    return (action.state, action.stage, action.microbatch, action.part)
