"""Bytes of the fullest worker in a training step: states, activations, what is kept beside them.

Activations are counted operator by operator as Korthikanti et al. do (Reducing activation
recomputation in large transformer models, 2022): s b H (34 + 5 a s / H) bytes a layer for GPT with
dropout is what this gives, divided over the tensor axis as there. How many microbatches of them a
stage holds is the 1F1B bound (outsize/schedule/pipelines), or that of interleaved chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from outsize.foresight import resting
from outsize.foresight.layout import Layout, Resting, stored
from outsize.foresight.module import Module, most_live
from outsize.foresight.shape import Shape
from outsize.foresight.sources import KERNELS
from outsize.foresight.step import graded, held, layers_at, layers_on
from outsize.hardware.cluster import Group
from outsize.hardware.hardware import Device

GIB = 2.0**30
JOINED = 4.0  # bytes of a logit that came from others: the parts, and what they are joined into
CHAIN = 10.0  # bytes more of a token and hidden unit: RMSNorm's chain keeps float32 copies


@dataclass(frozen=True)
class Reserves:
    """What a process keeps beside tensors: bytes of libraries, with a driver's buffers, and of each
    communicator, and as a part of tensors what its allocator has and cannot use. source: of it.
    doubt: the part of a device that a choice leaves free, for bytes that are foretold too low;
    batches: whether all of a step's batch lies there, not the microbatches under way alone."""

    libraries: float
    communicator: float
    fragments: float
    source: str
    doubt: float = 0.0
    batches: bool = False


# The driver with the libraries' kernels, NCCL's buffers, PyTorch's caching allocator.
DRIVEN = Reserves(
    0.85 * GIB, 0.3 * GIB, 0.038,
    "outsize/foresight/memory.py: AIConfigurator's and SimuMax's tables, out-of-memory labels",
    # Of published runs with their bytes, a tenth of BLOOM's and of SimuMax's had 5 to 8% more.
    doubt=0.05,
)  # fmt: skip
# An interpreter with PyTorch and the modules of a run is all; messages and buffers of 1 MiB and
# more are mappings of their own, which go back as they are freed (outsize/hardware/host.py).
HOSTED = Reserves(
    0.25 * GIB, 0.0, 0.0,
    "outsize/foresight/memory.py: a process that has trained, resident, 2026-11-26", batches=True,
)  # fmt: skip


def reserves(device: Device) -> Reserves:
    """Those of a device's processes."""
    return DRIVEN if device.apart else HOSTED


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest worker. tensors: all that is allocated at the peak; reserved: with what
    the allocator cannot use; process: with context and communicators too."""

    states: Mapping[str, float]
    activations: float
    head: float
    gathered: float
    axes: int  # communicators
    kept: Reserves = DRIVEN
    below: Mapping[str, float] = field(default_factory=dict)  # bytes on each tier below the device

    @property
    def tensors(self) -> float:
        return sum(self.states.values()) + self.activations + self.head + self.gathered

    @property
    def reserved(self) -> float:
        return self.tensors * (1 + self.kept.fragments)

    @property
    def process(self) -> float:
        return self.reserved + self.kept.libraries + self.kept.communicator * self.axes

    def counted(self, way: str) -> float:
        """As a publication counts: "allocated", "reserved" or "process"."""
        return {"allocated": self.tensors, "reserved": self.reserved}.get(way, self.process)


def memory(shape: Shape, layout: Layout, kept: Reserves = DRIVEN) -> Memory:
    """Of the fullest worker: that of the first stage, of the second, which may have more layers, or
    of the last, whichever has most. A module's blocks may be unlike, so that it is any of them."""
    p = layout.pipeline
    places = range(p) if shape.module is not None else sorted({0, min(1, p - 1), p - 1})
    made = [_stage(shape, layout, place, kept) for place in places]
    return replace(max(made, key=lambda one: one.tensors), kept=kept)


def workers(shape: Shape, layout: Layout, kept: Reserves = DRIVEN) -> dict[str, Memory]:
    """Of every distinct worker: those of a stage hold the same."""
    p = layout.pipeline
    made = [replace(_stage(shape, layout, place, kept), kept=kept) for place in range(p)]
    if p == 1:
        return {"every worker": made[0]}
    return {f"stage {place + 1} of {p}": one for place, one in enumerate(made)}


def fits(made: Memory, machines: Group) -> bool:
    """Whether a process has so much, reserves included."""
    return made.process <= machines.device.memory_bytes


