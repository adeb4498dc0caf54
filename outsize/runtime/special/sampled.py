"""Layers that are trained some at a time: which, changes every so many steps.

What is trained has gradients and an optimizer's states, all else has none: at a switch the states
of layers that are left are dropped, and those that come begin as at the first step. A job lays its
buffers and lists out anew for that (`Job.anew`). A technique says which layers a turn has. Under
bfloat16 a layer that is left is rounded to it: it has no copy in float32 any more.

    plan: {approximate: [lisa]}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from outsize.errors import OutsizeError
from outsize.plan import Plan
from outsize.runtime.flow import Flow
from outsize.runtime.recipe import Recipe
from outsize.runtime.special.counted import Counted

if TYPE_CHECKING:
    from outsize.runtime.job import Job

NOTES, TURN = "sampled", "turn"  # of a checkpoint: the turn of the last step


@runtime_checkable
class Sampling(Protocol):
    """Settings of a technique: which layers are trained when. gap: steps of a turn. ends: what is
    outside of the blocks is trained always, else never."""

    @property
    def gap(self) -> int: ...

    @property
    def ends(self) -> bool: ...

    def layers(self, seed: int, turn: int, count: int) -> Collection[int]:
        """Those of a turn, of so many."""


class Sampled(Counted):
    """Steps that train some layers: see outsize/runtime/method.py."""

    rehearsed: ClassVar[bool] = False
    noted, said = NOTES, "its turns of layers are"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._turn = 0
        self._own = _sampling(job.plan, job.recipe)

    @staticmethod
    def freeze(flow: Flow, plan: Plan, recipe: Recipe) -> None:
        """OutsizeError where a layer would have a turn with nothing that is trained."""
        own = _sampling(plan, recipe)
        for i, (_, params) in enumerate(flow.segments[1:-1]):
            if not any(parameter.requires_grad for _, parameter in params):
                raise OutsizeError(
                    f"plan.approximate is {list(plan.approximate)}: layers take turns, and layer"
                    f" {i} has nothing that is trained; expected something of each (train.only,"
                    " adapt), or another plan.approximate"
                )
        trained = _names(flow, own, recipe.seed, 0)
        for name, parameter in (pair for _, params in flow.segments for pair in params):
            parameter.requires_grad_(parameter.requires_grad and name in trained)

    def due(self) -> Collection[str] | None:
        turn = self._steps // self._own.gap
        return None if turn == self._turn else self._others(turn)

    def _others(self, turn: int) -> Collection[str] | None:
        """Begin a turn: what it trains, where that is not what is trained now."""
        self._turn, job = turn, self._job
        wanted = _names(job.flow, self._own, job.recipe.seed, turn) & job.trainable
        now = {name for name, p in job.owners.items() if p.requires_grad}
        return None if wanted == now else wanted

    def beside(self) -> Mapping[str, int]:
        return {TURN: self._turn}

    def recall(self, notes: Mapping[str, Any]) -> None:
        """In the turn of the last step."""
        super().recall(notes)
        others = self._others(notes.get(NOTES, {}).get(TURN, 0))
        if others is not None:
            self._job.anew(others)

    def close(self) -> None:
        super().close()
        for name in self._job.trainable:
            self._job.owners[name].requires_grad_(True)


def _sampling(plan: Plan, recipe: Recipe) -> Sampling:
    own = (recipe.of(name) for name in plan.approximate)
    return next(one for one in own if isinstance(one, Sampling))


def _names(flow: Flow, own: Sampling, seed: int, turn: int) -> frozenset[str]:
    """The parameters of a turn."""
    blocks = flow.segments[1:-1]
    chosen = own.layers(seed, turn, len(blocks))
    segments = [blocks[i] for i in sorted(chosen)]
    if own.ends:
        segments += [flow.segments[0], flow.segments[-1]]
    return frozenset(name for _, params in segments for name, _ in params)
