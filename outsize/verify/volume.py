"""Bytes that a step of a plan should take, by formula.

States, matrices that are updated as wholes, and the few numbers on which all agree: what the
program's actions say (outsize/schedule/talk.py). What depends on a microbatch's tokens is worked
out here, apart from the planner's rehearsal. Tensor parallelism: the hidden states cross twice a
layer and direction (Shoeybi et al., "Megatron-LM", 2019, section 3; with tokens cut a gather and a
scatter take the place of each sum, Korthikanti et al., 2022), once more each where a block is
recomputed; of blocks that share rows there, a gather behind the last one and of the gradient before
the first (Yuan et al., "OneFlow", 2021, section 3.2); the loss exchanges three numbers a token
(four where it is smoothed), a norm over all heads one each way. Pipelines: the hidden states of a
microbatch cross once from stage to stage and their gradients once back, and nothing else does. Ends
that are cut (Yeung et al., 2024, section 4): all workers sum the embedding of a microbatch and the
gradient of the last stage's output, and exchange the loss's numbers; that output and the gradient
of the first stage's input go to each of them. Experts that other workers have: what crosses is the
router's to say, and the formula a bound.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod

from outsize.collectives import Mesh
from outsize.kernels.entropy import LossOptions
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.parallel.execution import execution_of
from outsize.plan import Plan
from outsize.runtime import Job, NativeFlow
from outsize.schedule import Action, Kind, State
from outsize.schedule.action import WHOLE
from outsize.schedule.pipelined import peer

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
NUMBER = 8  # bytes of a number that workers agree on
HEADER = 128 * NUMBER  # says what the messages of a kind are like, once in a job


@dataclass(frozen=True)
class Volume:
    """Bytes of a step. states: over the network lane; tensor: inside layers, the loss, and matrices
    that are updated as wholes; agreement: the count, the norm, the loss, who has a gradient. exact:
    the formula of `tensor` is no mere bound. stages: between the workers of a pipeline; None where
    only the model's own code knows what crosses. rounded: bytes by which what was counted may
    differ, since of each sum whole bytes are counted."""

    states: float
    tensor: float
    agreement: float
    exact: bool
    stages: float | None = 0.0
    rounded: float = 1.0

    @property
    def compute(self) -> float:
        """Of the computing thread."""
        return self.tensor + self.agreement


def volume(job: Job, fresh: bool = False) -> Volume:
    """What the worker of a job should have from others in a step. fresh: its first."""
    tensor, exact = 0.0, True
    model, size, gathers = job.flow.model, job.plan.mesh.tensor, _gathers(job.plan.mesh)
    if isinstance(model, Decoder) and isinstance(job.flow, NativeFlow) and size > 1:
        frozen = any(not t.trainable and not t.wide for t in job.placement.chunks.tables)
        exact = not (frozen or job.plan.block_tokens)
        exact = exact and not model.config.rewired
        numbers = 0 if job.schedule.ends else _numbers(job.flow.options)
        tensor += sum(
            _segment(model.config, job.plan, segment, _tokens(job, m), numbers)
            for segment, m in _summing(job)
        )
    if isinstance(model, Decoder) and isinstance(job.flow, NativeFlow) and gathers > 1:
        exact = exact and all(t.trainable for t in job.placement.chunks.tables)
        tensor += sum(
            _keys_values(model.config, job.plan, segment, _rows_tokens(job, m), gathers)
            for segment, m in _computed(job)
            if 0 < segment < job.plan.segments - 1
        )
    if isinstance(model, Decoder) and any(axis.parts for axis in job.plan.mesh.axes):
        exact = False
        tensor += sum(
            _dispatched(model.config, job.plan, segment, _tokens(job, m))
            for segment, m in _computed(job)
            if 0 < segment < job.plan.segments - 1
        )
    sums = sum(1 for a in job.schedule.workers[0] if a.kind is Kind.EXCHANGE)
    rounded = 1 + sums * job.plan.mesh.size / 2
    said = _said(job)
    states, agreement = said["network"] + said["merge"], said["agreement"] + _counting(job)
    return Volume(states, tensor + said["compute"], agreement, exact, _stages(job, fresh), rounded)


def _said(job: Job) -> Mapping[str, float]:
    """Bytes by channel that actions say whatever the tokens."""
    found = defaultdict[str, float](float)
    for talk in chain(*job.program.voices[job.world.rank].says(job.schedule)):
        found[talk.channel] += talk.received
    return found


def _counting(job: Job) -> float:
    """Of the weight and the number of all targets, before a step."""
    mesh = job.plan.mesh
    return _around(2 * NUMBER, prod(mesh[axis.name] for axis in mesh.axes if axis.batch))


def _computed(job: Job) -> Iterator[tuple[int, int]]:
    """The segments and microbatches that this worker runs."""
    stages, role = job.plan.stages, job.schedule.role
    every = ((s, m) for s in range(len(stages)) for m in range(job.plan.microbatches))
    for stage, microbatch in every if role is None else role.plays:
        here = stages[stage]
        yield from ((segment, microbatch) for segment in range(here.first, here.last))


def _summing(job: Job) -> Iterator[tuple[int, int]]:
    """Those of them that say something over the tensor axis: where all workers of a pipeline have
    rows of the embedding, the prologue's part is theirs."""
    ends = job.schedule.ends
    yield from ((segment, m) for segment, m in _computed(job) if segment or ends is None)
    for action in job.schedule.workers[0]:
        if ends is not None and action.kind is ends.passes[0]:
            yield 0, action.microbatch


