"""Schedule: the ordered actions of one step for each worker."""

from __future__ import annotations

from dataclasses import dataclass

from outsize.schedule.action import WHOLE, Action, State
from outsize.schedule.ends import Ends
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
    stages that are updated without gradients, before their FORWARDs. cuts: the stages at which a
    group begins that learns by a loss of its own: no gradient leaves it there, and it has a NORM of
    its own, when the group before it has been updated. copies: each microbatch comes to the device
    by a COPY, before anything else is done of it. again: so many microbatches have all rows, and
    each that follows goes on from the tokens that SAMPLE of the one so many before it has drawn.
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
    cuts: frozenset[int] = frozenset()
    copies: bool = False
    again: int = 0

    @property
    def loses(self) -> int:
        """The stage that makes the losses; WHOLE where all workers do, at the ends."""
        return self.stages - 1 if self.ends is None else WHOLE

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

    def norm(self, stage: int) -> int:
        """What NORM of a stage's gradients is of: its group's first stage, or the whole step."""
        return max(c for c in (0, *self.cuts) if c <= max(0, stage)) if self.cuts else WHOLE

    def exchanged(self, action: Action) -> State | None:
        """What an action takes of what all workers have summed; None: nothing."""
        if self.ends is None:
            return None
        m = action.microbatch
        if self.first and action.kind is self.ends.over:
            return self.ends.back
        barrier = self.ends.before(action, (self.begin(m), self.end(m)))
        return None if barrier is None else barrier[0]


_PLAIN = Role(frozenset(), frozenset())
