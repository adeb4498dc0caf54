"""Claim: an automatic partition of any module is as good as the one made by hand, or better.

Karakus et al., "Amazon SageMaker Model Parallelism: A General and Flexible Framework for Large
Model Training", 2021: models of any architecture are split by measured costs, without anybody
naming the cuts, at competitive speed. Each model here makes a few steps on one worker; the times of
its blocks decide the cuts. The step of the pipeline is simulated from these times, beside the
partition that hands every stage as many blocks as the next: what is written by hand where nobody
has measured. Then the two partitions are judged by time: `outsize.prepare(mesh="pipeline=2")` under
torchrun, with the cuts that it finds and with those by hand, of a network of convolutions with
batch normalisation and of a transformer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

import by_time
import torch
from tiered import llama
from torch import Tensor, nn
from verdict import Figure, conclude

import outsize
from outsize.models.build import build
from outsize.plan import Pipelined
from outsize.plan.spread import share
from outsize.schedule.pipelines import Pipeline, Shape, make
from outsize.search.branch_and_bound import Cost, shifted
from outsize.search.partition import partition
from outsize.search.pipeline_cuts import costs_of
from outsize.simulate.coarse import Times, play
from outsize.trace import Trace

WORKERS, MICROBATCHES, STEPS, TURNS = 4, 8, 4, 2
ROUNDING = 1e-9
SCHEDULES = ("1f1b", "interleaved", "zb-v", "chimera")


class Widening(nn.Module):
    """Convolutions, every four blocks half as long and twice as wide; costs fall with depth."""

    def __init__(self) -> None:
        super().__init__()
        widths = [8 * 2 ** (i // 4) for i in range(12)]
        pairs = zip([8, *widths], widths, strict=False)
        self.stem = nn.Conv1d(4, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(a, b, 5, stride=1 if a == b else 4, padding=2), nn.GELU())
            for a, b in pairs
        )
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 4, length) to a scalar loss."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return torch.logsumexp(self.head(x.mean(2)), 1).mean()


class Filter(nn.Module):
    """Neural collaborative filtering: tables, then layers that get narrower."""

    def __init__(self) -> None:
        super().__init__()
        widths = [1024, 1024, 768, 512, 512, 256, 256, 128, 128, 64]
        self.users, self.items = nn.Embedding(5000, 512), nn.Embedding(5000, 512)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(a, b), nn.ReLU())
            for a, b in zip([1024, *widths], widths, strict=False)
        )
        self.head = nn.Linear(64, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Ids (rows,) to a scalar loss."""
        x = torch.cat((self.users(users), self.items(items)), 1)
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.softplus(-self.head(x)).mean()


def subjects() -> Iterator[tuple[str, nn.Module, object]]:
    """Name, model and a batch of one microbatch."""
    decoder = build(llama(128, 14, 4, vocabulary=8192), seed=0)
    yield "decoder, 14 blocks, vocabulary 8192", decoder, torch.randint(8192, (2, 256))
    yield "convolutions that widen", Widening(), (torch.randn(4, 4, 4096),)
    users, items = torch.randint(5000, (2, 1024))
    yield "collaborative filtering", Filter(), (users, items)


def measured(model: nn.Module, batch: object) -> list[Cost]:
    """Costs of the model's fine stages, from real steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    job = outsize.prepare(model, optimizer, memory="8GiB", recompute=())
    traces: list[Trace] = []
    for _ in range(STEPS):
        job.step(batch)
        traces.append(job.report.trace)
    assert job.forecast is not None
    events = tuple(event for trace in traces[1:] for event in trace.events)
    costs = costs_of(replace(job.forecast, trace=Trace("measured", events)))
    job.close()
    return costs


def seconds(made: Pipeline, costs: Sequence[Cost], cuts: Sequence[int]) -> float:
    """Simulated, of a step: a forward takes a third, and each of the gradients."""
    edges = [0, *cuts, len(costs)]
    stages = tuple(sum(c.seconds for c in costs[a:b]) for a, b in pairwise(edges))
    third = 1 / 3 / made.placement.share
    return play(made, Times(third, third, third, stages=stages)).run.makespan


def by_hand(count: int, stages: int) -> tuple[int, ...]:
    """Cuts with as many fine stages in each stage."""
    return tuple(share(count, stages, place)[0] for place in range(1, stages))


def tuned(costs: Sequence[Cost], pipeline: Pipeline) -> tuple[int, ...]:
    """The cuts with the shortest simulated step that shifting finds, from those of `partition` and
    from equal numbers of fine stages: where stages of a worker differ, waits count beside loads."""
    place, count = pipeline.placement, len(costs)
    starts = [(*partition(costs, place), count), (*by_hand(count, place.stages), count)]

    def makespan(ends: Sequence[int]) -> tuple[float]:
        return (seconds(pipeline, costs, ends[:-1]),)

    ends = min((shifted(start, makespan, together=1) for start in starts), key=makespan)
    return ends[:-1]


def work() -> dict[str, list[float]]:
    """By subject the least seconds of a step, cut by hand and as `prepare` finds."""
    ways = {}
    for name, (made, _) in by_time.subjects().items():
        blocks = len(made().blocks)  # type: ignore[arg-type]
        hand = Pipelined("1f1b", by_hand(blocks + 2, by_time.WORKERS))
        ways[name] = [{"microbatches": MICROBATCHES, "pipeline": line} for line in (hand, "1f1b")]
    return by_time.least(ways, TURNS)


def main() -> None:
    if by_time.is_worker():
        by_time.tell(work())
        return
    timed = {name: hand / ours for name, (hand, ours) in by_time.run(__file__).items()}
    torch.manual_seed(0)
    torch.set_num_threads(1)
    gains = []
    for name, model, batch in subjects():
        costs = measured(model, batch)
        shown = []
        for schedule in SCHEDULES:
            made = make(schedule, Shape(WORKERS, MICROBATCHES))
            stages = made.placement.stages
            hand = seconds(made, costs, by_hand(len(costs), stages))
            gains.append(hand / seconds(made, costs, tuned(costs, made)))
            shown.append(f"{schedule} {gains[-1]:.2f}")
        total = sum(c.seconds for c in costs)
        print(f"  {name}: longest block {max(c.seconds for c in costs) / total:.0%} of")
        print(
            f"    {total * 1e3:.1f} ms; as many blocks a stage over automatic: {', '.join(shown)}"
        )
    mean = prod(gains) ** (1 / len(gains))
    conclude(
        'Karakus et al., "Amazon SageMaker Model Parallelism", 2021',
        "automatic partition of any architecture, competitive with the one made by hand",
        f"step time by hand over automatic {min(gains):.2f} to {max(gains):.2f}, {mean:.2f} in the"
        " mean, simulated; run on two workers: "
        + ", ".join(f"{name} {gain:.2f}" for name, gain in timed.items()),
        f"block times measured here on one worker; pipelines of {WORKERS} workers and"
        f" {MICROBATCHES} microbatches simulated from them, no transfers; by hand: as many blocks"
        f" in every stage; {', '.join(SCHEDULES)}",
        Figure(
            "step of equal blocks over ours, least",
            min(gains),
            1.0,
            nothing=0.0,
            how="simulated",
            timed=True,
            other="the cut by hand stands for a person's",
        ),
        *(
            Figure(
                f"step of equal blocks over ours by time, {name}",
                gain,
                1.0,
                nothing=0.0,
                timed=True,
            )
            for name, gain in timed.items()
        ),
    )


if __name__ == "__main__":
    main()
