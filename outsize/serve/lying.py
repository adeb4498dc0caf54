"""What serving asks of how its cache lies (outsize/decode/caches.py): what a page is, whether it
may be, what the plan says."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from outsize.decode.caches import CACHES
from outsize.decode.paged import PAGE
from outsize.errors import OutsizeError
from outsize.kernels.pages import Form
from outsize.models.seams import StateSpec
from outsize.serve.asks import Room


def page_of(lies: str, left: Iterable[StateSpec], form: Form) -> int:
    """Tokens that are counted together. left: what layers keep of tokens."""
    if not lies:
        return PAGE
    rows = (
        math.prod(one.shape[:-1]) * size
        for one in left
        if one.per == "token"
        for size in form.buffers(one.shape[-1], one.dtype)
    )
    return CACHES.get(lies).page(tuple(rows))


def refuse(lies: str, device: torch.device, workers: int) -> None:
    """OutsizeError where a cache cannot lie so."""
    why = CACHES.get(lies).why_not(device, workers) if lies else ""
    if why:
        raise OutsizeError(f"a {lies} cache {why}; serve with one that is in pages")


def notes_on(room: Room, size: int) -> tuple[str, ...]:
    """What is to be known of how it lies. size: bytes of a page. OutsizeError where the system does
    not give what it takes."""
    if not room.lies:
        return ()
    return CACHES.get(room.lies).notes(room.page, room.slots + 1, room.context, size)
