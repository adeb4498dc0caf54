"""Claim: with activations on the host, a worker's memory falls with the pipeline's length.

Wan et al., "PipeOffload: Improving Scalability of Pipeline Parallelism with Memory Optimization",
2025: in most configurations at least half of the activations, and in some all, are moved at
negligible cost; half of them, those that live longest, are more than half of the peak; so the bytes
of a worker fall with the number of stages. Simulated by events with lanes out and back that share
one link, with the paper's rates, bytes and models (its table 2: hidden sizes of 4096 to 10240,
sequences of 4,096 to 16,384). Against a tensor axis: the price of steps that `outsize plan
--hardware` has, of 32 stages with all activations away and of 4 stages of 8 workers each, on the
paper's 4 machines of 8 A100. How many microbatches a step has there is not known: a sweep, of which
the number of the authors' paper on vocabularies is judged. Real: as many workers as in the paper's
smallest runs, and blocks as in the authors' script (pretrain_offload.sh: the ends count as one).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise, product

import tiered
import torch
from torch import Tensor
from verdict import Figure, conclude

from outsize.collectives import Mesh, World
from outsize.collectives.threads import play as play_workers
from outsize.foresight.layout import Layout
from outsize.foresight.memory import Memory, memory
from outsize.foresight.planning.choose import forecast
from outsize.foresight.planning.layouts import STACK
from outsize.foresight.shape import Shape
from outsize.hardware import parse_spec
from outsize.memory import Ledger, format_bytes
from outsize.memory.store import MemoryStore
from outsize.models.build import build
from outsize.optim import AdamW
from outsize.plan import Pipelined, Plan
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.schedule.pipelined import bounds_of
from outsize.schedule.pipelines import Pipeline, interleaved, one_f_one_b
from outsize.schedule.pipelines.uniform import uniform
from outsize.schedule.proof import prove
from outsize.search.pipeline_offload import Spilling, spilled
from outsize.simulate.coarse import Moving, Times, play

RATE, LINK = 220e12, 15e9  # the paper's, of an A100 and its PCIe
KEPT = 20  # bytes of a token's activations in a layer, over hidden: its k is 10 / 3(6h + s)
WORK = 72  # operations of a token in a layer, forward and backward, over hidden squared
HIDDEN, SEQUENCES = (4096, 5120, 6144, 8192, 10240), (4096, 8192, 16384)
LENGTHS = (4, 8, 16)
TIMES = Times(1, 1, 1)
FREE = 1.01
# Layers, hidden size, heads of the paper's largest models; 8 heads of keys, tied ids of 32,000 tell
# their numbers of parameters.
MODELS = {"42.9B": (62, 8192, 64), "66.6B": (62, 10240, 80), "83.8B": (78, 10240, 80)}
DEVICES, TENSOR, CLUSTER = 32, 8, "4 x 8 A100-SXM-80"
MICROBATCHES, JUDGED = (64, 128, 256), 128
BLOCKS, WORKERS, ROWS = 30, 8, 16  # of the model that is trained


@dataclass(frozen=True)
class Sizes:
    """Hidden size and tokens of a sequence of a model's layers."""

    hidden: int
    sequence: int

    @property
    def ratio(self) -> float:
        """A layer's time out and back over its time forward and backward."""
        work = WORK * self.hidden**2 * (1 + self.sequence / (6 * self.hidden)) / RATE
        return 2 * KEPT * self.hidden / LINK / work

    @property
    def moving(self) -> Moving:
        """Of a unit that computes for three seconds."""
        return Moving(1.5 * self.ratio, 1.5 * self.ratio, shared=2.0)


def proved(pipeline: Pipeline, moving: Moving, part: float | None = None) -> Spilling:
    """The pipeline with its moves, shown to run."""
    found = spilled(pipeline, TIMES, moving, part)
    prove(found.made.pipeline.schedule)
    return found


def free(shape: Sizes) -> tuple[float, bool]:
    """(the part that leaves on 8 workers, whether the step is as long as before)."""
    found = proved(uniform(8, 32), shape.moving)
    part = sum(found.moved) / len(found.moved)
    print(
        f"  hidden {shape.hidden}, {shape.sequence} tokens: moving over computing"
        f" {shape.ratio:.2f}; {part:.0%} leave at {found.slower:.3f} times the step, peak"
        f" {max(found.kept.run.peaks):.2f} to {max(found.played.run.peaks):.2f}"
    )
    return part, found.slower <= FREE


