"""BAdam: one block is trained at a time, from the first to the last and anew.

Luo et al., "BAdam: A Memory Efficient Full Parameter Optimization Method for Large Language
Models", 2024 (arXiv 2404.02827). Embeddings and head stay as they are, as in the authors' own
settings. outsize/runtime/special/sampled.py trains the blocks.

    plan: {approximate: [badam]}
    badam: {gap: 100}
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Literal

from outsize.models.random import uniform
from outsize.registry import Clash, setting, technique

KEY = "badam"
# Of plans that train some layers at a time: outsize/runtime/special/sampled.py.
CLASHES: tuple[Clash, ...] = (
    (
        "states below the device: what is trained changes, and with it what there is of them",
        lambda p: p.rests_below("parameters", "gradients", "optimizer"),
    ),
    (
        "weights cut over workers (plan.zero 3), or a pipeline: a switch lays whole layers out"
        " anew",
        lambda p: p.shards.parameters > 1 or p.mesh.pipeline > 1,
    ),
)


@dataclass(frozen=True)
class BAdam:
    """Of a run whose plan.approximate names it."""

    gap: int = setting(100, "steps until the next block", least=1)
    order: Literal["ascending", "descending", "random"] = setting(
        "ascending", "of the blocks; random: drawn anew each time all have been trained"
    )
    ends: ClassVar[bool] = False

    def layers(self, seed: int, turn: int, count: int) -> Collection[int]:
        cycle, place = divmod(turn, count)
        if self.order == "random":
            return [int(uniform(seed, f"{KEY}.{cycle}", 0, count).argsort()[place])]
        return [place if self.order == "ascending" else count - 1 - place]


technique(
    KEY, BAdam, "settings of plan.approximate: [badam]", exact=False,
    touches=frozenset({"the backward pass"}),
    method="outsize.runtime.special.sampled.Sampled",
    clashes=CLASHES,
)  # fmt: skip
