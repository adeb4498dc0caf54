"""Action: one thing that one worker does, on one lane."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Lane(StrEnum):
    """What an action occupies while it runs. A CUDA stream or a CPU thread each."""

    COMPUTE = "compute"
    FETCH = "fetch"  # bytes towards the device tier
    EVICT = "evict"  # bytes away from it
    HOST = "host"  # computing where the bytes rest, beside the device
    NETWORK = "network"  # states between workers
    SEND = "send"  # activations and their gradients to workers of other stages
    RECEIVE = "receive"  # and from them
    MERGE = "merge"  # gradients between workers that have copies of a stage
    EXCHANGE = "exchange"  # what all workers have of a vocabulary layer

    __hash__ = str.__hash__  # of Enum it is a call of Python's


class Kind(StrEnum):
    """What an action does."""

    FORWARD = "FORWARD"  # a stage's outputs from its inputs
    RECOMPUTE = "RECOMPUTE"  # a stage's forward again, to have its activations
    BACKWARD = "BACKWARD"  # gradients of a stage's inputs and weights
    BACKWARD_INPUT = "BACKWARD_INPUT"  # of its inputs alone
    BACKWARD_WEIGHT = "BACKWARD_WEIGHT"  # of its weights, after BACKWARD_INPUT
    NORM = "NORM"  # the global gradient norm, and from it the clipping factor
    UPDATE = "UPDATE"  # the optimizer's step on a stage's chunks, or on one part of them
    PREFILL = "PREFILL"  # tokens of prompts through a stage
    DECODE = "DECODE"  # one token of each sequence through a stage
    SAMPLE = "SAMPLE"  # the next tokens, from what the last stage gave, told to every worker
    FETCH = "FETCH"  # a state of a stage from the tier it rests on
    EVICT = "EVICT"  # a state of a stage to the tier it rests on
    SEND = "SEND"  # an activation or a gradient to the worker of a neighbouring stage
    RECV = "RECV"  # the other end of SEND
    GATHER = "GATHER"  # a stage's parameters from the workers over which they are cut
    REDUCE = "REDUCE"  # a stage's gradients, summed over the workers that have parts of the sum
    COLLECT = "COLLECT"  # updated parameters from the workers that updated them
    MERGE = "MERGE"  # a stage's gradients, summed over the workers that have copies of the stage
    EMBED = "EMBED"  # a worker's part of the input layer, where the vocabulary is cut over workers
    EMBED_BACKWARD = "EMBED_BACKWARD"  # the gradient of its part
    OUTPUT_S = "OUTPUT_S"  # a worker's part of the output layer: logits, their largest and sum
    OUTPUT_T = "OUTPUT_T"  # what is left of it once all workers' sums are known: gradients
    EXCHANGE = "EXCHANGE"  # what all workers have of a vocabulary layer, put together

    __hash__ = str.__hash__


class State(StrEnum):
    """What an action that moves bytes moves."""

    NONE = ""  # every other kind of action
    PARAMETERS = "parameters"
    GRADIENTS = "gradients"  # of parameters; in SEND and RECV those of a stage's outputs
    OPTIMIZER = "optimizer"  # master copy and moments
    ACTIVATIONS = "activations"
    SUMS = "sums"  # largest logits and sums of exponentials of each worker's part of the vocabulary

    __hash__ = str.__hash__


AHEAD = (Kind.FORWARD, Kind.PREFILL, Kind.DECODE)  # a stage of a microbatch, on the way to its end

WHOLE = -1  # the stage, microbatch or part of an action that is of no single one


@dataclass(frozen=True, slots=True)
class Action:
    """kind, for a stage and a microbatch, on a lane.

    state: what is moved. part: which piece of the stage's optimizer states, in order. allocates:
    bytes by "tier/kind" that stay when it ends, negative where it frees. workspace: bytes of the
    device tier above what is live before it, while it runs.
    """

    kind: Kind
    stage: int = WHOLE
    microbatch: int = WHOLE
    lane: Lane = Lane.COMPUTE
    allocates: tuple[tuple[str, int], ...] = ()
    workspace: int = 0
    state: State = State.NONE
    part: int = WHOLE

    @property
    def key(self) -> tuple[Kind, State, int, int, int]:
        """What names an action within a schedule."""
        return (self.kind, self.state, self.stage, self.microbatch, self.part)

    @property
    def label(self) -> str:
        """What it does in a word, as "FORWARD" or "FETCH.parameters"."""
        return f"{self.kind.value}.{self.state.value}" if self.state else self.kind.value

    def __str__(self) -> str:
        stage = _index(self.stage) + (f"#{self.part}" if self.part != WHOLE else "")
        words = [self.label, stage, _index(self.microbatch), self.lane.value]
        words += [f"{where}{count:+d}" for where, count in self.allocates]
        if self.workspace:
            words.append(f"workspace={self.workspace}")
        return " ".join(words)


def _index(value: int) -> str:
    return "*" if value == WHOLE else str(value)
