"""Bytes that a step of a plan should take, by formula.

What one worker has from others: of B bytes over n workers an all-gather or a reduce-scatter brings
B (n - 1) / n, an all-reduce twice as many. States: by their shards, action by action (Rajbhandari
et al., "ZeRO", 2019, section 7; worked out here apart from the planner's). Tensor parallelism: the
hidden states cross twice a layer and direction (Shoeybi et al., "Megatron-LM", 2019, section 3;
with tokens cut a gather and a scatter take the place of each sum, Korthikanti et al., 2022), once
more each where a block is recomputed; the loss exchanges three numbers a token (four where it is
smoothed), a norm over all heads one each way. Pipelines: the hidden states of a microbatch cross
once from stage to stage and their gradients once back, and nothing else does. A cut vocabulary
(Yeung et al., 2024, section 4): all workers sum the embedding of a microbatch and the gradient of
the last stage's output, and exchange the loss's numbers; that output and the gradient of the first
stage's input go to each of them. Experts that other workers have: what crosses is the router's to
say, and the formula a bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from outsize.collectives import Mesh
from outsize.kernels.entropy import LossOptions
from outsize.memory import ChunkTable
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.parallel.execution import execution_of
from outsize.plan import Plan
from outsize.runtime import Job, NativeFlow
from outsize.schedule import Action, Kind, State
from outsize.schedule.action import WHOLE
from outsize.schedule.kept import GRADIENTS, PARAMETERS
from outsize.schedule.pipelined import peer
from outsize.verify.kept import Kept

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
        exact = not (frozen or job.plan.sequence_chunk)
        exact = exact and not model.config.rewired
        numbers = _numbers(job.flow.options)
        tensor += sum(
            _segment(model.config, job.plan, segment, _tokens(job, m), numbers)
            for segment, m in _computed(job)
        )
        tensor += _matrices(job)
    if isinstance(model, Decoder) and isinstance(job.flow, NativeFlow) and gathers > 1:
        exact = exact and all(t.trainable for t in job.placement.chunks.tables)
        tensor += sum(
            _keys_values(model.config, job.plan, segment, _rows_tokens(job, m), gathers)
            for segment, m in _computed(job)
            if 0 < segment < job.plan.segments - 1
        )
    if isinstance(model, Decoder) and any(axis.parts for axis in job.plan.mesh.axes):
        exact = False
        tensor += _matrices(job) * (size == 1) + sum(
            _dispatched(model.config, job.plan, segment, _tokens(job, m))
            for segment, m in _computed(job)
            if 0 < segment < job.plan.segments - 1
        )
    sums = sum(1 for a in job.schedule.workers[0] if a.kind is Kind.EXCHANGE)
    rounded = 1 + sums * job.plan.mesh.size / 2
    return Volume(_states(job), tensor, _agreement(job), exact, _stages(job, fresh), rounded)


def _computed(job: Job) -> Iterator[tuple[int, int]]:
    """The segments and microbatches that this worker runs."""
    stages, role = job.plan.stages, job.schedule.role
    every = ((s, m) for s in range(len(stages)) for m in range(job.plan.microbatches))
    for stage, microbatch in every if role is None else role.plays:
        here = stages[stage]
        yield from ((segment, microbatch) for segment in range(here.first, here.last))


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


# -- states ----------------------------------------------------------------------------------------


def _states(job: Job) -> float:
    actions = job.schedule.workers[0]
    sums = job.loaded.points.sums
    return sum(
        _of_chunk(job, chunk, action.kind, index in sums)
        for index, action in enumerate(actions)
        if action.kind in (Kind.GATHER, Kind.REDUCE, Kind.COLLECT, Kind.MERGE)
        for chunk in job.placement.chunks.of_stage[action.stage]
    )


def _of_chunk(job: Job, index: int, kind: Kind, last: bool) -> float:
    """A chunk's part of an action: on average over the workers, who may have uneven shares."""
    table, own = job.placement.chunks.tables[index], job.placement.chunks.shards
    dtypes = dict(job.placement.chunks.held(index))
    whole = float(table.numel * dtypes[PARAMETERS].itemsize)
    if kind is Kind.GATHER:
        return _apart(whole, own.parameters)
    if not table.trainable:
        return 0.0
    if kind is Kind.COLLECT:
        return _apart(whole / own.parameters, own.optimizer // own.parameters)
    whole = float(table.numel * dtypes[GRADIENTS].itemsize)
    if kind is Kind.MERGE:
        return _around(whole / own.optimizer, len(job.placement.chunks.holders(table)))
    total = _apart(whole, own.gradients)
    if last:
        total += _apart(whole / own.gradients, own.optimizer // own.gradients)
        total += _around(whole / own.optimizer, own.size // own.optimizer)
        total += _around(whole / own.optimizer, table.shared) if table.partial else 0.0
        total += _around(whole / own.optimizer, _summing(job.plan.mesh, table.axis))
    return total


def _apart(nbytes: float, count: int) -> float:
    """Of an all-gather, or of a reduce-scatter."""
    return nbytes * (count - 1) / count


# -- between stages --------------------------------------------------------------------------------


def _stages(job: Job, fresh: bool) -> float | None:
    """Hidden states and their gradients, and what is exchanged of a cut vocabulary; with what says
    what messages are like, in a first step."""
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
    if move.part != WHOLE:  # of the ends, which have the embedding's features
        return _tokens(job, move.microbatch) * _features(config) * BYTES[plan.precision.compute]
    size = plan.mesh.tensor
    wide = 1.0  # times as many features as the model has
    if layer >= 0 and config.ways > 1:
        wide += config.ways / size
    elif layer >= 0 and config.ladder_from is not None:
        wide += layer >= config.ladder_from
    tokens = _tokens(job, move.microbatch) / (size if plan.sequence_parallel else 1)
    return tokens * wide * config.hidden * BYTES[plan.precision.compute]


def _exchanged(job: Job, config: DecoderConfig, options: LossOptions, action: Action) -> float:
    """What an exchange brings a worker: a sum of features, numbers of the loss, or both."""
    plan, tokens = job.plan, _tokens(job, action.microbatch)
    size, number = plan.mesh.pipeline, BYTES[plan.precision.compute]
    sums = 0.0 if action.state is State.SUMS and plan.pipeline.vocabulary == 1 else 1.0
    wide = number if action.state is State.ACTIVATIONS else max(4, number)
    total = _around(sums * tokens * _features(config) * wide, size)
    if action.state is State.SUMS:
        total += (size - 1) * _numbers(options) * tokens * wide
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
    chunked = plan.sequence_chunk > 0 and here.whole
    # Once more where it is recomputed; in chunks, all but the stage's last block twice.
    sums = 4 + 2 * here.whole + 2 * (chunked and segment < here.last - 1)
    total = sums * _around(tokens * config.hidden * number, size)
    if config.qk_norm == "whole" and config.latent is None:
        times = 2 + (here.whole or "attention" in here.recompute) + 2 * chunked
        total += 2 * times * _around(tokens * wide, size)
    return total


def _keys_values(config: DecoderConfig, plan: Plan, segment: int, tokens: int, size: int) -> float:
    """Keys and values of a block, gathered; their gradients, scattered."""
    here = next(s for s in plan.stages if s.first <= segment < s.last)
    heads = float(config.heads if config.latent is not None else config.kv_heads)
    heads = max(1.0, heads / plan.mesh.tensor)
    times = 2 + (here.whole or "attention" in here.recompute)
    wide = heads * (config.head_size + config.value_size) * BYTES[plan.precision.compute]
    return times * _apart(tokens * wide, size)


def _dispatched(config: DecoderConfig, plan: Plan, segment: int, tokens: int) -> float:
    """Tokens to the experts of a block and back, and their gradients: at most all that are here;
    before, how many for each expert."""
    facts, here = config.experts, next(s for s in plan.stages if s.first <= segment < s.last)
    if facts is None or not config.layers[segment - 1].experts:
        return 0.0
    forward = 1 + (here.whole or "mlp" in here.recompute)
    rows = tokens * facts.chosen * config.hidden * BYTES[plan.precision.compute]
    return 2 * (forward + 1) * rows + forward * facts.count * NUMBER


def _matrices(job: Job) -> float:
    """Weights, gradients and states of matrices that every worker updates whole."""
    if job.optimizer.rest is None:
        return 0.0
    kept = isinstance(job.optimizer, Kept)
    each = len(job.optimizer.states) - kept + 2 + kept
    total = 0.0
    for index, table in enumerate(job.placement.chunks.tables):
        first, last = job.placement.chunks.extent(index, "master")
        for slot in table.slots if table.main and table.trainable else ():
            if not first <= slot.offset < last:
                continue
            whole = prod(job.shape(slot.name))
            if slot.numel < whole:  # of what several workers hold alike, every copy comes
                total += each * NUMBER * (table.shared * whole - slot.numel)
    return total


# -- agreement -------------------------------------------------------------------------------------


def _agreement(job: Job) -> float:
    mesh, behind = job.plan.mesh, job.plan.update == "behind"
    numbers = 0
    for action in job.schedule.workers[0]:
        if action.kind is Kind.NORM:
            numbers += 2 + _names(job.placement.chunks.every)
        elif behind and action.kind is Kind.UPDATE and action.part in (WHOLE, 0):
            chunks = job.placement.chunks.of_stage[action.stage]
            numbers += 2 + _names(job.placement.chunks.tables[index] for index in chunks)
    counting = prod(mesh[axis.name] for axis in mesh.axes if axis.batch)
    return _around(2 * NUMBER, counting) + _around(NUMBER * numbers, mesh.size)


def _summing(mesh: Mesh, own: str) -> int:
    """Workers that sum whole gradients of parameters that lie on the axis `own`."""
    return prod(mesh[axis.name] for axis in mesh.axes if axis.sums(own))


def _names(tables: Iterable[ChunkTable]) -> int:
    return sum(len(table.slots) for table in tables if table.trainable)
