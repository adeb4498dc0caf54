"""How a published run was spread over its devices, and by which software: what a forecast asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outsize.errors import OutsizeError, expect, nearest

Recompute = Literal["none", "full", "attention", "half", "norms", "experts"]
Vocabulary = Literal["last", "cut", "interlaced", "moved"]
STORED = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
NARROW = (
    "fp8",
    "fp8-rows",
    "mxfp8",
    "nvfp4",
)  # products of layers; all else of the step is in bf16
PRECISIONS = (*STORED, *NARROW)
RUNS = ("fp32", "bf16")  # what this runtime has; others are foretold alone


@dataclass(frozen=True)
class Stack:
    """A trainer's habits. states: bytes a parameter of weights, gradients and optimizer; fused:
    whether it has kernels for elementwise chains; hidden: which sums are beside computing;
    scattered: whether what passes between stages is cut over the tensor axis."""

    name: str
    like: str = ""  # the stack whose residual it shares, where it differs in habits alone
    weights: float = 2
    gradients: float = 4
    optimizer: float = 12
    attention: str = "flash"
    fused: bool = True
    sharded: bool = False  # whether the optimizer's states are, where nothing is said
    logits: float = 10.0  # bytes of a logit at the peak
    in_place: bool = False  # whether one pass turns logits into their gradient, where it can
    logits_cut: bool = True  # over the tensor axis, where the loss is computed
    buffers: int = 0  # microbatches that a stage holds beyond those of 1F1B
    norms: bool = False  # whether norms are fused where other chains are not
    family: str = "torch"  # "megatron": gradients are added up in products, one buffer of them
    beside_data: bool = True
    beside_tensor: bool = False
    # Whether sums of a backward pass over the tensor axis go on beside products of weights'
    # gradients (Korthikanti et al., Reducing activation recomputation in large transformer models,
    # 2022; Megatron-LM 3.0, LinearWithGradAccumulationAndAsyncCommunication).
    behind: bool = False
    scattered: bool = False
    keys_whole: bool = False  # whether keys and values stay as the context axis gathered them
    sequence: bool = False  # sequence parallelism wherever there is a tensor axis
    vocabulary_cut: bool = True  # over the tensor axis
    calls: int = 1  # in which a layer's sharded parameters are gathered
    blocking: bool = False  # whether the processor waits for every kernel
    prefetched: bool = True  # gathered beside what is computed before
    told: bool = False  # whether the processor waits for counts of tokens before it calls experts
    graphs: bool = False  # whether a step is launched as a whole
    parallel: bool = False  # attention and MLP side by side, with one sum each way
    stops: bool = False  # whether computing again ends with the last tensor that a gradient needs
    summed: float = 0.0  # bytes of a gradient that is added up and summed, where it holds more
    # Whether inputs that were gathered stay for the backward pass, and come in 8 bits where their
    # products have one scale for a tensor (PyTorch's DTensor; torchao, float8_tensor_parallel.py).
    distributed: bool = False
    left: bool = False  # whether the last stage has the layers that whole numbers on others leave
    balanced: bool = False  # whether stages are cut by parameters, embedding and output among them
    joined: bool = False  # whether products of experts gate and cast what they give
    woven: bool = False  # whether experts' exchanges go on beside another microbatch's layers
    # Whether a context axis passes keys and values repeated for all heads and adds its parts up in
    # 32 bits by kernels of their own (torchtitan's repeat_kv, PyTorch's _SDPAMerger).
    merged: bool = False

    @property
    def added(self) -> float:
        """Bytes of a gradient as it is added up and summed."""
        return self.summed or self.gradients

    @property
    def sent(self) -> float:
        """Bytes of it in a message: of a copy in 16 bits beside one in 32 the latter alone."""
        return min(4.0, self.added)


@dataclass(frozen=True)
class Resting:
    """The tiers below the device on which states rest between uses; "": on the device. activations:
    what a forward pass keeps. Optimizer states go below first, then gradients (`gradients`, or
    where weights are), then weights; layers: of how many blocks, the first ones, the last of these
    does (0: of all, with the ends). over: of every `host` parts of an update so many go over the
    device, the others are updated where they rest (host 0: all over the device)."""

    weights: str = ""
    optimizer: str = ""
    activations: str = ""
    gradients: str = ""
    layers: int = 0
    host: int = 0
    over: int = 1

    @property
    def summed(self) -> str:
        """The tier of gradients."""
        return self.gradients or self.weights

    @property
    def apart(self) -> float:
        """The part of an update that is made where gradients and optimizer states rest."""
        return 1 - self.over / self.host if self.host else 0.0

    def parts(self, graded: float) -> tuple[float, float, float]:
        """How much of weights, gradients and optimizer states is below. graded: how much of what
        is there in part."""
        if self.weights:
            return graded, 1.0, 1.0
        if self.gradients:
            return 0.0, graded, 1.0
        return 0.0, 0.0, graded if self.optimizer else 0.0


@dataclass(frozen=True)
class Layout:
    """A mesh, sizes of a step, and what is kept. shards: over how many data-parallel workers the
    parameters are cut (1: none), states: over how many the optimizer's; batch: rows of a step;
    whole: of each stage's layers, those that are recomputed whole where `recompute` is "none";
    wide: layers that stay in 16 bits where others have fewer; seen: tokens of the document that a
    token is in, in the mean, 0 where that is the whole row."""

    devices: int
    rows: int
    batch: int
    sequence: int
    stack: Stack
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    chunks: int = 1
    recompute: Recompute = "none"
    precision: str = "bf16"
    shards: int = 1
    cut_gradients: bool = False
    states: int = 1
    attention: str = "flash"
    sequence_parallel: bool = False
    vocabulary: Vocabulary = "last"
    frozen: bool = False  # adapters are trained, whose work is left out
    assumed: tuple[str, ...] = ()
    whole: int = 0
    resting: Resting = Resting()
    wide: int = 0
    seen: int = 0

    def __post_init__(self) -> None:
        sizes = {
            "devices": self.devices, "rows": self.rows, "batch": self.batch,
            "sequence": self.sequence, "tensor axis": self.tensor,
            "pipeline axis": self.pipeline, "context axis": self.context,
        }  # fmt: skip
        for name, value in sizes.items():
            expect(value >= 1, f"layout: {name}", value, "1 or more")
        if self.precision not in PRECISIONS:
            raise OutsizeError(
                f"layout: precision {self.precision!r}{nearest(self.precision, PRECISIONS)}"
            )
        cut = self.tensor * self.pipeline * self.context
        if self.devices % cut:
            raise OutsizeError(
                f"layout: {self.devices} devices in copies of {cut}"
                f" (tensor {self.tensor} x pipeline {self.pipeline} x context {self.context});"
                " expected whole copies"
            )

    @property
    def data(self) -> int:
        """Copies of the model that have rows of their own."""
        return self.devices // (self.tensor * self.pipeline * self.context)

    @property
    def microbatches(self) -> int:
        """Of a step, on each worker: at least one, the last perhaps smaller."""
        return max(1, -(-self.batch // (self.rows * self.data)))

    @property
    def tokens(self) -> float:
        """Of a microbatch, on one worker of the context axis."""
        return self.rows * self.sequence / self.context

    @property
    def attended(self) -> int:
        """Tokens of the document that a token is in."""
        return self.seen or self.sequence

    @property
    def vocabulary_over(self) -> int:
        """Stages that have a part of the vocabulary each; 1 where it is at the ends."""
        return self.pipeline if self.vocabulary in ("cut", "interlaced") else 1

    @property
    def waiting(self) -> float:
        """Microbatches of a stage beyond those of 1F1B, for parts of a vocabulary on all stages:
        each is a beat that its backward pass comes later (Yeung et al., Balancing pipeline
        parallelism with vocabulary parallelism, 2024: p + 2 with two barriers, 1.5 p interlaced;
        Qi et al., Pipeline parallelism with controllable memory, 2024: lifespans are beats)."""
        if self.vocabulary_over == 1:
            return 0.0
        return 2.0 if self.vocabulary == "cut" else self.pipeline / 2

    @property
    def narrow(self) -> bool:
        return self.precision in NARROW

    @property
    def foretold_only(self) -> bool:
        """Whether this runtime has no such precision: the forecast stands, the run does not."""
        return self.precision not in RUNS


def stored(lay: Layout) -> int:
    """Bytes of an element that is computed with: of 16 bits where products take fewer."""
    return 4 if lay.precision == "fp32" else 2