def step(shape: Shape, layout: Layout) -> tuple[float, Memory]:
    """Seconds of a layout on the paper's machines, and what a device holds."""
    cluster = parse_spec(CLUSTER)
    held = memory(shape, layout)
    return forecast(shape, [layout], cluster, [held], 0)[0].seconds, held


def against_tensor() -> float:
    """The most by which stages alone, with all activations away, are faster than a tensor axis."""
    gains, slower = dict[int, list[float]](), dict[int, float]()
    for name, (layers, hidden, heads) in MODELS.items():
        shape = Shape(layers=layers, hidden=hidden, heads=heads, groups=8, vocab=32_000)
        if hidden not in slower:  # of the shortest sequence and step, in which moving tells most
            moving = Sizes(hidden, SEQUENCES[0]).moving
            all_ = proved(uniform(DEVICES, MICROBATCHES[0]), moving)
            slower[hidden], peak = all_.slower, max(all_.played.run.peaks)
        for sequence, count in product(SEQUENCES, MICROBATCHES):
            base = Layout(DEVICES, 1, count, sequence, STACK)
            stages = replace(base, pipeline=DEVICES, chunks=2, recompute="norms")
            seconds = step(shape, stages)[0] * slower[hidden]
            away = peak * layers / DEVICES * KEPT * hidden * sequence
            tensor = replace(
                base, tensor=TENSOR, pipeline=DEVICES // TENSOR, sequence_parallel=True
            )
            best, held = min(
                (step(shape, replace(tensor, chunks=chunks)) for chunks in (1, 2, 4)),
                key=lambda one: one[0],
            )
            gains.setdefault(count, []).append(best / seconds - 1)
            print(
                f"  {name}, {sequence} tokens, {count} microbatches: {seconds:.1f} s in stages,"
                f" {best:.1f} with a tensor axis, {best / seconds - 1:+.1%}; activations"
                f" {away / 1e9:.1f} and {held.activations / 1e9:.1f} GB"
            )
    return max(gains[JUDGED])


def trained(plan: Plan) -> list[tuple[float, int, dict[str, Tensor]]]:
    """By worker: the loss of the last step, most bytes of activations in it, the weights."""
    config = tiered.llama(256, BLOCKS, 8, vocabulary=2048)
    batches = [tiered.batch_of(config, plan, seed) for seed in range(2)]

    def run(world: World) -> tuple[float, int, dict[str, Tensor]]:
        with ExitStack() as stack:
            host = MemoryStore("host", tiered.GIB)
            stack.callback(host.close)
            flow = NativeFlow(build(config, seed=0), plan)
            job = Job(
                flow, plan, Recipe(AdamW()), Here(world, ledger=Ledger(), stores={"host": host})
            )
            losses = [float(job.step(batch, 1e-3)) for batch in batches]
            events = job.report.trace.events
            live = max(n for e in events for k, n in e.live.items() if k.endswith("activations"))
            weights = {name: weight.clone() for name, weight in job.weights()}
            job.close()
        return losses[-1], live, weights

    return play_workers(plan.mesh, run)


def leaving(plan: Plan, found: Spilling, bounds: tuple[int, ...]) -> Plan:
    """The plan whose stages rest on the host as much as those of the pipeline do: the first ones of
    each go, for they wait longest for their gradients."""
    away = set[int]()
    for (_, stage), part in found.made.parts.items():
        first, last = bounds[stage], bounds[stage + 1]
        away.update(range(first, first + round(part * (last - first))))
    stages = tuple(
        replace(stage, rest=replace(stage.rest, activations="host")) if i in away else stage
        for i, stage in enumerate(plan.stages)
    )
    return replace(plan, stages=stages)