def _rows_tokens(job: Job, microbatch: int) -> int:
    """Of whole rows."""
    start, stop = job.plan.rows_of(microbatch, job.place)
    return (stop - start) * job.plan.sequence


def _tokens(job: Job, microbatch: int) -> int:
    """Of those, what lies here."""
    start, stop = job.plan.rows_of(microbatch, job.place)
    spans = execution_of(job.plan.mesh, job.world).tokens.spans(job.plan.sequence)
    return (stop - start) * sum(last - first for first, last in spans)


def _gathers(mesh: Mesh) -> int:
    """Workers that have parts of each row."""
    return prod(mesh[axis] for axis in mesh.cutting("tokens"))


def _around(nbytes: float, count: int) -> float:
    """Of an all-reduce, or of a gather and a scatter."""
    return 2 * nbytes * (count - 1) / count


# -- between stages --------------------------------------------------------------------------------


def _stages(job: Job, fresh: bool) -> float | None:
    """Hidden states and their gradients, and what is exchanged of ends that all share; with what
    says what messages are like, in a first step."""
    model, line = job.flow.model, job.placement.chunks.pipelining
    if line is None:
        return 0.0
    if not isinstance(model, Decoder) or not isinstance(job.flow, NativeFlow):
        return None
    moves = [a for a in job.schedule.workers[0] if a.kind is Kind.RECV]
    total = sum(_handed(job, model.config, move) for move in moves)
    exchanges = (a for a in job.schedule.workers[0] if a.kind is Kind.EXCHANGE)
    total += sum(_exchanged(job, model.config, job.flow.options, action) for action in exchanges)
    kinds = {(a.state, a.stage, a.part, _tokens(job, a.microbatch), peer(line, a)) for a in moves}
    return total + fresh * HEADER * len(kinds)


def _handed(job: Job, config: DecoderConfig, move: Action) -> float:
    """What crosses with a move: of tokens that are cut, on average over the tensor axis."""
    plan, layer = job.plan, job.plan.stages[move.stage].last - 2
    size = plan.mesh.tensor
    cut = plan.sequence_parallel
    if 0 <= layer < plan.by_rows - 1:
        cut = _rows_shared(plan, _tokens(job, move.microbatch))
    tokens = _tokens(job, move.microbatch) / (size if cut else 1)
    if move.part != WHOLE:  # of the ends, which have the embedding's features
        if move.state is State.ACTIVATIONS:  # what the head multiplies, of whole rows
            tokens = _tokens(job, move.microbatch)
        return tokens * _features(config) * BYTES[plan.precision.compute]
    wide = 1.0 if config.wiring is None else config.wiring.width(layer, size)
    return tokens * wide * config.hidden * BYTES[plan.precision.compute]


def _exchanged(job: Job, config: DecoderConfig, options: LossOptions, action: Action) -> float:
    """What an exchange brings a worker: a sum of features, numbers of the loss, or both."""
    plan, tokens = job.plan, float(_tokens(job, action.microbatch))
    size, number = plan.mesh.pipeline, BYTES[plan.precision.compute]
    ends = job.schedule.ends
    sums = 0.0 if action.state is State.SUMS and ends and ends.back is not State.SUMS else 1.0
    wide = number if action.state is State.ACTIVATIONS else max(4, number)
    summed = tokens
    if action.state is State.ACTIVATIONS and plan.sequence_parallel:
        summed = tokens / plan.mesh.tensor
    total = _around(sums * summed * _features(config) * wide, size)
    if action.state is State.SUMS:
        total += (size * plan.mesh.tensor - 1) * _numbers(options) * tokens * wide
    return total


