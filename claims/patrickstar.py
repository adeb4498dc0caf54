"""Claim: one pool for all states, emptied by Belady's rule, moves less and trains larger models.

Fang et al., "PatrickStar", 2021: chunks of parameters, gradients and optimizer states share the
device, evicted by the recorded order of a step, against a fixed partition (ZeRO-Offload); models
2.27 and 2.5 times as large in the same memory. Predicted, not run: the visits are those of the
Schedule that a real plan compiles to, the bytes those of the layout that the runtime would use,
played visit by visit. Beside it the best fixed partition there is: some items stay for good, chosen
by bytes saved, the others pass. The rule gains over LRU and over a partition by kind of state, not
over that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from verdict import Figure, conclude

from outsize.memory.arrange import arrange, least, traffic
from outsize.memory.chunk import ChunkTable, Dtypes, Slot
from outsize.memory.residency import gaps, windows
from outsize.memory.sizes import format_bytes
from outsize.models.build import build, segments
from outsize.models.families import parse
from outsize.models.presets import PRESETS
from outsize.optim import AdamW
from outsize.plan import Plan, Precision
from outsize.plan.plan import Rest, Stage
from outsize.schedule.action import State
from outsize.schedule.chunks import Chunks
from outsize.schedule.item import Item
from outsize.schedule.items import Items
from outsize.schedule.kept import Kept
from outsize.schedule.layout import Placement
from outsize.schedule.passes.offload import visits

GIB = 1 << 30
SCALES = (2.27, 2.5)
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


def deeper(shape: Shape, scale: float) -> Shape:
    """The shape with so many times the elements, by more blocks of the same width."""
    block = shape.numels[1]
    wanted = int(scale * sum(shape.numels))
    layers = -(-(wanted - shape.numels[0] - shape.numels[-1]) // block)
    numels = (shape.numels[0], *[block] * layers, shape.numels[-1])
    return Shape(f"{shape.name} x{scale:.2f}", numels, shape.tied, ())


def grown(shape: Shape) -> bool:
    """Whether models 2.27 and 2.5 times as large as one whose bfloat16 parameters alone fill the
    device (ZeRO-Offload's placement at its best, gradients leaving as they come) have a layout."""
    pool = 2 * sum(shape.numels)
    fits = True
    for scale in SCALES:
        larger = deeper(shape, scale)
        found = placement(larger)
        low = least(visits(found.base, found.items.residency), found.pooled)
        fits &= low <= pool
        if low <= pool:
            by = fetched(larger, pool)
            print(
                f"  {larger.name}: {sum(larger.numels) / 1e9:.1f}G parameters in"
                f" {format_bytes(pool)} (needs {format_bytes(low)}),"
                f" {format_bytes(by['belady'])} fetched a step, {format_bytes(by['lru'])} by LRU"
            )
    return fits


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
    fits = all([grown(shape) for shape in shapes])
    spans = {name: f"{min(r):.2f} to {max(r):.2f}x" for name, r in times.items()}
    conclude(
        'Fang et al., "PatrickStar", 2021',
        "less traffic than a fixed partition by kind of state, and models 2.27 and 2.5 times as"
        " large in a memory",
        f"(predicted) of the bytes by Belady's rule LRU fetches {spans['lru']}, a partition by"
        f" kind, where it fits, {spans['by kind']}, nothing kept {spans['static']}, the best fixed"
        f" partition {spans['partition']}; models 2.27 and 2.5 times as large"
        f" {'have' if fits else 'DO NOT have'} a layout",
        "AdamW, bfloat16 with float32 master, gradients and moments; all states below the device,"
        " updated behind the backward pass in parts of 4 Mi elements; one visit fetched ahead;"
        " bytes of the pool, activations beside it",
        *(
            Figure(
                "model in a memory, larger",
                scale if fits else 1.0,
                scale,
                how="simulated",
                other="against a description of DeepSpeed's placement",
            )
            for scale in SCALES
        ),
        Figure(
            "bytes of a partition by kind over ours, least",
            min(times["by kind"]),
            1.0,
            nothing=0.0,
            how="simulated",
        ),
        Figure(
            "bytes of the best fixed partition over ours, least",
            min(times["partition"]),
            1.0,
            nothing=0.0,
            how="simulated",
        ),
        Figure("speed beside DeepSpeed", None, 1.0),
    )


if __name__ == "__main__":
    main()
