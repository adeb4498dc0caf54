"""Action: one thing that one worker does, on one lane."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Lane(StrEnum):
    """What an action occupies while it runs. A CUDA stream or a CPU thread each."""

    COMPUTE = "compute"


class Kind(StrEnum):
    """What an action does. A kind is added here with the code that runs it."""

    FORWARD = "FORWARD"  # a stage's outputs from its inputs
    RECOMPUTE = "RECOMPUTE"  # a stage's forward again, to have its activations
    BACKWARD = "BACKWARD"  # gradients of a stage's inputs and weights
    BACKWARD_INPUT = "BACKWARD_INPUT"  # of its inputs alone
    BACKWARD_WEIGHT = "BACKWARD_WEIGHT"  # of its weights, after BACKWARD_INPUT
    NORM = "NORM"  # the global gradient norm, and from it the clipping factor
    UPDATE = "UPDATE"  # the optimizer's step on a stage's chunks
    PREFILL = "PREFILL"  # tokens of prompts through a stage
    DECODE = "DECODE"  # one token of each sequence through a stage


WHOLE_STEP = -1  # the stage or microbatch of an action that is of no single one


@dataclass(frozen=True, slots=True)
class Action:
    """kind, for a stage and a microbatch, on a lane.

    allocates: bytes by "tier/kind" that stay when it ends, negative where it frees.
    workspace: bytes of the device tier above what is live before it, while it runs.
    """

    kind: Kind
    stage: int = WHOLE_STEP
    microbatch: int = WHOLE_STEP
    lane: Lane = Lane.COMPUTE
    allocates: tuple[tuple[str, int], ...] = ()
    workspace: int = 0

    @property
    def key(self) -> tuple[Kind, int, int]:
        """What names an action within a schedule."""
        return (self.kind, self.stage, self.microbatch)

    def __str__(self) -> str:
        words = [self.kind.value, _index(self.stage), _index(self.microbatch), self.lane.value]
        words += [f"{where}{count:+d}" for where, count in self.allocates]
        if self.workspace:
            words.append(f"workspace={self.workspace}")
        return " ".join(words)


def _index(value: int) -> str:
    return "*" if value == WHOLE_STEP else str(value)
