"""The sample of text at the end of a run, by the job's own weights wherever they rest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from outsize.collectives import everyone
from outsize.data import Tokenizer
from outsize.decode.relay import Relay
from outsize.decode.samplers import Sampler, Sampling
from outsize.decode.text import stream_text
from outsize.models.decoder import Decoder
from outsize.runtime import Job, NativeFlow
from outsize.runtime.local import LocalJob
from outsize.runtime.trains import Trains
from outsize.runtime.zeroth import ZerothJob
from outsize.schedule import State
from outsize.schedule.item import Item
from outsize.schedule.residency import overlap

PATIENCE = 60.0  # seconds after which a sample ends whose every token reads weights from a tier


def sample(job: Trains, tokenizer: Tokenizer, prompt: str, tokens: int, sampling: Sampling) -> str:
    """The prompt and what follows it. Where weights stream it ends early rather than late."""
    until = time.monotonic() + PATIENCE
    text = prompt
    with brought(job) as model, ExitStack() as stack:
        relay = relay_of(job, model) if isinstance(job, Job) else None
        draw: Sampler = sampling
        if relay is not None:
            draw = stack.enter_context(relay).drawing(sampling)
        for piece in stream_text(model, tokenizer, prompt, tokens, draw, forward=relay):
            text += piece
            if job.placement.rooms and _late(job, time.monotonic() > until):
                break
    return text


def relay_of(job: Job, model: Decoder) -> Relay | None:
    """What takes a token through the stages on all workers; None without a pipeline."""
    pipelining, stage_of = job.placement.chunks.pipelining, job.placement.chunks.stage_of
    if pipelining is None:
        return None
    route = pipelining.coarse.placement.routes[0]
    turns = [route[pipelining.part(stage)] for stage in stage_of]
    return Relay(model, job.world, turns, cut=job.rows is not None)


def _late(job: Trains, mine: bool) -> bool:
    """Whether time is up for the first of the workers, which all end with the same token."""
    if not isinstance(job, Job):
        return mine
    return bool(everyone(job.world).broadcast(torch.tensor(float(mine))))


@contextmanager
def brought(job: Trains) -> Iterator[Decoder]:
    """The job's model, whose parts bring their parameters into the pool when they are called: one
    part after the other, nothing beside the computation."""
    assert isinstance(job.flow, NativeFlow)
    model = job.flow.model
    if isinstance(job, LocalJob):
        yield model
        return
    assert isinstance(job, Job | ZerothJob)
    if isinstance(job, ZerothJob):
        job.catch_up()
        job.hide()
    rows = isinstance(job, Job) and job.rows is not None
    first = model.prologue.tokens if rows else model.prologue
    parts = (first, *model.blocks, model.epilogue)
    handles = [
        part.register_forward_pre_hook(lambda _, __, segment=index: bring(job, segment))
        for index, part in enumerate(parts)
    ]
    try:
        yield model
    finally:
        for handle in handles:
            handle.remove()


def bring(job: Job | ZerothJob, segment: int) -> None:
    """Have in the pool what a segment computes with; what lies elsewhere in it stays."""
    placement, weight_pool = job.placement, job.weight_pool
    rooms = placement.rooms
    stages = placement.chunks.stage_uses(placement.chunks.stage_of[segment])
    needed = {Item(State.PARAMETERS, stage) for stage in stages} & rooms.keys()
    stays = {
        name
        for name in weight_pool.present
        if not any(overlap(rooms[name], rooms[n]) for n in needed)
    }
    weight_pool.ensure(frozenset(stays | needed))
    if isinstance(job, ZerothJob):
        job.show(placement.chunks.stage_of[segment])
