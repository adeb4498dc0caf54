"""What all workers do at the ends of a path, in the list of one: what its passes and exchanges need
there, each once and in an order in which its lanes can run. What comes from others is proved where
all workers are played together (together.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from outsize.schedule.action import WHOLE, Action, Kind, State
from outsize.schedule.ends import Ends
from outsize.schedule.schedule import Schedule

_SAME = {"forward": Kind.FORWARD, "back": Kind.BACKWARD}
_MAKERS = {State.ACTIVATIONS: Kind.FORWARD, State.GRADIENTS: Kind.BACKWARD}  # of what is given


class EndsProof:
    """Follows one worker's list."""

    def __init__(self, schedule: Schedule, ends: Ends) -> None:
        self.schedule, self.ends = schedule, ends
        self._done: set[tuple[Kind, State, int, int]] = set()  # kind, state, microbatch, part
        evaluates = schedule.first == schedule.stages
        self._kinds = ends.ahead if evaluates else ends.passes

    def _did(self, kind: Kind, m: int, state: State = State.NONE, part: int = WHOLE) -> bool:
        return (kind, state, m, part) in self._done

    def step(self, action: Action) -> str:
        """Go past an action; gives the reason why it cannot run, or nothing."""
        kind, m = action.kind, action.microbatch
        if m == WHOLE:
            return next(self._missing(), "") if kind is Kind.NORM else ""
        reason = self._needs(action)
        at_end = action.stage == self.schedule.end(m) if kind.way == "forward" else True
        at_begin = action.stage == self.schedule.begin(m) if kind.way == "back" else True
        if at_end and at_begin:
            self._done.add((_SAME.get(kind.way, kind), action.state, m, action.part))
        return reason

    def _needs(self, action: Action) -> str:
        kind, m, part = action.kind, action.microbatch, action.part
        state = self.schedule.exchanged(action)
        if state is not None and not self._did(Kind.EXCHANGE, m, state):
            return f"comes before EXCHANGE.{state.value} of its microbatch"
        if kind is Kind.EXCHANGE:
            makers = (k for k, made in self.ends.makes.items() if made is action.state)
            maker = next(makers, None)
            if maker is None:
                return f"exchanges {action.state.value}, which this variant does not"
            return "" if self._did(maker, m) else f"comes before its {maker}"
        if kind is Kind.SEND and part != WHOLE:
            return self._sends(action)
        frozen = kind is self.ends.over and self.schedule.first > 0
        if kind in self.ends.given and not frozen:
            state = self.ends.given[kind]
            if not (self._did(_MAKERS[state], m) or self._came(state, m)):
                return f"its input, {state.value} of microbatch {m}, is not here"
        return ""

    def _came(self, state: State, microbatch: int) -> bool:
        """Whether the worker's own part of a tensor was received."""
        received = (k for k in self._done if k[0] is Kind.RECV and k[3] != WHOLE)
        return any(k[1] is state and k[2] == microbatch for k in received)

    def _sends(self, action: Action) -> str:
        """Why a part cannot be sent, or nothing."""
        m = action.microbatch
        others = self.schedule.role.others if self.schedule.role else ()
        if action.part not in others:
            return f"is for worker {action.part}, which has no part; expected one of {others}"
        if not self._did(_MAKERS.get(action.state, Kind.BACKWARD), m):
            return "what it sends was not produced"
        gone = self._did(self.ends.user(action.state), m)
        return "what it sends was let go by then" if gone else ""

    def _missing(self) -> Iterator[str]:
        """What a step still lacks."""
        for m in range(self.schedule.microbatches):
            for kind in self._kinds:
                if not self._did(kind, m):
                    yield f"{kind} of microbatch {m} is missing"
                state = self.ends.makes.get(kind)
                if state is not None and not self._did(Kind.EXCHANGE, m, state):
                    yield f"EXCHANGE.{state.value} of microbatch {m} is missing"
            yield from self._unsent(m)

    def _unsent(self, m: int) -> Iterator[str]:
        others = self.schedule.role.others if self.schedule.role else ()
        for state, made in _MAKERS.items():
            if self._did(made, m):
                for other in others:
                    if not self._did(Kind.SEND, m, state, other):
                        yield f"SEND of {state.value} of microbatch {m} to {other} is missing"

    def left(self) -> str:
        """What an evaluation leaves undone."""
        return next(self._missing(), "")
