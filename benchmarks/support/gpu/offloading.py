"""Training with states below the device: ten plans foretold and measured, and models that no
device holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from support.gpu.place import Place
from support.gpu.shapes import PLANS, Work
from support.gpu.training import CLIP, foretold, request_of, trained
from support.streaming import BFLOAT16_ALL

from outsize.memory.tiers import TierSpec


def tiers_of(place: Place, host: int = 0, disk: int = 0) -> tuple[TierSpec, ...]:
    """Tiers of so many bytes, 0 for none, the quicker first."""
    found = [TierSpec("host", "memory", (), host)] if host else []
    return (*found, *([TierSpec("disk", "disk", (Path(place.folder),), disk)] if disk else []))


def one_plan(place: Place, name: str, work: dict[str, Any], tier: int) -> dict[str, Any]:
    """A plan of PLANS: bytes and seconds, foretold and measured. tier: bytes that may lie below."""
    task, asked = Work(**work), dict(PLANS[name])
    parts, below, share = (asked.pop(key, None) for key in ("rows", "tier", "budget"))
    if parts:
        asked["microbatch_rows"] = max(1, task.rows // parts)
    request, tiers = request_of(task, place, **asked), tuple[TierSpec, ...]()
    if below:
        most = foretold(task, place, request).peak
        request = replace(request, budget=int(share * most))
        tiers = tiers_of(place, **{below: tier})
    made = foretold(task, place, request, tiers)
    return trained(task, place, made, CLIP, tiers)


def larger(
    place: Place, work: dict[str, Any], budget: int, host: int, disk: int, master: bool
) -> dict[str, Any]:
    """A model whose states are larger than the device: `budget` bytes of that, the rest on the
    tiers. master: bfloat16 with float32 copies and moments; else bfloat16 alone, updated right
    behind the backward pass."""
    task, tiers = Work(**work), tiers_of(place, host, disk)
    if master:
        request = request_of(task, place, budget=budget)
    else:
        request = request_of(
            task, place, budget=budget, precision=BFLOAT16_ALL, clip=None,
            approximate=("bfloat16-weights",),
        )  # fmt: skip
    made = foretold(task, place, request, tiers)
    return trained(task, place, made, request.clip, tiers)
