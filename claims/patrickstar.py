"""Claim: one pool for all states, emptied by Belady's rule, moves less and trains larger models.

Fang et al., "PatrickStar", 2021: chunks of parameters, gradients and optimizer states share the
device, evicted by the recorded order of a step, against a fixed partition (ZeRO-Offload); models
2.27 and 2.5 times as large as DeepSpeed's on one node, and faster than DeepSpeed at every size.

Foretold on the authors' two nodes: plans of models 2.27 and 2.5 times DeepSpeed's largest, and the
speed at DeepSpeed's sizes, beside what the authors measured of DeepSpeed there. As much as the
cards have room for stays on them, stage by stage.

Traffic is predicted too: the visits are those of the Schedule that a real plan compiles to, the
bytes those of the layout that the runtime would use, played visit by visit. Beside it, like for
like, the best fixed partition there is: some items stay for good, chosen by bytes saved, the others
pass. The rule gains over LRU and over a partition by kind of state, not over that one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import sharded
import tiered
import torch
from verdict import Figure, conclude

from outsize.collectives import Mesh
from outsize.hardware import Hardware
from outsize.memory.arrange import arrange, traffic
from outsize.memory.chunk import ChunkTable, Dtypes, Slot
from outsize.memory.residency import gaps, windows
from outsize.memory.sizes import format_bytes
from outsize.models.build import build, segments
from outsize.models.families import parse
from outsize.models.presets import PRESETS
from outsize.optim import AdamW
from outsize.plan import Plan, Precision, Stream, zero
from outsize.plan.plan import Rest, Stage
from outsize.schedule.action import State
from outsize.schedule.chunks import Chunks
from outsize.schedule.item import Item
from outsize.schedule.items import Items
from outsize.schedule.kept import Kept
from outsize.schedule.layout import Placement
from outsize.schedule.passes.offload import visits
from outsize.simulate import Forecast
from outsize.simulate.costs import Costs
from outsize.simulate.forecast import compose

GIB = 1 << 30
SCALES = (2.27, 2.5)
CARDS, ROWS, VOCABULARY = 8, (4, 8, 16), 50_304  # rows: of a card, as the authors try
WIDER = {3072: 4096, 8192: 9216}  # the hidden size of the authors' models beyond DeepSpeed's
MIXED = Dtypes(torch.bfloat16, torch.float32, torch.float32, torch.float32)


@dataclass(frozen=True)
class Shape:
    """name; elements of each segment, prologue, blocks, epilogue; tied: the epilogue uses the
    prologue's; budgets: bytes of the pool."""

    name: str
    numels: tuple[int, ...]
    tied: bool
    budgets: tuple[int, ...]


def llama(preset: str, *budgets: int) -> Shape:
    model = build(parse(PRESETS[preset]))
    held = dict(model.named_parameters())
    numels = (sum(held[name].numel() for name in names) for _, names in segments(model))
    return Shape(preset, tuple(numels), False, budgets)


def gpt(name: str, hidden: int, layers: int, *budgets: int) -> Shape:
    """A GPT-2 of the authors' list of shapes (examples/model_builder.py), 1,024 positions."""
    block = 12 * hidden**2 + 13 * hidden
    return Shape(name, ((50304 + 1024) * hidden, *[block] * layers, 2 * hidden), True, budgets)


def placement(shape: Shape) -> Placement:
    """Where the states go when all rest below the device and pass through the pool."""
    count = len(shape.numels)
    below = Rest("host", "host", "host")
    stages = tuple(
        Stage(i, i + 1, ("block",) if 0 < i < count - 1 else (), below) for i in range(count)
    )
    plan = Plan(count, stages, precision=Precision.named("bfloat16"), update="behind")
    tables = tuple(
        ChunkTable(i, True, (Slot(f"weights {i}", (numel,), 0, 0),))
        for i, numel in enumerate(shape.numels)
    )
    uses = ((),) * (count - 1) + ((0,) if shape.tied else (),)
    return Placement(Items(Chunks(plan, tables, uses, Kept(MIXED, AdamW().states))))


Visits = Sequence[frozenset[Item]]


def by_kind(order: Visits, sizes: Mapping[Item, int], pool: int) -> int | None:
    """Bytes fetched by ZeRO-Offload's placement, where it fits: parameters and gradients stay, all
    optimizer states pass."""
    passing = {item for item in sizes if item.state is State.OPTIMIZER}
    stay = sum(size for item, size in sizes.items() if item not in passing)
    most = max(sum(sizes[i] for i in window & passing) for window in windows(order, 1))
    return sum(sizes[item] for item in passing) if stay + most <= pool else None