def real() -> tuple[float, bool]:
    """Of real workers with half of their activations away: the part of the highest peak that is
    left, and whether losses and weights are equal bit for bit."""
    count = BLOCKS + 2
    plan = Plan(
        count, per_segment(count), ROWS, 1, 128, mesh=Mesh(pipeline=WORKERS),
        pipeline=Pipelined("uniform:2"),
    )  # fmt: skip
    coarse = uniform(WORKERS, ROWS)
    bounds = bounds_of(plan, coarse.placement.stages)
    pieces = [b - a for a, b in pairwise(bounds)]
    found = spilled(coarse, TIMES, Moving(0.1, 0.1), 0.5, pieces)
    kept, away = trained(plan), trained(leaving(plan, found, bounds))
    same = all(
        a[0] == b[0] and all(torch.equal(a[2][name], weight) for name, weight in b[2].items())
        for a, b in zip(kept, away, strict=True)
    )
    for worker, (before, after) in enumerate(zip(kept, away, strict=True)):
        print(
            f"  real, worker {worker}: activations {format_bytes(before[1])} to"
            f" {format_bytes(after[1])}"
        )
    return max(one[1] for one in away) / max(one[1] for one in kept), same


def main() -> None:
    shapes = [Sizes(*sizes) for sizes in product(HIDDEN, SEQUENCES)]
    found = [free(shape) for shape in shapes]
    enough = sum(part >= 0.5 and quick for part, quick in found)
    large = shapes[-1]
    halves = proved(uniform(16, 64), large.moving, part=0.5)
    left = max(halves.played.run.peaks) / max(halves.kept.run.peaks)
    groups = max(play(interleaved(16, 64, 2), TIMES).run.peaks)
    print(
        f"  16 workers, half away: {left:.0%} of the peak is left;"
        f" {max(halves.played.run.peaks) / groups:.0%} of interleaved 1F1B's, which holds"
        f" {groups:.1f}"
    )
    shares = []  # of the whole model's activations of a microbatch
    for length in LENGTHS:
        whole = proved(uniform(length, 4 * length), large.moving)
        shares.append(max(whole.played.run.peaks) / length)
        plain = max(play(one_f_one_b(length, 4 * length), TIMES).run.peaks) / length
        print(
            f"  {length} workers: {shares[-1]:.3f} of a microbatch's activations on a worker,"
            f" 1F1B {plain:.3f}"
        )
    falls = all(b < a for a, b in pairwise(shares))
    faster = against_tensor()
    left_real, same = real()
    conclude(
        'Wan et al., "PipeOffload", 2025',
        "at least half of the activations leave at negligible cost in most configurations; half of"
        " them are more than half of the peak; a worker's peak falls with the number of stages",
        f"half or more in {enough} of {len(shapes)} shapes; half away leaves {left:.0%} of the"
        f" peak; {', '.join(f'{share:.3f}' for share in shares)} of a microbatch on"
        f" {', '.join(map(str, LENGTHS))} workers; at most {faster:+.1%} beside a tensor axis;"
        f" real: {left_real:.1%} of the bytes, losses and weights"
        f" {'equal bit for bit' if same else 'DIFFER'}",
        "but for the real run, simulated by events and proved; uniform interleaving, two stages a"
        f" worker, four microbatches a worker, F = I = W; layers at {RATE / 1e12:.0f} TFLOP/s,"
        f" {KEPT} bytes a token and hidden, {LINK / 1e9:.0f} GB/s for both directions; beside a"
        f" tensor axis of {TENSOR}: {', '.join(MODELS)} on {CLUSTER}, {JUDGED} microbatches; real:"
        f" {WORKERS} workers as threads, Llama of {BLOCKS} blocks, hidden 256, float32, half of the"
        " activations of each away",
        Figure(
            "shapes of which half leaves for nothing",
            enough / len(shapes),
            0.5,
            "%",
            nothing=0.0,
            how="simulated",
        ),
        Figure("peak that is left with half away", left, 0.5, "%", less=True, how="simulated"),
        Figure("peak that is left with half away", left_real, 0.5, "%", less=True),
        Figure(
            "acceleration over tensor parallelism, the most",
            faster,
            0.19,
            "%",
            nothing=0.0,
            how="simulated",
        ),
        holds={
            "a worker's peak falls with the stages": falls,
            "losses and weights equal bit for bit": same,
        },
    )


if __name__ == "__main__":
    main()
