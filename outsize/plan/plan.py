"""Plan: how a model is spread over devices, memory and time. Frozen data, valid once made.

A model is cut into segments: its prologue, its blocks, its epilogue. A stage is a run of
consecutive segments that one action computes. Everything that changes no number is a field here;
what changes the maths stands under `approximate`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from outsize.errors import OutsizeError, nearest

Dtype = Literal["float64", "float32", "bfloat16"]
DTYPES: tuple[Dtype, ...] = ("float64", "float32", "bfloat16")
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
DEVICE = "device"
POLICIES = ("belady", "lru", "static")
ORDERS = ("microbatch", "layer")
UPDATES = ("apart", "behind")
PART = 1 << 20  # elements: parts begin where a tier's checksums do, in every dtype
APPROXIMATE = {
    "bfloat16-weights": "weights updated in bfloat16 without a float32 master copy",
    "zeroth-order": "two losses along a random direction in place of a gradient (MeZO, ZO2)",
    "frozen-by-dynamics": "weights that change least are left alone for a while (SlimFit)",
}


@dataclass(frozen=True)
class Precision:
    """What is computed and held in which dtype.

    compute: parameters, activations. master: what the optimizer updates; None where it updates
    the parameters themselves. gradients, optimizer: the accumulated gradients, the moments.
    """

    compute: Dtype = "float32"
    master: Dtype | None = None
    gradients: Dtype = "float32"
    optimizer: Dtype = "float32"

    @staticmethod
    def named(name: str) -> Precision:
        """The usual precision of a name: "float32", "float64", or "bfloat16" with fp32 master."""
        if name == "bfloat16":
            return Precision("bfloat16", "float32", "float32", "float32")
        if name not in DTYPES:
            raise OutsizeError(f"precision {name!r} is not known{nearest(name, DTYPES)}")
        return Precision(name, None, name, name)


@dataclass(frozen=True)
class Rest:
    """The tiers on which a stage's states rest between uses: "device", or the name of another.

    optimizer: the master copy and the moments. activations: what FORWARD keeps for BACKWARD.
    """

    parameters: str = "device"
    gradients: str = "device"
    optimizer: str = "device"
    activations: str = "device"


@dataclass(frozen=True)
class Stage:
    """Segments [first, last) as one unit of the schedule.

    recompute: nothing (), the whole stage ("block",), or the named submodules of its blocks.
    rest: where its states rest. spill: of its activations, those of the named submodules go to
    rest.activations; () stands for all of them.
    """

    first: int
    last: int
    recompute: tuple[str, ...] = ()
    rest: Rest = Rest()
    spill: tuple[str, ...] = ()

    @property
    def spills(self) -> bool:
        """Some of its activations rest below the device tier."""
        return self.rest.activations != DEVICE

    @property
    def whole(self) -> bool:
        """Only the stage's input is kept; everything else is computed again."""
        return self.recompute == ("block",)


@dataclass(frozen=True)
class Stream:
    """How states that rest below the device tier pass through its pool.

    resident: stages whose states are there at once (Superpipeline's k); returned: stages given
    back at a time (its k'). pool: bytes; 0: the least that holds `resident` stages. policy: what
    else stays. part: elements of the optimizer states that are updated at a time. parts: parts of
    a stage's update that are there at once, with as many coming or going beside them. host: of
    every so many parts one is updated on the device, the others where they rest, on tiers of memory
    (0: all on the device).
    """

    resident: int = 2
    returned: int = 1
    pool: int = 0
    policy: Literal["belady", "lru", "static"] = "belady"
    part: int = 1 << 22
    parts: int = 1
    host: int = 0

    def __post_init__(self) -> None:
        for name in ("resident", "returned", "parts"):
            _positive(f"stream.{name}", getattr(self, name))
        if self.returned > self.resident:
            raise OutsizeError(
                f"plan: stream.returned is {self.returned}; expected at most stream.resident,"
                f" {self.resident}"
            )
        for name in ("pool", "host"):
            if getattr(self, name) < 0:
                raise OutsizeError(
                    f"plan: stream.{name} is {getattr(self, name)}; expected 0 or more"
                )
        if self.policy not in POLICIES:
            raise OutsizeError(
                f"plan: stream.policy {self.policy!r}{nearest(self.policy, POLICIES)}"
            )
        if self.part < PART or self.part % PART:
            raise OutsizeError(
                f"plan: stream.part is {self.part}; expected a multiple of {PART} elements"
            )


