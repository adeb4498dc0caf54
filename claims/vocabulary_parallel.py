"""Claim: a vocabulary cut over all workers balances a pipeline whatever its size, for 5% to 51%
more throughput than leaving it at the ends, and a constant number of microbatches in memory.

Yeung et al., "Balancing Pipeline Parallelism with Vocabulary Parallelism", 2024. Simulated: the
models of the paper's tables, bytes from 18 a parameter (weight and gradient, master copy and
moments) and 34 T D of activations a layer. "Redistributed" is 1F1B with whole layers moved from the
last stage to others as far as that helps, the paper's stronger baseline.

Times are from FLOPs at a part of an A100's peak, and of the softmax from the bytes that operators
of the authors' code read and write for each logit (cross_entropy.py and vocab_output.py of
sail-sg/VocabularyParallelism, which both their ways go through), at the whole of its bandwidth. At
what part of the peak products run says how much of the output layer that traffic is: a sweep, of
which the least gain is judged.

Then four workers here train a small model with a large vocabulary both ways: most bytes of each
worker, counted as it runs, and the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import tiered
from verdict import Figure, conclude

from outsize.collectives import Mesh, World
from outsize.collectives.threads import play as play_workers
from outsize.hardware import catalogue
from outsize.memory import Ledger
from outsize.models.build import build
from outsize.optim import AdamW
from outsize.parallel.divide import divide
from outsize.plan import Pipelined, Plan
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.schedule.ends import named
from outsize.schedule.pipelines import Costs, Pipeline, one_f_one_b, v_half
from outsize.schedule.pipelines.costs import EndCosts
from outsize.schedule.pipelines.pipeline import with_ends
from outsize.schedule.proof import prove
from outsize.simulate.coarse import Times, play

MICROBATCHES, TRANSFER = 128, 0.02  # of a unit's forward
BLOCKS, WORKERS, VOCABULARY = 6, 4, 32_768  # of the model that is trained here
PER_PARAMETER, PER_ACTIVATION, PER_LOGIT = 18, 34, 4  # bytes
K, GIB = 2**10, 2**30
DEVICE, PARTS = "A100-SXM-80", (0.4, 0.6, 0.8, 1.0)  # of its peak
# Bytes of a logit: widened 2 + 4; largest 4; less it, exponential, over the sum 8 each; sum 4. Then
# times the loss's gradient 8, narrowed 4 + 2. Cut over workers they are narrowed once more, and set
# right by what the other workers found, 8.
FORWARD, BACKWARD, NARROWED, SET_RIGHT = 6 + 4 + 3 * 8 + 4, 8 + 6, 6, 8


@dataclass(frozen=True)
class Model:
    """devices, layers, hidden size and tokens of a sequence; a microbatch is one sequence."""

    devices: int
    layers: int
    hidden: int
    tokens: int

    def times(self, vocab: int, part: float, cut: bool = False) -> Times:
        """Seconds of a worker's layers and of the output layer at this part of the peak, in TFLOP.
        Attention's two products have no weights: their gradients are all of inputs."""
        per = self.layers / self.devices * self.tokens / 1e12
        product, attention = 24 * self.hidden**2, 4 * self.tokens * self.hidden
        forward = per * (product + attention)
        output = 2 * self.hidden * vocab * self.tokens / 1e12
        (device,) = catalogue(DEVICE).devices
        byte = (
            self.tokens * vocab * part * device.peak["bf16"].value / device.bandwidth.value / 1e12
        )
        ahead, back = FORWARD + cut * NARROWED, BACKWARD + cut * SET_RIGHT
        held = self.tokens * vocab * PER_LOGIT / self.devices / self.activations
        return Times(
            forward, per * (product + 2 * attention), per * product, TRANSFER * forward,
            ends=EndCosts(output + ahead * byte, output, output + back * byte, held=held),
        )  # fmt: skip

    @property
    def activations(self) -> float:
        """Bytes of a microbatch in a worker's layers."""
        return PER_ACTIVATION * self.tokens * self.hidden * self.layers / self.devices

    @property
    def weights(self) -> float:
        """Bytes of states of a worker's layers."""
        return PER_PARAMETER * 12 * self.hidden**2 * self.layers / self.devices

    def table(self, vocab: int) -> float:
        """Bytes of states of the input layer, or of the output layer."""
        return PER_PARAMETER * self.hidden * vocab


@dataclass(frozen=True)
class Outcome:
    """Seconds of a step, busy seconds and bytes of each worker."""

    makespan: float
    busy: tuple[float, ...]
    memory: tuple[float, ...]


