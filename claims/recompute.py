"""Claim: the square root of a network's activations is enough, for one more forward pass.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016: a residual network of 1,000
layers on ImageNet from 48 GB to 7 GB, for 30% more time. The network is the authors' own
(dmlc/mxnet-memonger, example_resnet.py, with 32 images of 224 x 224): its four stages of 3, 24, 36
and 3 units of three layers are here as many times longer as a thousand layers need, since how the
paper shares them out is not known. It is somebody's module to the product; runs of units are its
blocks, of which a plan keeps the input alone, and of the last one everything, since its backward
pass comes next. Where runs end is found as in the paper's third algorithm: as soon as what they
hold is more than a budget, from the first unit on. Cuts from the last one on, which make the run
that is kept a full one, stand beside these and are not judged, nor is what the product does by
itself, which is units one by one. All that is tried is printed. Bytes, operations and seconds are
rehearsed, and the tests hold such figures against measured ones.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from verdict import Figure, conclude

from outsize.hardware import catalogue
from outsize.memory import Ledger
from outsize.models.adopt import find_blocks
from outsize.optim import AdamW
from outsize.plan import Plan, Stage
from outsize.runtime import AdoptedFlow, Job
from outsize.runtime.recipe import Here, Recipe
from outsize.simulate.forecast import forecast

DEPTHS, BASE, IMAGES, SIDE = (15, 121, 182, 15), 64, 32, 224  # 3 x 333 + 2 layers
KEPT, LESS, SLOWER = 48.0, 7.0, 1.3  # GB, GB, times
BUDGETS = (1, 2, 3, 4, 5, 6)  # GB of a run


def layer(inner: int, outer: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inner, outer, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(outer),
        nn.LeakyReLU(inplace=True),
    )


class Unit(nn.Module):
    """Three layers and what they are added to."""

    def __init__(self, inner: int, width: int, stride: int, first: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            layer(inner, width, 1), layer(width, width, 3, stride), layer(width, 4 * width, 1)
        )
        self.across = layer(inner, 4 * width, 1, stride) if first else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(images, channels, height, width)"""
        y: Tensor = self.layers(x)
        return self.across(x) + y


class Residual(nn.Module):
    """ends: of the runs of units, counted from the front; each run is a block to the product."""

    def __init__(self, ends: Sequence[int]) -> None:
        super().__init__()
        self.stem = nn.Sequential(layer(3, BASE, 7, 2), nn.MaxPool2d(3, 2, 1))
        units, inner = [], BASE
        for stage, depth in enumerate(DEPTHS):
            width = BASE * 2**stage
            for i in range(depth):
                units.append(Unit(inner, width, 2 if stage and not i else 1, not i))
                inner = 4 * width
        runs = (nn.Sequential(*units[a:b]) for a, b in pairwise((0, *ends)))
        self.runs, self.head = nn.ModuleList(runs), nn.Linear(inner, 1000)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean loss."""
        x = self.stem(images)
        for run in self.runs:
            x = run(x)
        loss: Tensor = nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)
        return loss


def job_of(ends: Sequence[int], plan: Plan, ledger: Ledger) -> Job:
    model = Residual(ends)
    flow = AdoptedFlow(model, find_blocks(model, "runs.*"), plan, lambda loss, _: loss)
    return Job(flow, plan, Recipe(AdamW()), Here(ledger=ledger))


def batch_of(images: int) -> dict[str, Tensor]:
    return {
        "images": torch.zeros(images, 3, SIDE, SIDE),
        "labels": torch.zeros(images, dtype=torch.int64),
    }


@dataclass(frozen=True)
class Step:
    """GB of activations at the peak beside what is there all the time, operations, seconds."""

    held: float
    flops: float
    seconds: float

    def told(self, kept: Step) -> str:
        return (
            f"{self.held:.1f} GB, {self.flops / kept.flops:.3f}x the operations,"
            f" {self.seconds / kept.seconds:.3f}x the time"
        )


def foretold(ends: Sequence[int], again: int) -> Step:
    """A step whose runs of units end at these; so many of them are computed again."""
    count = len(ends) + 2
    stages = (Stage(i, i + 1, ("block",) if 0 < i <= again else ()) for i in range(count))
    plan = Plan(count, tuple(stages), IMAGES, IMAGES, 0)
    made = forecast(plan, partial(job_of, ends), batch_of, catalogue("V100-SXM2-32"))
    held = (made.peak - sum(made.static.values())) / 1e9
    return Step(held, made.flops, made.seconds)


def ends_of(budget: float, backwards: bool) -> list[int]:
    """Where runs of units end that hold as much as a budget, GB, from the first or the last on."""
    sizes = []
    for stage, depth in enumerate(DEPTHS):
        # Of a unit: its input, and what each of its layers gives, before and behind its norm.
        side, width = SIDE // 4 // 2**stage, BASE * 2**stage
        sizes += depth * [IMAGES * side**2 * width * (4 + 2 * (1 + 1 + 4)) * 4 / 1e9]
    ends, held = [0], 0.0
    for count, size in enumerate(sizes[::-1] if backwards else sizes, start=1):
        held += size
        if held > budget and count < len(sizes):
            ends.append(count)
            held = 0.0
    ends.append(len(sizes))
    return sorted(len(sizes) - end for end in ends)[1:] if backwards else ends[1:]


def main() -> None:
    units = sum(DEPTHS)
    ways = [(budget, backwards) for backwards in (False, True) for budget in BUDGETS]
    every = [ends_of(*way) for way in ways]
    cases = [(every[0], 0), (range(1, units + 1), units), *((e, len(e) - 1) for e in every)]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        kept, single, *found = pool.map(foretold, *zip(*cases, strict=True))
    print(f"  nothing again: {kept.held:.1f} GB")
    print(f"  units one by one: {single.told(kept)}")
    for (budget, backwards), ends, made in zip(ways, every, found, strict=True):
        start = "last" if backwards else "first"
        print(f"  {len(ends)} runs of {budget} GB, the {start} one first: {made.told(kept)}")
    own = [made for (_, backwards), made in zip(ways, found, strict=True) if not backwards]
    best = min([m for m in own if m.held <= LESS] or own, key=lambda made: made.flops)
    again, longer = best.flops / kept.flops, best.seconds / kept.seconds
    conclude(
        'Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016',
        "a residual network of 1,000 layers on ImageNet from 48 GB to 7 GB for 30% more time",
        f"{kept.held:.1f} GB to {best.told(kept)}; units one by one {single.told(kept)}",
        f"{3 * units + 2} layers, units of the authors' example, {', '.join(map(str, DEPTHS))} of"
        f" them in its stages, which is ours; {IMAGES} images of {SIDE} x {SIDE}, float32,"
        " activations beside weights and states, rehearsed for a V100; runs of units as blocks by"
        " hand, from the first on: of the sweep printed those with fewest operations in 7 GB",
        Figure("GB of activations", best.held, LESS, "", nothing=KEPT, less=True, how="simulated"),
        Figure("fewer bytes", kept.held / best.held, KEPT / LESS, how="simulated"),
        Figure("operations", again, SLOWER, nothing=2.0, less=True, how="simulated"),
        Figure("time of a step", longer, SLOWER, nothing=2.0, less=True, how="simulated"),
    )


if __name__ == "__main__":
    main()
