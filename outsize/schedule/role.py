"""Role: what one worker of a pipeline has of a step, for its own schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise


def neighbours(path: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
    """(the stage before, the stage after) of each stage of a path, where there is one."""
    return dict(zip(path[1:], path, strict=False)), dict(pairwise(path))


@dataclass(frozen=True)
class Role:
    """plays: (stage, microbatch) that the worker computes. holds: the stages whose parameters it
    has and updates: those that it plays, and others with which these compute. paths: the stages
    of each microbatch, where they are not all in order. others: the workers with other
    parts of ends that all share."""

    plays: frozenset[tuple[int, int]]
    holds: frozenset[int]
    paths: tuple[tuple[int, ...], ...] = ()
    others: tuple[int, ...] = ()

    def before(self, stage: int, microbatch: int) -> int:
        """The stage whose outputs a stage takes; -1 for the first."""
        return self._around[microbatch][0].get(stage, -1) if self.paths else stage - 1

    def after(self, stage: int, microbatch: int, stages: int) -> int:
        """The stage that takes a stage's outputs; -1 for the last."""
        if self.paths:
            return self._around[microbatch][1].get(stage, -1)
        return stage + 1 if stage + 1 < stages else -1

    @cached_property
    def _around(self) -> list[tuple[dict[int, int], dict[int, int]]]:
        return [neighbours(path) for path in self.paths]