def _stage(shape: Shape, lay: Layout, place: int, reserves: Reserves) -> Memory:
    if shape.module is not None:
        return _of_module(shape, shape.module, lay, place, reserves)
    last = place == lay.pipeline - 1
    plain, experts = _parameters(shape, lay, place)
    live = _in_flight(lay, place)
    layers = layers_at(shape, lay, place)
    again = min(lay.whole, layers)
    activations = kept = kept_by(shape, lay, layers) * live
    if again or lay.recompute == "full":  # one layer has all of its own while it is computed again
        activations += _per_layer(shape, lay, "none")
    head = _head(shape, lay) if last else 0.0
    states = _states(lay, plain, experts)
    made = Memory(states, activations, head, _gathered(shape, lay), _axes(lay))
    return made if lay.resting == Resting() else _rested(shape, lay, made, kept)


def _axes(lay: Layout) -> int:
    sizes = lay.tensor, lay.pipeline, lay.context, lay.data, lay.expert
    return sum(size > 1 for size in sizes)


def _of_module(shape: Shape, module: Module, lay: Layout, place: int, reserves: Reserves) -> Memory:
    """As its rehearsal counts activations; those of the loss are among them."""
    trained, frozen = module.held(lay, place)
    states = _states(lay, trained, 0.0)
    states["weights"] += stored(lay) * frozen / lay.shards
    one, meanwhile = module.activations(lay, place)
    live = _in_flight(lay, place)
    kept = most_live(lay, place, one, live)
    meanwhile += module.crossed(lay, place, live)
    if reserves.batches:
        meanwhile += int(module.batch(lay) * max(0.0, 1 - live / lay.microbatches))
    gathered = module.gathered(lay) if lay.shards > 1 else 0
    made = Memory(states, kept + meanwhile, 0.0, float(gathered), _axes(lay))
    return made if lay.resting == Resting() else _rested(shape, lay, made, kept)


def _rested(shape: Shape, lay: Layout, whole: Memory, kept: float) -> Memory:
    """What is left on the device where some of it rests below. kept: activations that do."""
    at, part = lay.resting, graded(shape, lay)
    below = zip(("weights", "gradients", "optimizer"), at.parts(part), strict=True)
    states = {kind: whole.states[kind] * (1 - gone) for kind, gone in below}
    more = resting.buffers(lay, _largest(shape, lay) / lay.shards, sum(held(shape, lay)))
    activations = whole.activations
    if at.activations:  # those of the layers that are computed and fetched
        activations -= kept * max(0.0, 1 - 2 / shape.layers)
    return replace(
        whole, states=states, activations=activations, gathered=whole.gathered + more,
        below=resting.below(whole.states, kept if at.activations else 0.0, at, part),
    )  # fmt: skip


def _largest(shape: Shape, lay: Layout) -> float:
    """Parameters of a layer or of the vocabulary, of which a stage has more."""
    if shape.module is not None:
        block, *outside = shape.module.largest(lay)
        return float(max(block, sum(outside)))
    plain, experts = held(shape, lay)
    vocab = shape.of_vocabulary / (lay.tensor if lay.stack.vocabulary_cut else 1)
    layers = plain - vocab * (1 if shape.tied else 2) + experts
    return max(layers / shape.layers, vocab)


def _parameters(shape: Shape, lay: Layout, place: int) -> tuple[float, float]:
    """Of a stage: those that the data axis copies, and those of experts."""
    plain, experts = held(shape, lay)
    if lay.pipeline == 1:
        return plain, experts
    most, behind = layers_on(shape, lay)
    last = place == lay.pipeline - 1
    part = layers_at(shape, lay, place) / layers_at(shape, lay, 0)
    ends = shape.of_vocabulary / (lay.tensor if lay.stack.vocabulary_cut else 1)
    if shape.parts.routed:  # dense layers come first
        average = shape.parts.routed / shape.layers
        mine = max(0.0, most - shape.dense) / most if place == 0 else 1.0
        if last:
            mine = min(1.0, shape.parts.routed / behind)
        experts *= mine / average
    kept = ends if place == 0 or last or lay.vocabulary_over > 1 else 0.0
    return (plain - ends) * part + kept, experts * part


