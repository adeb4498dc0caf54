"""Seconds of a training step of a layout on a cluster, from closed bounds of its schedule.

A pipeline of p stages with m microbatches and v chunks takes m beats of its slowest stage and one
beat of each other stage, of which v chunks leave 1 / v (Narayanan et al., Efficient large-scale
language model training, 2021; equal to what outsize/simulate/coarse.py plays of 1F1B). What is said
beside computing and what is computed hide each other only in part: a p-norm, not the larger one.

`terms` counts what a layout does, at the rates of a cost source; `combine` makes seconds of it with
the constants that remain. Both are plain arithmetic, so that combine takes numpy arrays of
thousands of layouts as well as one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from outsize.foresight import resting
from outsize.foresight.layout import Layout, Resting, stored
from outsize.foresight.links import Ranks, seconds
from outsize.foresight.network import Network, network_of
from outsize.foresight.shape import Shape
from outsize.foresight.sources import CostSource, source_of
from outsize.foresight.work import Lanes, Work, add, lanes, over_stages
from outsize.hardware.cluster import Cluster
from outsize.hardware.talking import norm

COMPUTING = ("matmul", "narrow", "attention", "scores", "scan", "traffic", "cast", "adding")
SAYING = ("tensor", "exchange")
LANES = (*COMPUTING, "launch", *SAYING, "ring", "stages", "passed", "gathers", "moved", "waited",
         "blocked", "called")  # fmt: skip
AT_END = ("sums", "update")
BUCKET = 40e6  # elements that are summed in one call (Megatron-LM's default)
HIDDEN = 4.0  # of the norm in which computing and saying hide each other
ALL = 1.0  # of the one in which neither does: a processor's cores compute and carry what is said
# The same, at most, of parameters that come for every layer in turn: their collectives take cores
# and bandwidth from products, and the first of each pass hides behind nothing. Of experts' tokens
# too, for which experts wait, unless another microbatch's layers go on beside them.
GATHERED = 1.25
UPDATED = 32.0  # bytes an update reads and writes of a parameter: gradient, master, two moments


@dataclass(frozen=True)
class Terms:
    """Seconds of lanes: of a microbatch on a middle stage and on the last one; at the step's end.

    slots: m, the microbatches, and beats that a backward pass comes later; fill: other stages over
    chunks; nodes: machines of the run."""

    middle: Mapping[str, float]
    last: Mapping[str, float]
    end: Mapping[str, float]
    slots: float
    stages: float
    chunks: float
    nodes: float
    window: float  # of the beat that sums of gradients may go on beside
    spare: float = 0.0  # by which other stages' sends are shorter than those of the slowest, in sum
    norm: float = HIDDEN  # in which computing and saying hide each other
    exchanged: float = GATHERED  # the same of experts' tokens
    measured: bool = False  # whether products were measured on the device, not read off its sheet


def terms(
    shape: Shape, layout: Layout, cluster: Cluster, source: CostSource | None = None,
    network: Network | None = None,
) -> Terms:  # fmt: skip
    """What a layout does in a step. network: instead of the rates that the cluster has. Raises
    OutsizeError for a dtype the device does not know."""
    machines = cluster.groups[0]
    network = network or network_of(cluster)
    source = source or source_of(machines.device, "bf16" if layout.narrow else layout.precision)
    work = Work(shape, layout, source, machines, network)
    middle, last, spare = _stages(work)
    _accumulated(middle, work, ends=layout.pipeline == 1)
    if last is not middle:
        _accumulated(last, work, ends=True)
    end = _end(work)
    if layout.resting != Resting():
        _moved_below(cluster, work, last, end)
    nodes = max(1, layout.devices // machines.node)
    slots = layout.microbatches + layout.waiting
    return Terms(
        middle, last, end, slots, layout.pipeline, layout.chunks, nodes,
        _window(layout), spare, _norm(cluster), HIDDEN if layout.stack.woven else GATHERED,
        bool(machines.device.measured.matmul),
    )  # fmt: skip


def _norm(cluster: Cluster) -> float:
    """Of the device, as it was measured or as its kind has it."""
    if cluster.slowed is not None:
        return norm(cluster.slowed)
    return HIDDEN if cluster.groups[0].device.apart else ALL


def _window(layout: Layout) -> float:
    """Beats that sums of gradients may go on beside: the last backward pass, two thirds of a beat,
    of the last chunk; with interleaved chunks those of all chunks but one, which end a round of
    microbatches earlier each. Megatron gathers beside the next forward passes too."""
    if not layout.stack.beside_data:
        return 0.0
    part = 1.0 if layout.stack.family == "megatron" and layout.states > 1 else 2 / 3
    if layout.chunks == 1:
        return part
    rounds = min(layout.pipeline, layout.microbatches)
    return part * rounds * (layout.chunks - 1) / layout.chunks


def _stages(work: Work) -> tuple[Lanes, Lanes, float]:
    """Lanes of a microbatch on a stage in the middle, and on the last; what Terms call spare."""
    p = work.layout.pipeline
    middle, last = _computed(work) if work.shape.module is None else work.shape.module.lanes(work)
    if p == 1:
        return last, last, 0.0
    each = _sends(work)
    beside = work.layout.chunks > 1  # while one chunk's are sent another one computes
    for stage in (middle, last):
        stage["passed" if beside else "stages"] += max(each)
    return middle, last, 0.0 if beside else sum(max(each) - one for one in each)


def _computed(work: Work) -> tuple[Lanes, Lanes]:
    """What a stage in the middle and the last one do of a microbatch."""
    shape, p = work.shape, work.layout.pipeline
    middle, last = lanes(), lanes()
    most, behind = layers_on(shape, work.layout, shape.parts.further)
    how = work.layout.vocabulary
    if how == "moved" and p > 1:
        most, behind = _moved(work, shape.layers + shape.parts.further)
    again = min(work.layout.whole, most)
    add(middle, work.layer, most - again)
    add(last, work.layer, max(0, behind - again))
    if again:
        add(middle, work.recomputed.layer, again)
        add(last, work.recomputed.layer, min(again, behind))
    heads = 1 + shape.predicted
    add(last, work.head, heads)
    if work.layout.vocabulary_over > 1:
        add(middle, work.head, heads)
        for stage in (middle, last):
            stage["passed" if how == "cut" else "stages"] += over_stages(work)
    return middle, last


def _sends(work: Work) -> list[float]:
    """Seconds of what a microbatch sends over each border of two stages, forward and back."""
    lay, machines = work.layout, work.machines
    sent, p, stride = work.sent, lay.pipeline, lay.devices // lay.pipeline
    if work.network is None:
        both = [seconds("send", sent, Ranks(2, inside), machines) for inside in (1, 2)]
        apart = [stage * stride // machines.node for stage in range(p)]
        return [2 * lay.chunks * both[one == other] for one, other in pairwise(apart)]
    borders = [
        [Ranks(2, 1, rate) if rate else Ranks(2, 2) for rate in both]
        for both in work.network.borders(p, stride)
    ]
    return [
        lay.chunks * sum(seconds("send", sent, group, machines) for group in both)
        for both in borders
    ]


def layers_of(layers: int, stages: int) -> tuple[float, float]:
    """Of a stage in the middle, and of the last. Where layers and the two ends together divide
    evenly and layers alone do not, ends count as layers (BLOOM's partition)."""
    if layers % stages and not (layers + 2) % stages:
        each = (layers + 2) // stages
        return each, each - 1
    return math.ceil(layers / stages), layers // stages


def layers_on(shape: Shape, lay: Layout, further: int = 0) -> tuple[float, float]:
    """The same of a layout's stages. further: layers that predict later tokens, which a stack that
    leaves the rest to its last stage has there (Megatron-Bridge's layouts of DeepSeek-V3: of 61
    layers 4 on each of 15 chunks and 1 on the last; DeepSpeed, of 78 on 12 stages: 7 and 1)."""
    layers, p = shape.layers, lay.pipeline
    if lay.stack.balanced and p > 1:
        return _balanced(layers, p, shape.end)
    most, behind = layers_of(layers + further, p)
    if not lay.stack.left or p == 1 or not (layers + 2) % p:
        return most, behind
    most = math.ceil(layers / (p * lay.chunks)) * lay.chunks
    left = layers - (p - 1) * most
    return (most, left + further) if left > 0 else (layers_of(layers, p)[0], behind)


def layers_at(shape: Shape, lay: Layout, place: int) -> float:
    """Of one stage, the first one 0."""
    most, behind = layers_on(shape, lay)
    if place and place == lay.pipeline - 1:
        return behind
    if place == 0 and lay.stack.balanced and lay.pipeline > 2:
        return shape.layers - behind - (lay.pipeline - 2) * most
    return most


def _balanced(layers: int, stages: int, end: float) -> tuple[float, float]:
    """As layers_of, so that the stage with most parameters has as few as can be; stages are filled
    one after the other, the first one behind the embedding. end: of it, in layers."""
    for most in sorted(n + each for n in range(layers + 1) for each in (0.0, end)):
        first, others = math.floor(most - end + 1e-9), math.floor(most + 1e-9)
        behind = layers - first - (stages - 2) * others
        if 0 <= behind <= first:
            return (others if stages > 2 else first), behind
    return layers_of(layers, stages)


def _moved(work: Work, layers: int) -> tuple[float, float]:
    """Whole layers moved from the last stage to the others, as far as that helps."""
    p = work.layout.pipeline
    one, head = _total(work.layer), _total(work.head)
    best = min(
        range(layers // p + 1),
        key=lambda kept: max(kept * one + head, math.ceil((layers - kept) / (p - 1)) * one),
    )
    return math.ceil((layers - best) / (p - 1)), best


def _total(lanes: Mapping[str, float]) -> float:
    return sum(value for lane, value in lanes.items() if lane != "launch")


def held(shape: Shape, layout: Layout, ends: bool = True) -> tuple[float, float]:
    """Parameters of the busiest worker: those that a data axis copies, and those of experts. ends:
    with a vocabulary, which a stage in the middle has not unless it is cut over all."""
    if shape.module is not None:
        return float(shape.module.most(layout)[0]), 0.0
    t, p = layout.tensor, layout.pipeline
    layers = layers_at(shape, layout, 0) if ends else layers_on(shape, layout)[0]
    dense = shape.parts.plain * shape.of_dense
    routed = shape.parts.routed / shape.layers
    each = (shape.of_mixers + dense) / shape.layers + routed * shape.of_shared
    plain = layers * (each / t + shape.of_norms)
    vocab = shape.of_vocabulary / (t if layout.stack.vocabulary_cut else 1)
    if layout.vocabulary_over > 1:
        plain += vocab / p * (1 if shape.tied else 2)
    elif p > 1:
        plain += vocab if ends else 0.0
    else:
        plain += vocab * (1 if shape.tied else 2)
    experts = layers * routed * shape.experts * shape.of_expert / layout.expert
    return plain, experts


def _accumulated(stage: Lanes, work: Work, ends: bool) -> None:
    """What gradients of a microbatch cost beside their products: they are added to what there is,
    or go to the workers that keep them, whose parameters come in turn."""
    lay, mine = work.layout, sum(held(work.shape, work.layout, ends))
    module = work.shape.module
    whole = mine if module is None else sum(module.most(lay))  # with what is frozen
    if lay.shards > 1 and lay.pipeline == 1:
        group = work.ranks(lay.shards, lay.tensor)
        passes = 1 if lay.cut_gradients else 2
        layers = layers_of(work.shape.layers, lay.pipeline)[0]
        calls = layers * lay.stack.calls
        one = seconds("gather", whole * stored(lay), group, work.machines, calls)
        back = seconds("scatter", mine * lay.stack.added, group, work.machines, calls)
        stage["gathers" if lay.stack.prefetched else "waited"] += passes * one + back
    elif lay.microbatches > 1 and not lay.frozen:
        stage["adding"] += work.source.traffic(2 * lay.stack.added * mine).seconds


def _end(work: Work) -> dict[str, float]:
    """Of a step: sums of gradients, what the update moves, parameters that come back."""
    lay = work.layout
    plain, experts = held(work.shape, lay)
    if lay.frozen:
        return {"sums": 0.0, "update": 0.0}
    copies = lay.data * lay.context
    sums = 0.0
    for mine, size, stride in (
        (plain, copies, lay.tensor),
        (experts, copies * lay.tensor // lay.expert, lay.tensor * lay.expert),
    ):
        if size > 1 and mine:
            sums += _summed(mine, size, stride, work)
    cut = max(lay.states, lay.shards)
    mine = plain / cut + experts / max(1, cut // lay.expert)
    moved = UPDATED * mine + 2 * lay.stack.added * (plain + experts) / lay.shards
    return {"sums": sums, "update": work.source.traffic(moved).seconds}


def _moved_below(cluster: Cluster, work: Work, stage: Lanes, end: dict[str, float]) -> None:
    """What passes a worker's link because it rests below the device; the worker has all layers."""
    from outsize.foresight.memory import kept_by  # which asks this module what is held

    shape, lay = work.shape, work.layout
    mine, kept = sum(held(shape, lay)) / lay.shards, kept_by(shape, lay, shape.layers)
    part = graded(shape, lay)
    stage["moved"] += resting.seconds(cluster, lay, *resting.of_microbatch(lay, mine, kept, part))
    updated = sum(held(shape, lay)) / max(lay.states, lay.shards)
    end["update"] *= 1 - resting.both(lay.resting, part) * lay.resting.apart
    moved = resting.updating(cluster, lay, updated, part)
    end["update"] = together(end["update"], moved)


def graded(shape: Shape, lay: Layout) -> float:
    """How much of a worker's parameters the blocks have of which states rest below in part."""
    if not lay.resting.layers:
        return 1.0
    plain, experts = held(shape, lay)
    ends = shape.of_vocabulary / (lay.tensor if lay.stack.vocabulary_cut else 1)
    blocks = plain + experts - ends * (1 if shape.tied else 2)
    return blocks / (plain + experts) * lay.resting.layers / shape.layers


def _summed(mine: float, size: int, stride: int, work: Work) -> float:
    """Seconds until gradients of a group are summed and its parameters are whole again."""
    lay, machines = work.layout, work.machines
    stride = min(stride, machines.count)
    if lay.shards > 1 and lay.pipeline > 1:  # gathered and summed once, as sharded states are
        return _over_states(mine, size, stride, lay.shards, work)
    if lay.shards > 1:  # what is sharded over fewer than all is summed over the copies of a shard
        rest = size // lay.shards
        group = work.ranks(rest, stride * lay.shards)
        return seconds("all_reduce", mine / lay.shards * lay.stack.sent, group, machines)
    if lay.states > 1:
        return _over_states(mine, size, stride, lay.states, work)
    whole = work.ranks(size, stride)
    return seconds("all_reduce", mine * lay.stack.sent, whole, machines)


def _over_states(mine: float, size: int, stride: int, states: int, work: Work) -> float:
    """Sums to the workers that update a part each, and over those that update the same; then the
    parts of parameters to all."""
    lay, machines = work.layout, work.machines
    cut = work.ranks(min(size, states), stride)
    calls = max(1.0, mine / BUCKET)
    found = seconds("scatter", mine * lay.stack.sent, cut, machines, calls)
    found += seconds("gather", mine * stored(lay), cut, machines, calls)
    if states < size:
        rest = work.ranks(size // states, stride * states)
        found += seconds("all_reduce", mine / states * lay.stack.sent, rest, machines)
    return found


# -- seconds ---------------------------------------------------------------------------------------


def together(one: Any, other: Any, norm: Any = HIDDEN) -> Any:
    """Of two things beside each other: the longer one, and more the nearer they are."""
    return (one**norm + other**norm) ** (1 / norm)


def beat(of: Mapping[str, Any], norm: Any = HIDDEN, exchanged: Any = GATHERED) -> Any:
    """Of a microbatch on a stage. norm: in which what is said is hidden; exchanged: the same of
    experts' tokens, at most."""
    computing = sum(of[lane] for lane in COMPUTING) + 1e-12
    computing = together(computing, of["ring"], norm)
    computing = together(computing, of["launch"])
    computing = together(computing + of["tensor"], of["exchange"], _smaller(norm, exchanged))
    computing = together(computing, of["passed"], norm)
    computing = together(computing, of["gathers"], _smaller(norm, GATHERED))
    computing = together(computing, of["moved"])
    return computing + of["waited"] + of["blocked"] + of["called"] + of["stages"]


@dataclass(frozen=True)
class Seconds:
    """Of a step: in beats of the slowest stage, in filling and draining, and at its end."""

    beats: Any
    fill: Any
    sums: Any
    update: Any
    spread: Any  # factor of waiting for the slowest of many machines

    @property
    def total(self) -> Any:
        return (self.beats + self.fill + self.sums + self.update) * self.spread


def combine(terms: Any, spread: Any = 1.0) -> Seconds:
    """Seconds of a step from terms whose lanes constants have already been applied to."""
    middle, last = (
        beat(stage, terms.norm, terms.exchanged) for stage in (terms.middle, terms.last)
    )
    slowest = _larger(middle, last)
    every = (terms.stages - 1) * middle + last - terms.spare
    fill = (every - slowest) / terms.chunks
    window = slowest * terms.window + 1e-9
    sums = together(window, terms.end["sums"], terms.norm) - window
    return Seconds(terms.slots * slowest, fill, sums, terms.end["update"], spread)


def _smaller(one: Any, other: Any) -> Any:
    return (one + other - abs(one - other)) / 2


def _larger(one: Any, other: Any) -> Any:
    return (one + other + abs(one - other)) / 2
