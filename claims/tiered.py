"""What the claims about memory tiers share: plans by hand, real runs under the ledger, forecasts on
the hardware of papers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from outsize.data import Batch
from outsize.hardware import Hardware, Rate, Tier, catalogue
from outsize.memory import Ledger
from outsize.memory.tiers import TierSpec, open_stores
from outsize.models.build import build
from outsize.models.config import DecoderConfig
from outsize.models.families import parse
from outsize.optim import AdamW
from outsize.plan import Plan, Precision, Rest, Stage, Stream
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.search import PlanRequest, native_makers
from outsize.search.request import facts_of_model
from outsize.simulate import Forecast
from outsize.simulate.costs import Costs
from outsize.simulate.forecast import compose
from outsize.simulate.rehearse import rehearse
from outsize.simulate.sample import Sample, expand
from outsize.trace.trace import Trace

GIB = 1 << 30
ON_DEVICE = Rest()
ON_DISK = Rest("disk", "disk", "disk", "disk")
STATES_ON_DISK = Rest("disk", "disk", "disk")
GIGA = 1e9


def llama(
    hidden: int, layers: int, heads: int, vocabulary: int = 4096, inner: int | None = None
) -> DecoderConfig:
    return parse(
        {
            "model_type": "llama",
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "intermediate_size": inner or 8 * hidden // 3 // 8 * 8,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
        }
    )


def gpt(hidden: int, layers: int, heads: int, vocabulary: int = 50257) -> DecoderConfig:
    """GPT-2's shape, table and head tied."""
    return parse(
        {
            "model_type": "gpt2",
            "vocab_size": vocabulary,
            "n_embd": hidden,
            "n_layer": layers,
            "n_head": heads,
            "n_positions": 2048,
            "n_ctx": 2048,
        }
    )


def plan_of(
    config: DecoderConfig,
    rows: int,
    sequence: int,
    rest: Rest = ON_DEVICE,
    recompute: tuple[str, ...] = ("block",),
    microbatches: int = 1,
    precision: str = "float32",
    update: str = "behind",
    stream: Stream | None = None,
) -> Plan:
    """Every segment a stage, and every microbatch of a stage before the next one. The prologue and
    the epilogue keep their activations: one has next to none, the other's are used at once."""
    count = len(config.layers) + 2
    return Plan(
        count, ends_keep(per_segment(count, recompute), rest), rows, rows // microbatches, sequence,
        Precision.named(precision), loss_chunk=512, order="layer",
        update="behind" if update == "behind" else "apart", stream=stream or Stream(),
    )  # fmt: skip


def ends_keep(stages: Sequence[Stage], rest: Rest) -> tuple[Stage, ...]:
    """The stages with their states on these tiers, activations of the first and last kept."""
    ends = replace(rest, activations="device")
    last = len(stages) - 1
    return tuple(replace(s, rest=ends if i in (0, last) else rest) for i, s in enumerate(stages))


@dataclass(frozen=True)
class Ran:
    """What real steps gave. seconds: of the quickest step but the first; trace: of the last."""

    losses: list[float]
    weights: dict[str, Tensor]
    peak: int
    seconds: float
    trace: Trace
    pool: int

    def equals(self, other: Ran) -> bool:
        """Bit for bit."""
        same = (torch.equal(w, other.weights[name]) for name, w in self.weights.items())
        return self.losses == other.losses and all(same)


def train(
    config: DecoderConfig,
    plan: Plan,
    tiers: Iterable[TierSpec] = (),
    steps: int = 3,
    clip: float | None = None,
) -> Ran:
    """Real steps on random tokens, the same for every plan of one shape."""
    with open_stores(tiers) as stores:
        ledger = Ledger()
        model = build(config, seed=0)
        job = Job(
            NativeFlow(model, plan), plan, Recipe(AdamW(), clip), Here(ledger=ledger, stores=stores)
        )
        losses, seconds, peak = [], [], 0
        for step in range(steps):
            losses.append(float(job.step(batch_of(config, plan, step), 1e-3)))
            seconds.append(job.report.seconds)
            peak = max(peak, job.report.trace.peak())
        weights = {name: w.clone() for name, w in job.weights()}
        pool = job.placement.pool
        return Ran(losses, weights, peak, min(seconds[1:]), job.report.trace, pool)


def batch_of(config: DecoderConfig, plan: Plan, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, config.vocab, (plan.rows, plan.sequence), generator=generator)
    return Batch(ids, torch.roll(ids, -1, 1), ((0, plan.sequence),) * plan.rows)


def disk(folder: str | Path, nbytes: int) -> TierSpec:
    return TierSpec("disk", "disk", (Path(folder),), nbytes)


# -- forecasts ----------------------------------------------------------------------------------


def costs_of(config: DecoderConfig, plan: Plan) -> Costs:
    """What a plan's actions cost. Its blocks are alike: the first of three is rehearsed for all,
    since what a block spills needs others behind it to be gone before it is read."""
    bounds = (0, plan.sequence)
    request = PlanRequest(
        plan.rows, plan.sequence, plan.precision, AdamW(), approximate=plan.approximate,
        documents=bounds,
    )  # fmt: skip
    first, block, last = plan.stages[0], plan.stages[1], plan.stages[-1]
    blocks = tuple(replace(block, first=i, last=i + 1) for i in (1, 2, 3))
    small = replace(plan, segments=5, stages=(first, *blocks, replace(last, first=4, last=5)))
    stands = (0, *[1] * len(config.layers), 4)
    chosen = Sample(replace(config, layers=config.layers[:1] * 3), small, stands)
    makers = native_makers(chosen.config, request, bounds)
    costs = rehearse(chosen.plan, *makers, apart=True)
    return expand(costs, chosen, plan, facts_of_model(config, request))


def simulated(
    config: DecoderConfig, plan: Plan, hardware: Hardware, host: frozenset[str] = frozenset()
) -> Forecast:
    """The forecast of a plan. host: the tiers that are memory, where parts can be updated."""
    costs = costs_of(config, plan)
    return compose(plan, replace(costs, facts=replace(costs.facts, host=host)), hardware)


def machine(name: str, reached: float, tiers: Iterable[Tier]) -> Hardware:
    """One device of the catalogue at this part of its peak, with tiers below it. A device without
    bfloat16 takes its float16 rate for it."""
    hardware = catalogue(name)
    (device,) = hardware.devices
    peak = dict(device.peak)
    if "bf16" not in peak:
        peak["bf16"] = peak["fp16"]
    slower = {dtype: replace(r, value=r.value * reached, upto=None) for dtype, r in peak.items()}
    return replace(
        hardware,
        devices=(replace(device, peak=slower),),
        tiers=(*hardware.tiers, *tiers),
    )


def tier(
    name: str, read: float, write: float, source: str, size: int = 1 << 50, own: float = 0.0
) -> Tier:
    """A tier with rates in GB/s towards the device and away from it. own: of the memory itself for
    the host's processor, where it is known."""
    of = (Rate(value * GIGA, "B/s", source, "2026-11-21") for value in (read, write))
    return Tier(name, size, *of, Rate(own * GIGA, "B/s", source, "2026-11-27") if own else None)


def computing(trace: Trace) -> float:
    """Seconds in which the device computes."""
    return sum(e.end - e.start for e in trace.events if e.lane == "compute")


def largest(fits: Sequence[bool]) -> int:
    """The index of the last candidate before the first that does not fit; -1 where none fits."""
    return fits.index(False) - 1 if False in fits else len(fits) - 1