def _states(lay: Layout, plain: float, experts: float) -> dict[str, float]:
    stack, every = lay.stack, plain + experts
    if lay.frozen:
        return {"weights": stored(lay) * every / lay.shards, "gradients": 0.0, "optimizer": 0.0}
    if lay.shards > 1:
        cut = plain / lay.shards + experts / max(1, lay.shards // lay.expert)
        return {
            "weights": stack.weights * cut,
            "gradients": stack.gradients * (every if lay.cut_gradients else cut),
            "optimizer": stack.optimizer * cut,
        }
    cut = plain / lay.states + experts / max(1, lay.states // lay.expert)
    return {
        "weights": stored(lay) * every,
        "gradients": stack.gradients * every,
        "optimizer": stack.optimizer * cut,
    }


def _in_flight(lay: Layout, place: int) -> float:
    """Microbatches whose activations a stage holds, in units of all its layers: of 1F1B those
    between it and the end, of interleaved chunks what their warm-up lets in (Narayanan et al.,
    Efficient large-scale language model training on GPU clusters, 2021)."""
    p, v, m = lay.pipeline, lay.chunks, lay.microbatches
    if p == 1:
        return 1.0
    behind = p - 1 - place
    whole = behind + 1 + lay.stack.buffers + lay.waiting
    if v > 1:
        whole = (2 * behind + (v - 1) * p + 1) / v
    return min(float(m), whole)


def kept_by(shape: Shape, lay: Layout, layers: float) -> float:
    """Bytes that so many layers of a worker keep of a microbatch for their backward passes."""
    if shape.module is not None:
        return float(sum(shape.module.activations(lay, 0)[0]))
    again = min(lay.whole, layers)
    found = _per_layer(shape, lay, lay.recompute) * (layers - again)
    return found + (_per_layer(shape, lay, "full") * again if again else 0.0)


def _per_layer(shape: Shape, lay: Layout, recompute: str) -> float:
    """Bytes that an average layer keeps of a microbatch for its backward pass."""
    t, tokens, h = lay.tensor, lay.tokens, shape.hidden
    spread = t if lay.sequence_parallel else 1
    if recompute == "full":
        return stored(lay) * h * tokens / spread
    chains = shape.gated and not lay.stack.fused
    stream = 8.0 + (2.0 if shape.dropout else 0.0)
    if chains and not lay.stack.norms:
        stream += CHAIN
    kept = tokens * h * stream / spread * shape.parts.halves
    keys, values = shape.widths
    heads, attending = 2.0 * tokens / t, shape.parts.attending / shape.layers
    kept += attending * heads * (shape.heads + shape.n_groups) * (keys + values)
    if chains:  # before they were rotated
        kept += attending * heads * (shape.heads + shape.n_groups) * keys
    if lay.attention not in KERNELS and recompute != "attention":
        score = 5.0 if shape.dropout else 4.0
        kept += attending * score * lay.rows * shape.heads / t * lay.sequence**2
    if shape.recurrent is not None:  # in and out of its convolution, and its gate; the result
        channels = 2 * shape.recurrent.mixed + 3 * shape.recurrent.inner
        kept += shape.parts.recurring / shape.layers * 2.0 * tokens / t * channels
    dense = shape.parts.plain / shape.layers
    inner = dense * shape.d_inner + shape.parts.routed / shape.layers * shape.shared
    kept += tokens / t * inner * (6.0 if shape.gated else 4.0)
    if shape.parts.routed and recompute != "experts":
        sent = tokens / t * shape.active * shape.parts.routed / shape.layers
        hidden = shape.expert_hidden or h
        kept += sent * (4.0 * hidden + shape.expert_inner * (6.0 if shape.gated else 4.0))
    kept *= {"half": 0.5, "norms": 0.75}.get(recompute, 1.0)
    if lay.stack.keys_whole:
        kept += attending * heads * (lay.context - 1) * shape.n_groups * (keys + values)
    return kept * stored(lay) / 2


def _head(shape: Shape, lay: Layout) -> float:
    """Logits in half and in float32, with the gradient that goes back, and the last norm. Where one
    pass turns them into their gradient in place they are there once, and behind it the head's own
    gradient, a product in 16 bits that is added to what is kept in float32; or, where that is more,
    gradients inside the last layer: of an MLP's three inner tensors and four of the stream."""
    alone = lay.tensor == 1 and lay.vocabulary == "last" and not shape.capped
    if lay.stack.in_place and alone:
        made = stored(lay) * shape.of_vocabulary if stored(lay) < lay.stack.gradients else 0.0
        ending = lay.tokens * (stored(lay) * shape.vocab + 4 * shape.hidden) + made
        inner = max(shape.d_inner, shape.active * shape.expert_inner + shape.shared)
        return max(ending, lay.tokens * stored(lay) * (3 * inner + 4 * shape.hidden))
    cut = lay.tensor if lay.stack.logits_cut else 1
    cut *= lay.vocabulary_over
    joined = JOINED if cut < lay.tensor else 0.0
    spread = lay.tensor if lay.sequence_parallel else 1
    each = shape.vocab / cut * (lay.stack.logits + joined)
    return lay.tokens * (each + 4 * shape.hidden / spread)


def _gathered(shape: Shape, lay: Layout) -> float:
    """Parameters of two layers that are whole for a while, with the gradients of one."""
    if lay.shards == 1:
        return 0.0
    plain, experts = held(shape, lay)
    if lay.pipeline > 1:  # all stay from the first microbatch to the last
        return (2 + lay.stack.gradients) * (plain + experts)
    layers = layers_on(shape, lay)[0]
    vocab = shape.of_vocabulary / (lay.tensor if lay.stack.vocabulary_cut else 1)
    layer = (plain - vocab) / layers + experts / layers
    return 2 * (2 * layer) + lay.stack.gradients * layer + 2 * vocab
