"""Schedule: the ordered actions of one step for each worker, and its text form.

The text has one line an action, in order: worker, kind, stage, microbatch, lane, then bytes. What
is moved stands behind the kind, a part behind its stage:

    0 FORWARD 1 0 compute device/activations+1024 workspace=2048
    0 FETCH.optimizer 1#0 * fetch

The first line has the numbers, and update=behind and how ends are cut where that is so; what
passes through the pool follows in lines of its own (lines.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from outsize.schedule.action import Action, State
from outsize.schedule.ends import Ends
from outsize.schedule.lines import lines_of, numbers
from outsize.schedule.residency import Residency
from outsize.schedule.role import Role


@dataclass(frozen=True)
class Schedule:
    """workers: each worker's actions in order. stages, microbatches: their numbers.

    recompute: the stages whose FORWARD keeps only its input. first: the first stage that is
    trained; those before it have no backward pass. residency: what passes through the pool of the
    device tier, where anything does. behind: a stage is updated behind its own backward pass,
    not after NORM. ends: what all workers do together at the ends of a microbatch's path, where
    they do. role: what this is of a pipeline's step, where it is one worker's of many. ahead: the
    stages that are updated without gradients, before their FORWARDs.
    """

    stages: int
    microbatches: int
    workers: tuple[tuple[Action, ...], ...]
    recompute: frozenset[int] = frozenset()
    first: int = 0
    residency: Residency | None = None
    behind: bool = False
    ends: Ends | None = None
    role: Role | None = None
    ahead: frozenset[int] = frozenset()

    def before(self, stage: int, microbatch: int) -> int:
        """The stage whose outputs a stage takes; -1 for the first."""
        return stage - 1 if self.role is None else self.role.before(stage, microbatch)

    def after(self, stage: int, microbatch: int) -> int:
        """The stage that takes a stage's outputs; -1 for the last."""
        role = self.role or _PLAIN
        return role.after(stage, microbatch, self.stages)

    def begin(self, microbatch: int) -> int:
        """The first stage of a microbatch."""
        paths = self.role.paths if self.role else ()
        return paths[microbatch][0] if paths else 0

    def end(self, microbatch: int) -> int:
        """The last stage of a microbatch."""
        paths = self.role.paths if self.role else ()
        return paths[microbatch][-1] if paths else self.stages - 1

    def exchanged(self, action: Action) -> State | None:
        """What an action takes of what all workers have summed; None: nothing."""
        if self.ends is None:
            return None
        m = action.microbatch
        barrier = self.ends.before(action, (self.begin(m), self.end(m)))
        return None if barrier is None else barrier[0]

    def to_text(self) -> str:
        """The stable text form."""
        lines = [
            f"schedule stages={self.stages} microbatches={self.microbatches}"
            f" recompute={numbers(self.recompute)} first={self.first} workers={len(self.workers)}"
            + (" update=behind" if self.behind else "")
            + (f" {self.ends.name}={self.ends.variant}" if self.ends else "")
            + (f" ahead={numbers(self.ahead)}" if self.ahead else "")
        ]
        if self.role is not None:
            lines.append(str(self.role))
        if self.residency is not None:
            lines += lines_of(self.residency)
        for worker, actions in enumerate(self.workers):
            lines += [f"{worker} {action}" for action in actions]
        return "\n".join(lines) + "\n"


_PLAIN = Role(frozenset(), frozenset())