def at_the_ends(
    model: Model, made: Pipeline, vocab: int, part: float, layers: list[int]
) -> Outcome:
    """Input layer before the first stage, output layer behind the last. layers: of each stage."""
    times, place = model.times(vocab, part), made.placement
    even = model.layers / place.stages
    priced = Times(
        times.forward, times.of_input, times.of_weight, times.transfer,
        stages=tuple(count / even for count in layers), ends=times.ends,
    )  # fmt: skip
    run = play(made, priced).run
    bytes_of = []
    for worker, peak in enumerate(run.peaks):
        held = [s for s in range(place.stages) if worker in place.holders(s)]
        share = sum(layers[s] for s in held) / (even * len(held))
        own = share * (model.weights + peak * model.activations)
        own += (0 in held) * model.table(vocab)
        if place.stages - 1 in held:
            own += model.table(vocab) + PER_LOGIT * model.tokens * vocab
        bytes_of.append(own)
    return Outcome(run.makespan, run.busy, tuple(bytes_of))


def redistributed(model: Model, vocab: int, part: float) -> list[int]:
    """Layers of each stage: the last has what is left for it while it is the longest."""
    times = model.times(vocab, part)
    assert times.ends is not None
    a_layer = (times.forward + times.of_input + times.of_weight) * model.devices / model.layers
    output = sum(times.ends.output) / a_layer
    others = model.devices - 1

    def split(last: int) -> list[int]:
        rest = model.layers - last
        return [rest // others + (s < rest % others) for s in range(others)] + [last]

    def longest(layers: list[int]) -> float:
        return max(*layers[:-1], layers[-1] + output)

    return min((split(last) for last in range(model.layers // model.devices + 1)), key=longest)


def cut(model: Model, made: Pipeline, vocab: int, part: float, variant: int) -> Outcome:
    """Both layers cut over all workers."""
    times = model.times(vocab, part, cut=True)
    assert times.ends is not None
    costs = Costs(times.forward, times.of_input, times.of_weight, times.transfer)
    passes = with_ends(made, named("vocabulary", variant), costs, times.ends)
    prove(passes.schedule, paths=passes.paths)
    run = play(passes, times).run
    tables = 2 * model.table(vocab) / model.devices
    memory = (model.weights + tables + peak * model.activations for peak in run.peaks)
    return Outcome(run.makespan, run.busy, tuple(memory))


def trained(variant: int) -> list[tuple[int, float]]:
    """By worker: most bytes of its tensors in two steps of a model whose tables are nearly all of
    it, and the last loss."""
    config = tiered.llama(128, BLOCKS, 4, vocabulary=VOCABULARY)
    plan = Plan(
        BLOCKS + 2, per_segment(BLOCKS + 2), 8, 1, 64, mesh=Mesh(pipeline=WORKERS),
        pipeline=Pipelined("1f1b", vocabulary=variant),
    )  # fmt: skip
    batches = [tiered.batch_of(config, plan, seed) for seed in range(2)]

    def run(world: World) -> tuple[int, float]:
        model, ledger = build(config, seed=0), Ledger()
        cuts = divide(model, world, plan)
        job = Job(
            NativeFlow(model, plan), plan, Recipe(AdamW()), Here(world, ledger=ledger), cuts=cuts
        )
        peaks, loss = [], 0.0
        for batch in batches:
            loss = float(job.step(batch, 1e-3))
            peaks.append(max(event.peak for event in job.report.trace.events))
        job.close()
        return max(peaks), loss

    return play_workers(plan.mesh, run)


def real() -> tuple[str, bool]:
    """What four workers here hold, with whole tables and with cut ones."""
    ways = {variant: trained(variant) for variant in (0, 1, 2)}
    peaks = {variant: [peak / 2**20 for peak, _ in found] for variant, found in ways.items()}
    (loss,) = {loss for _, loss in ways[0]}
    apart = max(abs(other - loss) for found in ways.values() for _, other in found)
    words = "; ".join(
        f"{name} {', '.join(f'{peak:.0f}' for peak in peaks[variant])} MiB"
        for variant, name in enumerate(("whole tables", "variant 1", "variant 2"))
    )
    holds = apart < 1e-5 and all(max(peaks[v]) < max(peaks[0]) for v in (1, 2))
    return (
        f"run here on {WORKERS} workers, {VOCABULARY} ids: {words}, losses {apart:.1e} apart",
        holds,
    )


@dataclass(frozen=True)
class Compared:
    """Gains over 1F1B and over redistributed layers, most bytes of a worker of these and of both
    variants, and whether computing is equal on all."""

    gains: tuple[float, float]
    peaks: tuple[float, ...]
    even: bool

    def __str__(self) -> str:
        gib = [peak / GIB for peak in self.peaks]
        return (
            f"{self.gains[0]:+.0%} over 1F1B, {self.gains[1]:+.0%} over redistributed layers, most"
            f" memory {gib[0]:.1f} and {gib[1]:.1f} GiB to {gib[2]:.1f} (variant 1) and"
            f" {gib[3]:.1f} (variant 2)"
        )


def compared(model: Model, vocab: int, part: float) -> Compared:
    made = one_f_one_b(model.devices, MICROBATCHES)
    plain = [model.layers // model.devices] * model.devices
    ends = at_the_ends(model, made, vocab, part, plain)
    moved = at_the_ends(model, made, vocab, part, redistributed(model, vocab, part))
    both = [cut(model, made, vocab, part, variant) for variant in (1, 2)]
    over, against = (base.makespan / both[1].makespan - 1 for base in (ends, moved))
    found = Compared(
        (over, against),
        tuple(max(one.memory) for one in (ends, moved, *both)),
        all(max(one.busy) - min(one.busy) < 1e-9 * max(one.busy) for one in both),
    )
    print(f"  {model.devices} workers, {vocab // K}k, {part:.0%} of the peak: {found}", flush=True)
    return found


def main() -> None:
    eight, words = dict[int, list[Compared]](), list[str]()
    for vocab in (32 * K, 256 * K):
        eight[vocab] = [compared(Model(8, 32, 3072, 4096), vocab, part) for part in PARTS]
        least = min(eight[vocab], key=lambda one: one.gains[1])
        words.append(f"8 workers, {vocab // K}k: {least}")
    more = {vocab: compared(Model(16, 48, 4096, 4096), vocab, PARTS[0]) for vocab in eight}
    words += [f"16 workers, {vocab // K}k: {found}" for vocab, found in more.items()]
    every = [*more.values(), *(one for found in eight.values() for one in found)]
    even = all(one.even for one in every)
    gains = {
        v: [min(one.gains[way] for one in found) for way in (0, 1)] for v, found in eight.items()
    }
    smaller = all(
        max(one.peaks[2:]) < min(one.peaks[:2]) for one in (*eight[256 * K], more[256 * K])
    )
    model, vocab, part = Model(16, 32, 4096, 4096), 256 * K, PARTS[0]
    half = v_half(model.devices, MICROBATCHES)
    ends = at_the_ends(model, half, vocab, part, [1] * 32)
    both = [cut(model, half, vocab, part, variant) for variant in (1, 2)]
    spread = [max(one.memory) / min(one.memory) for one in (ends, *both)]
    words.append(
        f"V-Half, 16 workers, 256k: {ends.makespan / both[0].makespan - 1:+.0%}, most memory over"
        f" least {spread[0]:.2f} to {spread[1]:.2f} (variant 1) and {spread[2]:.2f} (variant 2)"
    )
    measured, holds = real()
    words.append(measured)
    conclude(
        'Yeung et al., "Balancing Pipeline Parallelism with Vocabulary Parallelism", 2024',
        "5% to 51% more throughput than naive placements, the more the larger the vocabulary; less"
        " memory where it is large; V-Half balanced in both (the authors' runs on 8 A100: +11% over"
        " both at 32k, 22.2 GB to 25.0 and 23.4; at 256k +107% over 1F1B, +35% over redistributed"
        " layers, 33.9 and 33.7 GB to 27.4 and 26.3)",
        "; ".join(words) + f"; computing {'equal on all workers' if even else 'NOT equal'}",
        f"simulated, times from FLOPs and the softmax's bytes on {DEVICE}, the least gain of"
        f" {', '.join(f'{part:.0%}' for part in PARTS)} of its peak (16 workers: {PARTS[0]:.0%}),"
        f" {MICROBATCHES} microbatches of one sequence of 4096 tokens, a transfer or a barrier"
        f" {TRANSFER:.0%} of a forward; 4B and 10B parameters without vocabulary, 7B for V-Half;"
        " the run here: float32, 8 microbatches of 64 tokens, bytes of tensors by the ledger",
        *(
            Figure(
                f"gain over {base} at {size}",
                gains[at][way],
                paper,
                "%",
                nothing=0.0,
                how="simulated",
            )
            for at, size, papers in ((32 * K, "32k", (0.11, 0.11)), (256 * K, "256k", (1.07, 0.35)))
            for way, (base, paper) in enumerate(
                zip(("1F1B", "redistributed layers"), papers, strict=True)
            )
        ),
        Figure(
            "most memory over least, V-Half",
            max(spread[1:]),
            1.0,
            nothing=spread[0],
            less=True,
            how="simulated",
        ),
        holds={
            "computing even": even,
            "memory less where the vocabulary is large": smaller,
            "what four workers hold and compute": holds,
        },
    )


if __name__ == "__main__":
    main()
