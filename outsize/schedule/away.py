"""Activations that leave a worker between a FORWARD and its gradients, for the prover."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from outsize.schedule.action import Action, Kind

MOVED = (Kind.EVICT, Kind.FETCH)
_Where = Callable[[Kind, int, int], int | None]  # the worker that has done an action, if any


@dataclass
class Away:
    """What has left, by stage and microbatch."""

    gone: set[tuple[int, int]] = field(default_factory=set)

    def step(self, worker: int, action: Action, did: _Where) -> str:
        """Play an EVICT or a FETCH; gives the reason why it cannot run, or nothing."""
        s, m = here = action.stage, action.microbatch
        if action.kind is Kind.FETCH:
            if here not in self.gone:
                return "its activations are not away"
            self.gone.remove(here)
        elif did(Kind.BACKWARD, s, m) is not None or did(Kind.BACKWARD_INPUT, s, m) is not None:
            return "its gradient was produced already; nobody asks for its activations"
        else:
            self.gone.add(here)
        where = did(Kind.FORWARD, s, m)
        if where is None:
            return f"comes before its {Kind.FORWARD}"
        return "" if where == worker else f"its {Kind.FORWARD} was on worker {where}"

    def reads(self, action: Action) -> str:
        """Why an action cannot read its activations, or nothing."""
        if (action.stage, action.microbatch) not in self.gone:
            return ""
        return "its activations are away; expected a FETCH before it"