def partition(order: Visits, sizes: Mapping[Item, int], pool: int, made: Sequence[Item]) -> int:
    """Bytes fetched where some items stay for good and the others only while they are needed."""
    cycle = windows(order, 1)
    fetches: dict[Item, int] = dict.fromkeys(sizes, 0)
    for gap in gaps(cycle, made):
        fetches[gap.item] += 1
    loads = [sum(sizes[i] for i in window) for window in cycle]
    for item in sorted(sizes, key=lambda i: (-fetches[i], i)):
        beside = [
            load if item in window else load + sizes[item]
            for load, window in zip(loads, cycle, strict=True)
        ]
        if max(beside) <= pool:
            loads, fetches[item] = beside, 0
    return sum(sizes[item] * count for item, count in fetches.items())


def fetched(shape: Shape, pool: int) -> dict[str, int | None]:
    """Bytes that a step fetches by each policy, None where it does not fit."""
    found = placement(shape)
    order, sizes = visits(found.base, found.items.residency), found.pooled
    made = [item for item in sizes if item.state is State.GRADIENTS]
    by: dict[str, int | None] = {"partition": partition(order, sizes, pool, made)}
    by["by kind"] = by_kind(order, sizes, pool)
    for policy in ("belady", "lru", "static"):
        layout = arrange(order, sizes, pool, policy=policy, made=made)
        by[policy] = traffic(order, sizes, layout.offsets, made).fetched
    return by


@dataclass(frozen=True)
class Node:
    """Eight cards. reached: of their peak in products, as their authors measured it; link: GB/s
    each way to the host; room: bytes of host memory; by_deepspeed: the largest that DeepSpeed
    trained there, hidden size and layers; speeds: TFLOP/s of all cards by DeepSpeed, by size."""

    card: str
    reached: float
    link: float
    room: float
    by_deepspeed: tuple[int, int]
    speeds: Mapping[tuple[int, int], float]

    @property
    def hardware(self) -> Hardware:
        made = sharded.cluster(self.card, CARDS, self.reached, wait=20e-6)
        host = tiered.tier("host", self.link, self.link, "PCIe, declared")
        return replace(made, tiers=(*made.tiers, host))


# DeepSpeed's figures are the authors', from their repository (doc/mgpu_scalability.png and
# doc/one_node_perf_a100.png; operations as their examples/pretrain_demo.py counts them), of the
# best number of rows; the shapes are of their examples/model_builder.py. A V100 reaches 70 TFLOP/s
# (Rajbhandari et al., "ZeRO-Infinity", 2021). A100 of 40 GB: those of 80 would have room for more.
NODES = (
    Node("V100-SXM2-32", 70 / 125, 12, 240e9, (3072, 72), {}),
    Node(
        "A100-SXM-40", 0.55, 25, 1e12, (8192, 37),
        {
            (3072, 53): 728, (4096, 50): 728, (4096, 78): 773, (8192, 25): 865, (8192, 37): 578,
        },
    ),
)  # fmt: skip


def elements(hidden: int, layers: int) -> int:
    return 12 * hidden**2 * layers + VOCABULARY * hidden


@dataclass
class Trained:
    """Plans of one GPT on a node, so many rows a card: parameters, gradients and optimizer states
    are cut over the cards. The first stages' optimizer states, and then gradients, rest on the
    host, as many as are asked for, and are updated behind the backward pass."""

    node: Node
    hidden: int
    layers: int
    rows: int

    def __post_init__(self) -> None:
        self._config = tiered.gpt(self.hidden, self.layers, 16, VOCABULARY)
        self._predicted = sharded.Predicted(self._config, sharded.MIXED)
        self._costs: Costs | None = None

    def plan(self, below: int) -> Plan:
        count = self.layers + 2
        plan = tiered.plan_of(
            self._config, self.rows, 1024, stream=Stream(part=1 << 25, parts=4), update="behind"
        )
        stages = []
        for i, stage in enumerate(plan.stages):
            if i < below:
                stage = replace(stage, rest=replace(stage.rest, optimizer="host"))
            if i < below - count:
                stage = replace(stage, rest=replace(stage.rest, gradients="host"))
            stages.append(stage)
        return replace(
            plan, stages=tuple(stages), precision=sharded.MIXED, rows=self.rows * CARDS,
            shards=zero(3, CARDS), mesh=Mesh(CARDS),
        )  # fmt: skip

    def of(self, below: int) -> Forecast:
        plan = self.plan(below)
        if self._costs is None:
            costs = self._predicted.costs(plan)
            self._costs = replace(costs, facts=replace(costs.facts, host=frozenset({"host"})))
        return compose(plan, self._costs, self.node.hardware)

    def fewest(self) -> Forecast | None:
        """With as little on the host as fits the cards; None where the host has no room for it."""
        low, high = 0, 2 * (self.layers + 2)
        memory = self.node.hardware.devices[0].memory_bytes
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.of(middle).peak <= memory else (middle + 1, high)
        made = self.of(low)
        fits = made.peak <= memory and made.below.get("host", 0) * CARDS <= self.node.room
        return made if fits else None