def _features(config: DecoderConfig) -> int:
    """Of the embedding, and of what the head multiplies."""
    return config.embed_size or config.hidden


def _numbers(options: LossOptions) -> int:
    """Of a token, that workers with parts of a vocabulary tell one another for the loss."""
    return 4 if options.label_smoothing else 3


# -- the tensor axis -------------------------------------------------------------------------------


def _segment(config: DecoderConfig, plan: Plan, segment: int, tokens: int, numbers: int) -> float:
    """Of the prologue (0), a block or the epilogue, there and back."""
    size, number = plan.mesh.tensor, BYTES[plan.precision.compute]
    wide = max(4, number)
    if segment in (0, plan.segments - 1):
        end = _around(tokens * _features(config) * number, size)
        return end + (segment > 0) * (size - 1) * numbers * tokens * wide
    here = next(s for s in plan.stages if s.first <= segment < s.last)
    if segment <= plan.by_rows:
        gather = _around(tokens * config.hidden * number, size) / 2
        return gather * _gathered(plan, segment, tokens, here.whole)
    chunked = plan.block_tokens > 0 and here.whole
    # Once more where it is recomputed; in chunks, all but the stage's last block twice.
    again = chunked and segment < here.last - 1
    sums: float = 4 + 2 * here.whole + 2 * again
    # In chunks, times that what it leaves is asked for alone; if others ask, once to differentiate.
    others = chunked and _gathers(plan.mesh) > 1
    leaves = chunked + others * (1 + again)
    sums += leaves / 2 * plan.sequence_parallel + others
    total = sums * _around(tokens * config.hidden * number, size)
    if config.qk_norm == "whole" and config.latent is None:
        times = 2 + (here.whole or "attention" in here.recompute) + chunked + leaves + others
        total += 2 * times * _around(tokens * wide, size)
    return total


def _rows_shared(plan: Plan, tokens: int) -> bool:
    """Whether the rows of a microbatch of so many tokens divide over the tensor axis."""
    return tokens // plan.sequence % plan.mesh.tensor == 0


def _gathered(plan: Plan, segment: int, tokens: int, again: bool) -> int:
    """How often all tokens are gathered in a block that shares rows. again: it is recomputed."""
    first, last = segment == 1, segment == plan.by_rows
    if _rows_shared(plan, tokens):
        between = not plan.sequence_parallel  # else the stream is cut as rows are
        return between * (first + last * (1 + again))
    return plan.sequence_parallel * (first * (1 + again) + last)


def _keys_values(config: DecoderConfig, plan: Plan, segment: int, tokens: int, size: int) -> float:
    """Keys and values of a block, gathered; their gradients, scattered."""
    here = next(s for s in plan.stages if s.first <= segment < s.last)
    heads = float(config.heads if config.latent is not None else config.kv_heads)
    heads = max(1.0, heads / plan.mesh.tensor)
    chunked, number = plan.block_tokens > 0 and here.whole, BYTES[plan.precision.compute]
    times = 1 + (here.whole or "attention" in here.recompute)
    times += chunked and segment < here.last - 1
    numbers = times * number + (max(4, number) if chunked else number)
    return numbers * tokens * heads * (config.head_size + config.value_size) * (size - 1) / size


def _dispatched(config: DecoderConfig, plan: Plan, segment: int, tokens: int) -> float:
    """Tokens to the experts of a block and back, and their gradients: at most all that are here;
    before, how many for each expert."""
    facts, here = config.experts, next(s for s in plan.stages if s.first <= segment < s.last)
    if facts is None or not config.layers[segment - 1].experts:
        return 0.0
    tile, chunk = plan.mlp_tile, plan.block_tokens if here.whole else 0
    again = bool(tile or "mlp" in here.recompute) + bool(chunk and segment < here.last - 1)
    forward, most = 1 + here.whole + again, plan.most_rows * plan.sequence
    calls = -(-most // (chunk or most)) * -(-(chunk or most) // (tile or chunk or most))
    rows = tokens * facts.chosen * config.hidden * BYTES[plan.precision.compute]
    return 2 * (forward + 1) * rows + forward * calls * facts.count * NUMBER