@dataclass(frozen=True)
class Plan:
    """One step of training on one device.

    segments: their number in the model. stages: in order, covering every segment once.
    rows: rows of a step; microbatch_rows: rows of a microbatch. sequence: tokens a row (0 for
    models whose inputs are not tokens). loss_chunk: tokens whose logits exist at once (0: all).
    mlp_tile: tokens whose feed-forward activations exist at once (0: all). split_backward:
    BACKWARD_INPUT and BACKWARD_WEIGHT apart. budget: bytes of the device tier, None without limit.
    order: every stage of a microbatch before the next one, or every microbatch of a stage before
    the next one ("layer"), so that weights that stream pass once however many there are.
    update: of all stages when the gradient's norm is known ("apart"), or of each right behind its
    backward pass ("behind": no clipping). stream: for states that rest below the device.
    sequence_chunk: tokens of a microbatch that are in a block at once where the block is recomputed
    whole, and in the epilogue (0: all).
    """

    segments: int
    stages: tuple[Stage, ...]
    rows: int = 1
    microbatch_rows: int = 1
    sequence: int = 0
    precision: Precision = field(default_factory=Precision)
    loss_chunk: int = 0
    mlp_tile: int = 0
    split_backward: bool = False
    budget: int | None = None
    approximate: tuple[str, ...] = ()
    order: Literal["microbatch", "layer"] = "microbatch"
    update: Literal["apart", "behind"] = "apart"
    stream: Stream = field(default_factory=Stream)
    sequence_chunk: int = 0

    def __post_init__(self) -> None:
        for name in ("segments", "rows", "microbatch_rows"):
            _positive(name, getattr(self, name))
        for name in ("sequence", "loss_chunk", "mlp_tile", "sequence_chunk"):
            if getattr(self, name) < 0:
                raise OutsizeError(f"plan: {name} is {getattr(self, name)}; expected 0 or more")
        if self.budget is not None:
            _positive("budget", self.budget)
        for name, known in (("order", ORDERS), ("update", UPDATES)):
            if getattr(self, name) not in known:
                raise OutsizeError(
                    f"plan: {name} is {getattr(self, name)!r}{nearest(getattr(self, name), known)}"
                )
        self._check_stages()
        self._check_chunk()
        self._check_approximate()

    def _check_stages(self) -> None:
        at = 0
        for index, stage in enumerate(self.stages):
            if stage.first != at or stage.last <= stage.first:
                raise OutsizeError(
                    f"plan: stage {index} holds segments [{stage.first}, {stage.last});"
                    f" expected it to begin at {at} and to hold one at least"
                )
            both = sorted(set(stage.recompute) & set(stage.spill))
            if both:
                raise OutsizeError(
                    f"plan: stage {index} has {both[0]!r} in recompute and in spill: what is"
                    " computed again keeps nothing that could rest elsewhere; leave one out"
                )
            ends = stage.first == 0 or stage.last == self.segments
            if stage.whole and ends and self.segments > 1:
                raise OutsizeError(
                    f"plan: stage {index} recomputes the model's prologue or epilogue;"
                    " only blocks can be recomputed whole: set its recompute to []"
                )
            at = stage.last
        if at != self.segments:
            raise OutsizeError(
                f"plan: stages cover {at} segments of {self.segments}; every segment needs a stage"
            )

    def _check_chunk(self) -> None:
        if not self.sequence_chunk:
            return
        if not any(stage.whole for stage in self.stages):
            raise OutsizeError(
                f"plan: sequence_chunk is {self.sequence_chunk}, but no stage has recompute"
                " [block]; only blocks that are recomputed whole run in chunks of the sequence"
            )
        if self.split_backward:
            raise OutsizeError(
                f"plan: sequence_chunk is {self.sequence_chunk} and split_backward is set; weight"
                " gradients kept for later would hold every chunk: set one of them to 0 or false"
            )

    def _check_approximate(self) -> None:
        for name in self.approximate:
            if name not in APPROXIMATE:
                raise OutsizeError(
                    f"plan: approximate holds {name!r}{nearest(name, tuple(APPROXIMATE))}"
                )
        for name, other, found in _CLASHES:
            if name in self.approximate and found(self):
                raise OutsizeError(
                    f"plan: approximate holds {name} and the plan has {other}, which do not go"
                    " together: leave one of them out"
                )
        precision = self.precision
        bare = precision.compute == "bfloat16" and precision.master is None
        if bare and "bfloat16-weights" not in self.approximate:
            raise OutsizeError(
                "plan: bfloat16 without a master copy loses updates under half an ulp;"
                " set precision.master to float32, or name bfloat16-weights under approximate"
            )

    def _rests(self, *states: str) -> bool:
        """Whether one of these states of some stage rests below the device."""
        return any(
            getattr(stage.rest, state) != DEVICE for stage in self.stages for state in states
        )

    @property
    def microbatches(self) -> int:
        """Microbatches of a step; the last may have fewer rows."""
        return -(-self.rows // self.microbatch_rows)

    def rows_of(self, microbatch: int) -> tuple[int, int]:
        """Rows [start, stop) of a microbatch."""
        start = microbatch * self.microbatch_rows
        return start, min(start + self.microbatch_rows, self.rows)


# What a name under `approximate` cannot go with: it computes otherwise, or nothing would be done.
_CLASHES: tuple[tuple[str, str, Callable[[Plan], bool]], ...] = (
    (
        "zeroth-order",
        "states other than parameters below the device: there are none",
        lambda p: p._rests("gradients", "optimizer", "activations"),
    ),
    ("zeroth-order", "recompute", lambda p: any(stage.recompute for stage in p.stages)),
    ("zeroth-order", "split_backward", lambda p: p.split_backward),
    ("zeroth-order", "update: behind", lambda p: p.update == "behind"),
    ("zeroth-order", "frozen-by-dynamics", lambda p: "frozen-by-dynamics" in p.approximate),
    (
        "frozen-by-dynamics",
        "parameters or optimizer states below the device: what is frozen would move all the same",
        lambda p: p._rests("parameters", "optimizer"),
    ),
)


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise OutsizeError(f"plan: {name} is {value}; expected 1 or more")


def per_segment(segments: int, recompute: tuple[str, ...] = ()) -> tuple[Stage, ...]:
    """A stage a segment, the blocks (all but the first and last segment) with `recompute`."""
    return tuple(
        Stage(i, i + 1, recompute if 0 < i < segments - 1 else ()) for i in range(segments)
    )
