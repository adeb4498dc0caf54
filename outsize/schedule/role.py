"""Role: what one worker of a pipeline has of a step, for its own schedule."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise


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
        return [
            (dict(zip(path[1:], path, strict=False)), dict(pairwise(path))) for path in self.paths
        ]

    def __str__(self) -> str:
        """As in a schedule's text: "role plays=0/0,1;1/0,1 holds=0,1 paths=-"."""
        by_stage: dict[int, list[int]] = defaultdict(list)
        for stage, microbatch in sorted(self.plays):
            by_stage[stage].append(microbatch)
        plays = ";".join(f"{s}/{','.join(map(str, ms))}" for s, ms in by_stage.items())
        holds = ",".join(map(str, sorted(self.holds)))
        paths = ";".join(",".join(map(str, path)) for path in self.paths)
        others = f" others={','.join(map(str, self.others))}" if self.others else ""
        return f"role plays={plays or '-'} holds={holds or '-'} paths={paths or '-'}{others}"
