"""The sample of text at the end of a run, by the job's own weights wherever they rest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from outsize.data import Tokenizer
from outsize.decode.samplers import Sampling
from outsize.decode.text import stream_text
from outsize.models.decoder import Decoder
from outsize.runtime import Job, NativeFlow
from outsize.schedule import State
from outsize.schedule.residency import item, overlap

PATIENCE = 60.0  # seconds after which a sample ends whose every token reads weights from a tier


def sample(job: Job, tokenizer: Tokenizer, prompt: str, tokens: int, sampling: Sampling) -> str:
    """The prompt and what follows it. Where weights stream it ends early rather than late."""
    until = time.monotonic() + PATIENCE
    text = prompt
    with brought(job) as model:
        for piece in stream_text(model, tokenizer, prompt, tokens, sampling):
            text += piece
            if job.placement.rooms and time.monotonic() > until:
                break
    return text


@contextmanager
def brought(job: Job) -> Iterator[Decoder]:
    """The job's model, whose parts bring their parameters into the pool when they are called: one
    part after the other, nothing beside the computation."""
    assert isinstance(job.flow, NativeFlow)
    model = job.flow.model
    parts = (model.prologue, *model.blocks, model.epilogue)
    handles = [
        part.register_forward_pre_hook(lambda _, __, segment=index: bring(job, segment))
        for index, part in enumerate(parts)
    ]
    try:
        yield model
    finally:
        for handle in handles:
            handle.remove()


def bring(job: Job, segment: int) -> None:
    """Have in the pool what a segment computes with; what lies elsewhere in it stays."""
    placement, residence = job.placement, job.residence
    rooms = placement.rooms
    stages = placement.stage_uses(placement.stage_of[segment])
    needed = {item(State.PARAMETERS, stage) for stage in stages} & rooms.keys()
    stays = {
        name
        for name in residence.present
        if not any(overlap(rooms[name], rooms[n]) for n in needed)
    }
    residence.ensure(frozenset(stays | needed))
