"""Random pipelines, and tiers below the device: what a draw's plan is given beside the rest."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil
from random import Random

from outsize.collectives import Mesh
from outsize.plan import Pipelined, Plan, Rest, Sharding, Stage
from outsize.plan.approximate import PARTIAL
from outsize.plan.spread import BEHIND, may_rest_below, pipelined
from outsize.schedule import Kind
from outsize.schedule.pipelines import Costs, Shape, named
from outsize.verify.shapes import Shape as Config
from outsize.verify.shapes import deepened

# All, with the number of their stages or waves, or the part of the stages that is left out.
SCHEDULES = (
    "gpipe", "1f1b", "interleaved:2", "interleaved:3", "breadth-first:2", "uniform:2", "zb-h1",
    "zb-h2", "zb-2p", "zb-v", "v-half", "v-min", "hanayo:1", "hanayo:2", "chimera", "bitpipe:1",
    "bitpipe:2", "dualpipe", "dualpipe-v", "skip-pipe", "skip-pipe:0.5",
)  # fmt: skip
COSTS = ((1.0, 1.0, 1.0), (1.0, 2.0, 0.5), (3.0, 1.0, 2.0))
STAGES = 10  # of a pipeline: deeper models take their time
TIERS = ("device", "device", "host", "disk")
# What is kept must be large enough to be moved; and a step must not take long.
SPILLED_ROW, SPILLED_STEP = 250, 2400  # tokens at most


@dataclass(frozen=True)
class Line:
    """stages: of the pipeline. split: it takes gradients of weights apart. approximate: what the
    plan has to name for it."""

    said: Pipelined = field(default_factory=Pipelined)
    stages: int = 1
    split: bool = False
    approximate: tuple[str, ...] = ()

    @property
    def least(self) -> int:
        """Stages that the plan has at least: where microbatches end anywhere, a block beside the
        head in the last of the pipeline."""
        return self.stages + len(self.approximate)


def line_of(draw: Random, mesh: Mesh, microbatches: int) -> Line:
    """A schedule, over whose workers the ends may be cut. OutsizeError where its conditions do not
    hold."""
    behind = draw.choice(("", *BEHIND))
    head = draw.choice(COSTS)
    while True:
        name, costs = draw.choice(SCHEDULES), draw.choice(COSTS)
        said = replace(pipelined(f"{name}{behind}"), costs=costs, head=head)
        made = named(said.schedule, Shape(mesh.pipeline, microbatches, Costs(*said.costs)))
        kinds = {action.kind for actions in made.schedule.workers for action in actions}
        if made.placement.stages <= max(STAGES, mesh.pipeline):
            split, other = Kind.BACKWARD_INPUT in kinds, (PARTIAL,) if made.approximate else ()
            return Line(said, made.placement.stages, split, other)


def rows_of(draw: Random, mesh: Mesh, microbatch_rows: int) -> int:
    """Rows of a step: microbatches from one to more than any schedule asks for, uneven ones."""
    workers, parts = mesh.pipeline, mesh.rows
    count = draw.choice((1, 2, workers, 2 * workers, 2 * workers, 2 * workers + 1))
    whole = parts * count * microbatch_rows
    return max(parts, whole - draw.randrange(parts * microbatch_rows))


def microbatches_of(mesh: Mesh, rows: int, microbatch_rows: int) -> int:
    """As a plan has them."""
    return min(ceil(ceil(rows / mesh.rows) / microbatch_rows), rows // mesh.rows)


def deep(draw: Random, model: Config, stages: int) -> Config:
    """A model with segments enough: as many as stages, a few more, or many."""
    segments = stages + draw.choice((0, 1, 1, 3))
    return deepened(model, max(1, segments - 2))


def with_cuts(draw: Random, line: Line, plan_stages: int) -> Pipelined:
    """Even stages, the embedding or the head alone, or any cuts."""
    said, stages = line.said, line.stages
    chance, last = draw.random(), plan_stages - 1
    if line.approximate:
        return replace(said, cuts=tuple(sorted(draw.sample(range(1, last), stages - 1))))
    if chance < 0.3 or stages == plan_stages:
        return said
    places = list(range(1, plan_stages))
    fixed = {1} if chance < 0.5 else {last} if chance < 0.7 else set[int]()
    others = [place for place in places if place not in fixed]
    cuts = fixed | set(draw.sample(others, stages - 1 - len(fixed)))
    return replace(said, cuts=tuple(sorted(cuts)))


def below(draw: Random, mesh: Mesh, shards: Sharding) -> Rest:
    """Where states rest: of what plans do not refuse for what the data axis cuts."""
    parameters, gradients, optimizer, activations = (draw.choice(TIERS) for _ in range(4))
    updated = optimizer != "device"  # so are shares of what workers cut

    def may(state: str) -> bool:
        alone = shards.optimizer == 1 if state == "parameters" else not mesh.summed
        return may_rest_below(state, shards, mesh) and (alone or updated)

    return Rest(
        parameters if may("parameters") else "device",
        gradients if may("gradients") else "device",
        optimizer,
        activations,
    )


def tokens_of(draw: Random, rest: Rest, rows: int) -> int:
    """Of a row."""
    if rest.activations == "device":
        return draw.randrange(5, 24)
    most = max(24, min(SPILLED_ROW, SPILLED_STEP // rows))
    return draw.randrange(most // 2, most + 1)


def resting(draw: Random, plan: Plan, rest: Rest) -> Plan:
    """The plan with most of its stages' states there."""
    stages = tuple(_at(draw, stage, rest) for stage in plan.stages)
    return replace(plan, stages=stages)


def _at(draw: Random, stage: Stage, rest: Rest) -> Stage:
    if draw.random() < 0.2:
        return stage
    parts = tuple(part for part in ("attention", "mlp") if part not in stage.recompute)
    chosen = parts and not stage.whole and draw.random() < 0.3
    spill = (draw.choice(parts),) if chosen and rest.activations != "device" else ()
    return replace(stage, rest=rest, spill=spill)
