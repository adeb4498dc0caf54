"""Elastic adapters: in each step every low-rank adapter trains at a rank that is drawn, so that one
run gives adapters of several ranks, which are taken out without training.

Munoz et al., "Low-Rank Adapters Meet Neural Architecture Search for LLM Compression", 2025; the
search over ranks: Munoz et al., "Shears", 2024. A sub-adapter is the first rows of A and the first
columns of B, and counts per component as the whole one does. Each adapter draws for itself, all
ranks alike; the paper's drawn widths of the frozen model's own layers are not here. Evaluations are
of the whole adapter. outsize/runtime/special/elastic.py trains them.

    plan: {approximate: [elastic-adapters]}
    elastic-adapters: {ranks: [32, 24, 16]}
    outsize export RUN --to peft --rank 24 --into DIR
"""

from __future__ import annotations

from dataclasses import dataclass

from outsize.errors import OutsizeError
from outsize.models.random import uniform
from outsize.registry import setting, technique

KEY = "elastic-adapters"


@dataclass(frozen=True)
class ElasticAdapters:
    """Of a run whose plan.approximate names it."""

    ranks: tuple[int, ...] = setting((16, 12, 8), "ranks that are drawn, the adapter's first")

    def check(self, rank: int) -> None:
        """OutsizeError for ranks that an adapter of this rank cannot have."""
        if not self.ranks or min(self.ranks) < 1 or max(self.ranks) != rank:
            raise OutsizeError(
                f"{KEY}.ranks is {list(self.ranks)}, and the adapter's rank is {rank}; expected"
                f" ranks from 1 on of which {rank} is the largest"
            )
        if not 1 < len(self.ranks) == len(set(self.ranks)):
            raise OutsizeError(
                f"{KEY}.ranks is {list(self.ranks)}; expected two or more, each once: of one alone"
                " nothing would be drawn"
            )

    @property
    def middle(self) -> int:
        """What the paper takes where nobody searches: the middle rank, the larger of two."""
        return sorted(self.ranks, reverse=True)[(len(self.ranks) - 1) // 2]

    def rank(self, seed: int, step: int, name: str) -> int:
        """Of the adapter of this name in a step."""
        drawn = uniform(seed, f"{KEY}.{step}.{name}", 0, 1)[0]
        return self.ranks[int(drawn * len(self.ranks))]


technique(
    KEY, ElasticAdapters, "settings of plan.approximate: [elastic-adapters]", exact=False,
    touches=frozenset({"the backward pass"}),
    method="outsize.runtime.special.elastic.Elastic",
)  # fmt: skip
