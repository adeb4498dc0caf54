"""The constants that sheets do not give: one factor for each lane, by device and by software.

A factor multiplies the seconds of a lane; its logarithm has a prior (what papers and the makers'
guides say, and how far that is trusted), so that a device or a stack that no other publication has
keeps what is held of it beforehand. Everything is a linear function in logarithms of a row's tags:
one vector of constants, one matrix of tags for each lane.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from outsize.foresight.layout import Layout
from outsize.foresight.runs import Run
from outsize.foresight.shape import Shape
from outsize.foresight.step import AT_END, COMPUTING, LANES, Seconds, Terms, beat, combine

Array = npt.NDArray[np.float64]

# name: (lane, tag, factor held beforehand, deviation of its logarithm). A tag is a device, a family
# of devices, a stack, a kernel of attention, or "" for every run.
PRIORS: Mapping[str, tuple[str, str, float, float]] = {
    # Products reach less than the sheet: clocks fall under load (Calculon, 2023, takes 0.95 of an
    # A100's peak for the largest). Of one device to another as the best products go that Bekman
    # measured (Machine learning engineering, 2026): in 16 bits 0.869 of an A100's peak, 0.803 of an
    # H100's, 0.776 of a B200's, 0.729 of a GB200's, in 8 bits 0.709, 0.763 and 0.723 of the last
    # three; boards of 700 W and more lower their clocks further in what lasts.
    "matmul": ("matmul", "", 1.25, 0.2),
    "matmul A100": ("matmul", "A100", 1.0, 0.15),
    "matmul hot": ("matmul", "hot", 1.15, 0.15),
    "matmul H100": ("matmul", "H100", 1.0, 0.1),
    "matmul B200": ("matmul", "B200", 1.03, 0.1),
    "matmul GB200": ("matmul", "GB200", 1.06, 0.1),
    "matmul GB300": ("matmul", "GB300", 1.0, 0.1),
    "matmul of Megatron on H100": ("matmul", "megatron H100", 0.9, 0.1),
    "matmul of Megatron on A100": ("matmul", "megatron A100", 1.0, 0.1),
    "matmul V100": ("matmul", "V100", 1.1, 0.3),
    "held to 500 W": ("products", "H100-SXM-96", 1.15, 0.15),
    "held to less power": ("products", "limited", 1.4, 0.3),
    "narrow": ("narrow", "", 1.45, 0.2),
    "narrow H100": ("narrow", "H100", 1.0, 0.15),
    "narrow B200": ("narrow", "B200", 0.93, 0.15),
    "narrow GB200": ("narrow", "GB200", 1.05, 0.1),
    "narrow GB300": ("narrow", "GB300", 0.97, 0.1),
    "narrow mxfp8": ("narrow", "mxfp8", 1.1, 0.15),
    "narrow nvfp4": ("narrow", "nvfp4", 1.4, 0.3),
    "attention": ("attention", "", 1.1, 0.2),
    # FlashAttention 1 and 2 use the A100's instructions, which reach 0.6 of the H100's peak.
    "attention of A100 on H100": ("attention", "mma H100", 1.6, 0.15),
    "attention of A100 on B200": ("attention", "mma B200", 2.2, 0.25),
    "flash3 B200": ("attention", "flash3 B200", 1.2, 0.2),
    # Blackwell Ultra has twice the exponentials, so that forward passes of attention are 35% faster
    # (NVIDIA, Making softmax more efficient with NVIDIA Blackwell Ultra, 2026).
    "flash3 of Ultra": ("attention", "flash3 ultra", 0.75, 0.15),
    "flash1": ("attention", "flash1", 1.0, 0.2),
    "scores": ("scores", "", 1.1, 0.2),
    "scores plain": ("scores", "plain", 1.0, 0.3),
    # Mamba-2's kernels in Triton: the mixer of mamba2-2.7b takes 3.7 ms of an MI300X forward and
    # back (4,096 tokens; ROCm/triton, issue 777), half of it beside products: 4 times its bytes.
    "scan": ("scan", "", 4.0, 0.3),
    "traffic": ("traffic", "", 1.2, 0.2),
    "traffic of chains": ("traffic", "chains", 1.2, 0.25),
    "adding": ("adding", "", 1.1, 0.2),
    "cast": ("cast", "", 1.0, 0.4),
    "cast outside of kernels": ("cast", "torch", 1.5, 0.3),
    "narrow by rows": ("narrow", "fp8-rows", 1.4, 0.2),
    "launch": ("launch", "", 1.0, 0.3),
    "blocked": ("blocked", "", 1.4, 0.3),
    # Sums and gathers of large messages reach 1 / 1.3 of a link, within a tenth: 230 of 300 GB/s of
    # an A100's NVLink, 360 of 450 of an H100's (NVIDIA, nccl-tests).
    "tensor": ("tensor", "", 1.3, 0.1),
    "tensor beside": ("tensor", "beside", 0.6, 0.3),
    "exchange": ("exchange", "", 1.3, 0.4),
    "ring": ("ring", "", 1.2, 0.1),
    "stages": ("stages", "", 1.2, 0.4),
    "stages beside": ("passed", "", 1.2, 0.4),
    "gathers": ("gathers", "", 1.3, 0.1),
    "waited": ("waited", "", 2.0, 0.5),
    "sums": ("sums", "", 1.3, 0.1),
    "update": ("update", "", 1.3, 0.3),
    # An MI250 trains MPT at 0.80 of an A100-40GB's rate, by 362 TFLOP/s on its sheet for 312
    # (MosaicML, "Training LLMs with AMD MI250 GPUs and MosaicML", 2023).
    "MI250X": ("computing", "MI250X", 1.45, 0.15),
    "Megatron": ("computing", "megatron", 0.95, 0.1),
    "nodes": ("nodes", "", 0.004, 0.5),  # of a step, for each doubling of the machines
}
PRODUCTS = ("matmul", "narrow", "attention")  # what draws most power
HOT = ("H100", "B200")  # families of boards of 700 W and more
ULTRA = ("GB300", "B300")
MMA = ("flash", "flash1", "triton")
STACK = 0.1  # deviation of a stack's factor on what it computes
FAMILIES = (("GB200", "B200"), ("GB300", "B200"), ("B300", "B200"), ("B200", "B200"),
            ("A800", "A100"), ("A100", "A100"), ("H100", "H100"), ("H200", "H100"),
            ("V100", "V100"), ("MI250X", "MI250X"))  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """Terms of many runs side by side, with their tags: what `seconds` and a fit take."""

    middle: Mapping[str, Array]
    last: Mapping[str, Array]
    end: Mapping[str, Array]
    slots: Array
    stages: Array
    chunks: Array
    nodes: Array
    window: Array
    spare: Array
    norm: Array
    exchanged: Array
    measured: Array
    tags: Sequence[frozenset[str]]


def tags_of(run: Run) -> frozenset[str]:
    """What constants may ask of a row."""
    assert run.layout is not None and run.shape is not None
    found = tags(run.shape, run.layout, run.device)
    return found | {"limited"} if run.limited else found


def tags(shape: Shape, lay: Layout, device: str) -> frozenset[str]:
    """What constants may ask of a layout on a device."""
    stack = lay.stack
    family = next((family for name, family in FAMILIES if device.startswith(name)), "")
    found = {
        "", device, family, stack.family, lay.attention, lay.precision,
        f"stack {stack.like or stack.name}", f"{lay.attention} {family}",
        f"{'mma' if lay.attention in MMA else ''} {family}", f"{stack.family} {family}",
    }  # fmt: skip
    for tag, holds in (
        ("hot", family in HOT), (f"{lay.attention} ultra", device.startswith(ULTRA)),
        ("chains", shape.gated and not stack.fused), ("beside", stack.beside_tensor),
    ):  # fmt: skip
        if holds:
            found.add(tag)
    return frozenset(found)


def batch_of(terms: Sequence[Terms], tags: Sequence[frozenset[str]]) -> Batch:
    """Runs side by side."""

    def lanes(of: Sequence[Mapping[str, float]], names: Iterable[str]) -> dict[str, Array]:
        return {name: np.array([each.get(name, 0.0) for each in of]) for name in names}

    def one(name: str) -> Array:
        return np.array([float(getattr(each, name)) for each in terms])

    return Batch(
        lanes([each.middle for each in terms], LANES),
        lanes([each.last for each in terms], LANES),
        lanes([each.end for each in terms], AT_END),
        one("slots"), one("stages"), one("chunks"), one("nodes"), one("window"),
        one("spare"), one("norm"), one("exchanged"), one("measured"), tags,
    )  # fmt: skip


@dataclass(frozen=True)
class Model:
    """The constants of a batch: their names, priors, and which runs each applies to."""

    names: tuple[str, ...]
    lanes: tuple[str, ...]
    centre: Array
    deviation: Array
    applies: Array  # runs x constants

    @classmethod
    def of(cls, batch: Batch) -> Model:
        """The priors, and a factor for each stack that occurs."""
        stacks = sorted({tag for tags in batch.tags for tag in tags if tag.startswith("stack ")})
        table = [(name, *prior) for name, prior in PRIORS.items()]
        table += [(stack, "computing", stack, 1.0, STACK) for stack in stacks]
        applies = np.array(
            [[tag in tags for _, _, tag, _, _ in table] for tags in batch.tags], dtype=float
        ).reshape(len(batch.tags), len(table))
        return cls(
            tuple(row[0] for row in table),
            tuple(row[1] for row in table),
            np.log([row[3] for row in table]),
            np.array([row[4] for row in table]),
            applies,
        )

    def factor(self, lane: str, constants: Array) -> Array:
        """Of each run."""
        mine = np.array([name == lane for name in self.lanes])
        made: Array = np.exp(self.applies[:, mine] @ constants[mine])
        return made

    def priced(self, batch: Batch, constants: Array) -> Batch:
        """The batch with its factors: those of products are off a sheet, so that products that were
        measured have none."""
        stack = self.factor("computing", constants)
        products = self.factor("products", constants)
        factors = {
            lane: self.factor(lane, constants)
            * (stack if lane in (*COMPUTING, "launch") else 1.0)
            * (products if lane in PRODUCTS else 1.0)
            for lane in (*LANES, *AT_END)
        }
        for lane in PRODUCTS:
            factors[lane] = np.where(batch.measured > 0, 1.0, factors[lane])
        return replace(
            batch,
            middle={lane: batch.middle[lane] * factors[lane] for lane in LANES},
            last={lane: batch.last[lane] * factors[lane] for lane in LANES},
            end={lane: batch.end[lane] * factors[lane] for lane in AT_END},
            spare=batch.spare * factors["stages"],
        )

    def seconds(self, batch: Batch, constants: Array) -> Seconds:
        """Of a step of each run."""
        spread = 1 + self.factor("nodes", constants) * np.log2(batch.nodes)
        return combine(self.priced(batch, constants), spread)

    def lanes_of(self, batch: Batch, constants: Array, index: int) -> dict[str, float]:
        """Of one run, what each lane of its slowest stage takes in a step, and the pipeline's fill.
        Lanes that run beside each other add up to more than the step."""
        priced = self.priced(batch, constants)
        middle, last = (
            {lane: float(values[index]) for lane, values in stage.items()}
            for stage in (priced.middle, priced.last)
        )
        norms = float(priced.norm[index]), float(priced.exchanged[index])
        slowest = last if beat(last, *norms) >= beat(middle, *norms) else middle
        slots = float(priced.slots[index])
        found = {lane: value * slots for lane, value in slowest.items()}
        found["fill"] = float(combine(priced).fill[index])
        return found | {lane: float(values[index]) for lane, values in priced.end.items()}

    def read(self, values: Mapping[str, float]) -> Array:
        """Constants by name; a stack that none knows has its prior."""
        return np.array(
            [values.get(name, centre) for name, centre in zip(self.names, self.centre, strict=True)]
        )
