"""Action: one thing that one worker does, on one lane."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal

from outsize.registry import Registry


class Lane(StrEnum):
    """What an action occupies while it runs. A thread each, on an accelerator with a stream."""

    COMPUTE = "compute"
    FETCH = "fetch"  # bytes towards the device tier
    EVICT = "evict"  # bytes away from it
    HOST = "host"  # computing where the bytes rest, beside the device
    COPY = "copy"  # batches towards a device whose memory is not the host's
    NETWORK = "network"  # states between workers
    SEND = "send"  # activations and their gradients to workers of other stages
    RECEIVE = "receive"  # and from them
    MERGE = "merge"  # gradients between workers that have copies of a stage
    EXCHANGE = "exchange"  # sums of what all workers of a pipeline have made

    __hash__ = str.__hash__  # of Enum it is a call of Python's


class Kind(str):
    """What an action does: a name, and what follows from it wherever actions are placed, priced and
    proved. `Kind(name)` is the one declared with that name; OutsizeError where none is. A technique
    declares its own by `Kind.add`.

    reads: the parameters with which it computes: "uses", those that its stage's passes use; "own",
    its stage's alone; "", none. adds: to gradients of weights. way: "forward" from a stage's inputs
    to its outputs, "back" from the gradient of its outputs to that of its inputs, or "". end: of a
    pass that every worker of a pipeline does (outsize/schedule/ends.py), the end of a microbatch's
    path at which it is: "first", "last", or "". lane: where it runs.
    """

    COPY: ClassVar[Kind]  # a microbatch's rows to a device whose memory is not the host's
    FORWARD: ClassVar[Kind]  # a stage's outputs from its inputs
    LOSS: ClassVar[Kind]  # the last stage: the loss from its inputs, and gradients made with it
    RECOMPUTE: ClassVar[Kind]  # a stage's forward again, to have its activations
    BACKWARD: ClassVar[Kind]  # gradients of a stage's inputs and weights
    BACKWARD_INPUT: ClassVar[Kind]  # of its inputs alone
    BACKWARD_WEIGHT: ClassVar[Kind]  # of its weights, after BACKWARD_INPUT
    NORM: ClassVar[Kind]  # the global gradient norm, and from it the clipping factor
    UPDATE: ClassVar[Kind]  # the optimizer's step on a stage's chunks, or on one part of them
    PREFILL: ClassVar[Kind]  # tokens of prompts through a stage
    DECODE: ClassVar[Kind]  # one token of each sequence through a stage
    SAMPLE: ClassVar[Kind]  # the next tokens, from what the last stage gave, told to every worker
    FETCH: ClassVar[Kind]  # a state of a stage from the tier it rests on
    EVICT: ClassVar[Kind]  # a state of a stage to the tier it rests on
    SEND: ClassVar[Kind]  # an activation or a gradient to the worker of a neighbouring stage
    RECV: ClassVar[Kind]  # the other end of SEND
    GATHER: ClassVar[Kind]  # a stage's parameters from the workers over which they are cut
    REDUCE: ClassVar[Kind]  # a stage's gradients, summed over workers that have parts of the sum
    COLLECT: ClassVar[Kind]  # updated parameters from the workers that updated them
    MERGE: ClassVar[Kind]  # a stage's gradients, summed over the workers that have copies of it
    EXCHANGE: ClassVar[Kind]  # what passes of all workers of a pipeline have made, summed

    reads: Reads
    adds: bool
    way: Way
    end: End
    lane: Lane

    def __new__(cls, name: str) -> Kind:
        return KINDS.get(name)

    def __reduce__(self) -> tuple[type[Kind], tuple[str]]:
        return Kind, (str(self),)

    @classmethod
    def add(
        cls,
        name: str,
        reads: Reads = "",
        adds: bool = False,
        end: End = "",
        lane: Lane = Lane.COMPUTE,
        way: Way = "",
    ) -> Kind:
        """Declare a kind. OutsizeError where the name is taken."""
        made = str.__new__(cls, name)
        made.reads, made.adds, made.end, made.lane, made.way = reads, adds, end, lane, way
        return KINDS.add(name, made)


Reads = Literal["", "uses", "own"]
Way = Literal["", "forward", "back"]
End = Literal["", "first", "last"]
KINDS: Registry[Kind] = Registry("kind of action")

for _name in ("FORWARD", "PREFILL", "DECODE"):
    setattr(Kind, _name, Kind.add(_name, "uses", way="forward"))
for _name in ("BACKWARD", "BACKWARD_INPUT"):
    setattr(Kind, _name, Kind.add(_name, "uses", adds=True, way="back"))
Kind.LOSS = Kind.add("LOSS", "uses", adds=True, way="forward")
Kind.RECOMPUTE = Kind.add("RECOMPUTE", "uses")
Kind.BACKWARD_WEIGHT = Kind.add("BACKWARD_WEIGHT", "uses", adds=True)
for _name in ("NORM", "UPDATE", "SAMPLE"):
    setattr(Kind, _name, Kind.add(_name))
for _name, _lane in (
    ("FETCH", Lane.FETCH), ("EVICT", Lane.EVICT), ("SEND", Lane.SEND), ("RECV", Lane.RECEIVE),
    ("GATHER", Lane.NETWORK), ("REDUCE", Lane.NETWORK), ("COLLECT", Lane.NETWORK),
    ("MERGE", Lane.MERGE), ("EXCHANGE", Lane.EXCHANGE), ("COPY", Lane.COPY),
):  # fmt: skip
    setattr(Kind, _name, Kind.add(_name, lane=_lane))


class State(StrEnum):
    """What an action that moves bytes moves."""

    NONE = ""  # every other kind of action
    PARAMETERS = "parameters"
    GRADIENTS = "gradients"  # of parameters; in SEND and RECV those of a stage's outputs
    OPTIMIZER = "optimizer"  # master copy and moments
    ACTIVATIONS = "activations"
    SUMS = "sums"  # what the workers' parts of the last layer have in common, as of a softmax

    __hash__ = str.__hash__


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
        return f"{self.kind}.{self.state.value}" if self.state else self.kind

    def __str__(self) -> str:
        stage = _index(self.stage) + (f"#{self.part}" if self.part != WHOLE else "")
        words = [self.label, stage, _index(self.microbatch), self.lane.value]
        words += [f"{where}{count:+d}" for where, count in self.allocates]
        if self.workspace:
            words.append(f"workspace={self.workspace}")
        return " ".join(words)


def _index(value: int) -> str:
    return "*" if value == WHOLE else str(value)
