"""Plan: how a model is spread over devices, memory and time. Frozen data, valid once made.

A model is cut into segments: its prologue, its blocks, its epilogue. A stage is a run of
consecutive segments that one action computes. Everything that changes no number is a field here;
what changes the maths stands under `approximate`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Literal

from outsize.collectives.mesh import Mesh
from outsize.errors import OutsizeError, counted, expect, nearest
from outsize.plan.approximate import APPROXIMATE, Local, clash, known_names
from outsize.plan.settings import NONE, Extended, Settings, extended
from outsize.plan.spread import Pipelined, Sharding, may_rest_below, share
from outsize.registry import refuse_shared

Dtype = Literal["float64", "float32", "bfloat16"]
Computed = Literal["float64", "float32", "bfloat16", "float16"]
DTYPES: tuple[Dtype, ...] = ("float64", "float32", "bfloat16")
HALVES: tuple[Computed, ...] = ("bfloat16", "float16")
INVARIANT = "+invariant"  # behind a precision: each token alone, as serving computes it
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
DEVICE = "device"
DISK, FILES = "disk", "files"  # a tier; the files of a model, in which frozen weights stay
POLICIES = ("belady", "lru", "static")
ORDERS = ("microbatch", "layer")
UPDATES = ("apart", "behind")
PART = 1 << 20  # elements: parts begin where a tier's checksums do, in every dtype


@dataclass(frozen=True)
class Precision:
    """What is computed and held in which dtype.

    compute: parameters, activations; with float16 losses are scaled. master: what the optimizer
    updates; None where it updates the parameters themselves. gradients, optimizer: the accumulated
    gradients, the moments. invariant: forward passes compute each token alone, bit for bit as
    serving does (outsize/kernels/rows.py).
    """

    compute: Computed = "float32"
    master: Dtype | None = None
    gradients: Dtype = "float32"
    optimizer: Dtype = "float32"
    invariant: bool = False

    @staticmethod
    def named(said: str) -> Precision:
        """The usual precision of a name: "float32", "float64", or "bfloat16" and "float16" with
        fp32 master; "float32+invariant", "bfloat16+invariant"."""
        alone = tuple(name + INVARIANT for name in ("float32", "bfloat16"))
        known, name = (*DTYPES, "float16", *alone), said
        if said not in known:
            raise OutsizeError(f"precision {said!r} is not known{nearest(said, known)}")
        if said in alone:
            name = said.removesuffix(INVARIANT)
        if name in HALVES:
            return Precision(name, "float32", "float32", "float32", said in alone)
        assert name in DTYPES, "it is known"
        return Precision(name, None, name, name, said in alone)

    @property
    def name(self) -> str:
        """Of what is computed."""
        return self.compute + (INVARIANT if self.invariant else "")

    @property
    def scaled(self) -> bool:
        """Whether losses are scaled (outsize/runtime/loss_scale.py)."""
        return self.compute == "float16"


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
        """Only the stage's input is kept (of an adopted module each block's, as its own code runs
        between them); everything else is computed again."""
        return self.recompute == ("block",)


@dataclass(frozen=True)
class Stream:
    """How states that rest below the device tier pass through its pool.

    resident: stages whose states are there at once (Superpipeline's k); returned: stages given
    back at a time (its k'). pool: bytes; 0: the least that holds `resident` stages. policy: what
    else stays. part: elements of the optimizer states that are updated at a time. parts: parts of
    a stage's update that are there at once, with as many coming or going beside them. over: parts
    of every `host` that are updated on the device, others at rest in memory (host 0: all of them).
    """

    resident: int = 2
    returned: int = 1
    pool: int = 0
    policy: Literal["belady", "lru", "static"] = "belady"
    part: int = 1 << 22
    parts: int = 1
    host: int = 0
    over: int = 1

    def __post_init__(self) -> None:
        _least(self, 1, "resident", "returned", "parts", "over", within="stream.")
        for name, of, most in ("returned", "resident", self.resident), ("over", "host", self.host):
            value, least = getattr(self, name), f"at most stream.{of}, {most}"
            expect(value <= max(most, 1), f"plan: stream.{name}", value, least)
        _least(self, 0, "pool", "host", within="stream.")
        if self.policy not in POLICIES:
            raise OutsizeError(
                f"plan: stream.policy {self.policy!r}{nearest(self.policy, POLICIES)}"
            )
        parts = self.part >= PART and self.part % PART == 0
        expect(parts, "plan: stream.part", self.part, f"a multiple of {PART} elements")


@extended
@dataclass(frozen=True)
class Plan(Extended):
    """One step of training.

    segments: their number in the model. stages: in order, covering every segment once.
    rows: rows of a step; row_shares: of each of the workers among whom these fall ((): as equal as
    can be); microbatch_rows: rows of a microbatch, of which all workers have equally many.
    sequence: tokens a row (0 for models whose inputs are not tokens). loss_chunk: tokens whose
    logits exist at once (0: all). mlp_tile: tokens whose feed-forward activations exist at once (0:
    all). split_backward: BACKWARD_INPUT and BACKWARD_WEIGHT apart. budget: bytes of the device
    tier, None without limit.
    order: every stage of a microbatch before the next one, or every microbatch of a stage before
    the next one ("layer"), so that weights that stream pass once however many there are.
    update: of all stages when the gradient's norm is known ("apart"), or of each right behind its
    backward pass ("behind": no clipping). stream: for states that rest below the device.
    local: of losses of groups, where `approximate` names them. pipeline: how stages are played
    where the mesh has such an axis; microbatches then go in the order of its schedule. settings:
    those of techniques, as outsize/plan/settings.py says; each is also a keyword and an attribute,
    which type checkers do not know: for them NONE.having({name: value}) there, and settings.get.
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
    mesh: Mesh = field(default_factory=Mesh)
    shards: Sharding = field(default_factory=Sharding)
    sequence_parallel: bool = False
    local: Local = field(default_factory=Local)
    pipeline: Pipelined = field(default_factory=Pipelined)
    row_shares: tuple[int, ...] = ()
    settings: Settings = NONE

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", self.settings.changed)
        _least(self, 1, "segments", "rows", "microbatch_rows")
        _least(self, 0, "sequence", "loss_chunk", "mlp_tile")
        if self.budget is not None:
            _least(self, 1, "budget")
        for name, known in (("order", ORDERS), ("update", UPDATES)):
            if getattr(self, name) not in known:
                raise OutsizeError(
                    f"plan: {name} is {getattr(self, name)!r}{nearest(getattr(self, name), known)}"
                )
        self._check_stages()
        self._check_spread()
        self.settings.check(self)
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

    def _check_spread(self) -> None:
        self.shards.check(self.mesh.data)
        if self.rows < self.mesh.rows:
            names = " and ".join(self.mesh.cutting("rows"))
            raise OutsizeError(
                f"plan: rows is {self.rows}, too few for {self.mesh.rows} workers of the {names}"
                f" axis; expected {self.mesh.rows} or more"
            )
        shares, parts = self.row_shares, self.mesh.rows
        whole = len(shares) == parts and sum(shares) == self.rows and min(shares) >= 1
        expected = f"none, or {counted(parts, 'number')} from 1 on, {self.rows} in all"
        expect(not shares or whole, "plan: row_shares", list(shares), expected)
        if self.sequence_parallel and self.mesh.tensor == 1:
            raise OutsizeError(
                "plan.sequence_parallel is set, but mesh.tensor is 1; set it to false, or give the"
                " tensor axis 2 workers or more"
            )
        for state in ("parameters", "gradients"):
            if not self.may_rest_below(state) and self.rests_below(state):
                axes = [axis.name for axis in self.mesh.axes if axis.batch]
                count = prod(self.mesh[name] for name in axes)
                zero = "zero 3" if state == "parameters" else "zero 2 or 3"
                cut = f", cut them over workers ({zero})" if self.mesh.data > 1 else ""
                raise OutsizeError(
                    f"plan: {state} rest below the device while {count} workers share them"
                    f" ({self.shards}); let {state} rest on the device{cut}, or take"
                    f" mesh.{' and mesh.'.join(axes)} to 1"
                )
        for axis in self.mesh.axes:
            axis.check(self, self.mesh[axis.name])
        if self.mesh.pipeline > 1:
            self._check_pipeline()

    def _check_pipeline(self) -> None:
        axis = f"mesh.pipeline is {self.mesh.pipeline}"
        if self.order == "layer":
            raise OutsizeError(
                f"plan: order is 'layer', but {axis}: a pipeline's schedule says the order; set it"
                " to 'microbatch'"
            )
        if self.update == "behind":
            raise OutsizeError(
                f"plan: update is 'behind', but {axis}: stages are updated when all workers know"
                " the norm; set it to 'apart'"
            )
        if self.mesh.pipeline > len(self.stages):
            raise OutsizeError(
                f"plan: {axis}, but the plan has {counted(len(self.stages), 'stage')}, and one"
                " without blocks"
                f" cannot run; expected at most {counted(len(self.stages), 'worker')}"
            )

    def _check_approximate(self) -> None:
        for name in self.approximate:
            if name not in APPROXIMATE and name not in known_names():
                raise OutsizeError(
                    f"plan: approximate holds {name!r}{nearest(name, known_names())}"
                )
        refuse_shared(self.approximate, [one for one, _ in self.settings.every()])
        if found := clash(self, self.approximate):
            raise OutsizeError(
                f"plan: approximate holds {found[0]} and the plan has {found[1]}, which do not go"
                " together: leave one of them out"
            )
        self._check_precision()

    def _check_precision(self) -> None:
        precision = self.precision
        bare = precision.compute == "bfloat16" and precision.master is None
        if bare and "bfloat16-weights" not in self.approximate:
            raise OutsizeError(
                "plan: bfloat16 without a master copy loses updates under half an ulp;"
                " set precision.master to float32, or name bfloat16-weights under approximate"
            )
        if precision.scaled and precision.master is None:
            raise OutsizeError(
                "plan: precision.compute is float16 and precision.master None; expected float32,"
                " which has what updates add"
            )
        if precision.scaled and self.update == "behind":
            raise OutsizeError(
                "plan: update is 'behind' and precision.compute float16: whether a gradient has"
                " overflowed is known only when every stage has its own; set update to 'apart', or"
                " precision to bfloat16"
            )

    def may_rest_below(self, state: str) -> bool:
        """Whether parameters or gradients can rest below the device."""
        return may_rest_below(state, self.shards, self.mesh)

    def rests_below(self, *states: str) -> bool:
        """Whether one of these states of some stage rests below the device."""
        return any(
            getattr(stage.rest, state) != DEVICE for stage in self.stages for state in states
        )

    @property
    def block_tokens(self) -> int:
        """Tokens that are in a block at once where it is recomputed whole; 0: all."""
        return min((value for one, value in self.settings.every() if one.tokens), default=0)

    @property
    def by_rows(self) -> int:
        """Blocks at the front that share rows over the tensor axis (`Settings.by_rows`)."""
        return self.settings.by_rows if self.mesh.tensor > 1 else 0

    @property
    def busiest(self) -> int:
        """The first of the workers with the most rows, as `rows_at` counts them."""
        return max(range(len(self.row_shares)), key=self.row_shares.__getitem__, default=0)

    @property
    def own_rows(self) -> int:
        """Rows of a step that no worker has more of."""
        start, stop = self.rows_at(self.busiest)
        return stop - start

    @property
    def microbatches(self) -> int:
        """Microbatches of a step on every worker; the last may have fewer rows. They are fewer and
        larger than asked for where some worker has not as many rows."""
        wanted = -(-self.own_rows // self.microbatch_rows)
        return min(wanted, min(self.row_shares, default=self.rows // self.mesh.rows))

    @property
    def microbatch_size(self) -> int:
        """Rows of the largest microbatch."""
        return self.rows_of(0, self.busiest)[1]

    @property
    def most_rows(self) -> int:
        """Rows that no microbatch of a worker has more of, in a step or in an evaluation."""
        return max(self.microbatch_size, self.microbatch_rows)

    def rows_at(self, place: int) -> tuple[int, int]:
        """Rows [start, stop) of the step that the worker with so many of them before it
        (`Mesh.rows_index`) takes: its share, or as equal as they can be, the first having most."""
        if self.row_shares:
            start = sum(self.row_shares[:place])
            return start, start + self.row_shares[place]
        return share(self.rows, self.mesh.rows, place)

    def rows_of(self, microbatch: int, place: int = 0) -> tuple[int, int]:
        """Rows [start, stop) of a microbatch, among those of its worker."""
        start, stop = self.rows_at(place)
        size, count = self.microbatch_rows, self.microbatches
        own = stop - start
        if (count - 1) * size < own <= count * size:
            return microbatch * size, min((microbatch + 1) * size, own)
        return share(own, count, microbatch)  # none is empty


def _least(of: Plan | Stream, least: int, *names: str, within: str = "") -> None:
    """Refuse fields that are less."""
    for name in names:
        value = getattr(of, name)
        expect(value >= least, f"plan: {within}{name}", value, f"{least} or more")


def per_segment(segments: int, recompute: tuple[str, ...] = ()) -> tuple[Stage, ...]:
    """A stage a segment, the blocks (all but the first and last segment) with `recompute`."""
    return tuple(
        Stage(i, i + 1, recompute if 0 < i < segments - 1 else ()) for i in range(segments)
    )