def best(node: Node, hidden: int, layers: int) -> tuple[Forecast, float] | None:
    """The quickest number of rows, and TFLOP/s of all cards as the authors count operations."""
    found = []
    for rows in ROWS:
        made = Trained(node, hidden, layers, rows).fewest()
        if made is not None:
            work = 8 * elements(hidden, layers) * rows * CARDS * 1024
            found.append((made, work / made.seconds / 1e12))
    return max(found, key=lambda pair: pair[1], default=None)


def shown(node: Node, hidden: int, layers: int, told: str) -> float:
    """Print what the node makes of a model; 0 where it has no plan, else its TFLOP/s."""
    made, size = best(node, hidden, layers), elements(hidden, layers) / 1e9
    if made is None:
        print(f"  8 {node.card}, {size:.1f}G parameters: no plan", flush=True)
        return 0.0
    forecast, speed = made
    print(
        f"  8 {node.card}, {size:.1f}G parameters: {speed:.0f} TFLOP/s of all{told}, peak"
        f" {format_bytes(forecast.peak)}, on the host"
        f" {format_bytes(CARDS * forecast.below.get('host', 0))}",
        flush=True,
    )
    return speed


def larger(node: Node) -> float:
    """The most of the paper's two ratios for which there is a plan, over DeepSpeed's largest."""
    hidden, layers = node.by_deepspeed
    wide = WIDER[hidden]
    found = 1.0
    for scale in SCALES:
        wanted = scale * elements(hidden, layers) - VOCABULARY * wide
        if shown(node, wide, math.ceil(wanted / (12 * wide**2)), f", {scale}x DeepSpeed's largest"):
            found = scale
    return found


def main() -> None:
    shapes = (
        llama("llama-1.1b", 2 * GIB, 4 * GIB, 8 * GIB),
        llama("llama-7b", 16 * GIB, 48 * GIB),
        gpt("GPT2_4B", 2304, 64, 16 * GIB, 32 * GIB),
    )
    times: dict[str, list[float]] = {"lru": [], "partition": [], "static": [], "by kind": []}
    for shape in shapes:
        for pool in shape.budgets:
            by = fetched(shape, pool)
            told = (
                f"{n} {'does not fit' if c is None else format_bytes(c)}" for n, c in by.items()
            )
            print(f"  {shape.name} in {format_bytes(pool)}: {', '.join(told)}")
            for name, ratios in times.items():
                ratios += [c / (by["belady"] or 1) for c in [by[name]] if c is not None]
    ratios_of = {node.card: larger(node) for node in NODES}
    beside = [
        shown(node, *shape, f" ({theirs} by DeepSpeed)") / theirs
        for node in NODES
        for shape, theirs in node.speeds.items()
    ]
    spans = {name: f"{min(r):.2f} to {max(r):.2f}x" for name, r in times.items()}
    conclude(
        'Fang et al., "PatrickStar", 2021',
        "models 2.27 and 2.5 times as large as DeepSpeed's on a node of 8 cards, faster than"
        " DeepSpeed at every size; less traffic than a fixed partition by kind of state",
        "(simulated) plans for models"
        f" {' and '.join(f'{r}x ({card})' for card, r in ratios_of.items())} as large as the"
        f" largest that DeepSpeed trained; {min(beside):.2f} to {max(beside):.2f} times its speed;"
        f" of the bytes by Belady's rule LRU fetches {spans['lru']}, a partition by kind, where it"
        f" fits, {spans['by kind']}, nothing kept {spans['static']}; like for like, the best fixed"
        f" partition {spans['partition']}",
        "GPT-2 of the authors' shapes, rows of 1,024, 4 to 16 of a card; 8 V100 of 32 GB and 240 GB"
        " (12 GB/s each way, 70 TFLOP/s in products), 8 A100 of 40 GB and 1 TB (25 GB/s, 55% of the"
        " peak); 16-bit parameters and gradients, cut over the cards, blocks recomputed; DeepSpeed"
        " as the authors measured it there; traffic: AdamW, bfloat16 with float32 master, gradients"
        " and moments; all states below the device, updated behind the backward pass in parts of 4"
        " Mi elements; one visit fetched ahead; bytes of the pool, activations beside it",
        *(
            Figure(
                f"larger than DeepSpeed's largest on 8 {node.card}", ratios_of[node.card],
                SCALES[-1], how="simulated",
            )
            for node in NODES
        ),
        Figure(
            "speed beside DeepSpeed, 6G to 30G on 8 A100, the least", min(beside), 1.0, nothing=0.0,
            how="simulated",
        ),
        Figure(
            "bytes of a partition by kind over ours, least", min(times["by kind"]), 1.0,
            nothing=0.0, how="simulated",
        ),
    )  # fmt: skip


if __name__ == "__main__":
    main()
