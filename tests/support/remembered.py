"""What planning has rehearsed, remembered by a whole session of tests: by every process that pytest
starts, and by the workers that a test forks, which would each rehearse the same again."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import get_ident
from typing import TypeVar

import pytest

from outsize.decode.generate import Request
from outsize.decode.samplers import Sampling
from outsize.hardware import Hardware
from outsize.memory import Ledger
from outsize.models.config import DecoderConfig
from outsize.plan import Plan
from outsize.plan import plan as plans
from outsize.runtime import Job, spill
from outsize.search import planner, played
from outsize.search import request as requests
from outsize.search.request import Makers, PlanRequest, layouts, native_makers
from outsize.simulate import Forecast, tokens
from outsize.simulate.costs import Costs, Facts
from outsize.simulate.rehearse import bare, rehearse, splits_of
from outsize.simulate.tokens import Held, Needs

T = TypeVar("T")


class _Folder:
    """Values in files. Nobody waits for another, who might be taken for a worker that hangs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: dict[str, object] = {}

    def get(self, key: object, make: Callable[[], T]) -> T:
        name = sha256(repr(key).encode()).hexdigest()
        if name not in self._read:
            file, mine = self._path / name, self._path / f"{name}.{os.getpid()}.{get_ident()}"
            if not file.exists():
                mine.write_bytes(pickle.dumps(make()))
                mine.replace(file)
            self._read[name] = pickle.loads(file.read_bytes())
        return self._read[name]


def remember(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Rehearsals and facts of native decoders, and what their tokens need, are made once for all
    who have this folder. They depend neither on the budget nor on what rests where."""
    known = _Folder(folder)

    def kept(kind: type[T], key: object, find: Callable[[], T]) -> T:
        """Facts; costs are remembered where they are rehearsed, with what tests make smaller."""
        return known.get(("facts", key, plans.PART), find) if kind is Facts else find()

    def makers(
        config: DecoderConfig, request: PlanRequest, documents: tuple[int, ...] | None = None
    ) -> Makers:
        job_of, batch_of = native_makers(config, request, documents)
        about[job_of] = config, request.rehearsed, documents or layouts(request)[0]
        return job_of, batch_of

    def rehearsed(
        plan: Plan,
        job_of: Callable[[Plan, Ledger], Job],
        batch_of: Callable[[int], object],
        splits: tuple[bool, ...] | None = None,
        ledger_of: Callable[[], Ledger] = Ledger,
        apart: bool = False,
    ) -> Costs:
        splits = splits_of(plan) if splits is None else splits
        step = plan.rows_at(0), plan.microbatches, bare(plan), splits
        smaller = spill.LEAST, plans.PART  # as tests make them
        key = about[job_of], step, smaller, apart
        made = partial(rehearse, plan, job_of, batch_of, splits, ledger_of, apart=apart)
        return known.get(key, made)

    def needed(held: Held, request: Request, length: int) -> Needs:
        drawn = request.sampler if isinstance(request.sampler, Sampling) else None
        key = held, held.grain, len(request.ids), request.max_new_tokens, drawn, length
        return known.get(key, lambda: plain_needs(held, request, length))

    def foretold(
        config: DecoderConfig, request: PlanRequest, plan: Plan, hardware: Hardware
    ) -> Forecast:
        rates = replace(hardware, tiers=tuple(replace(tier, bytes=0) for tier in hardware.tiers))
        key = config, replace(request, budget=None), plan, rates, spill.LEAST, plans.PART
        return known.get(key, lambda: plain_foretold(config, request, plan, hardware))

    plain_foretold = played.predict
    patch.setattr(played, "predict", foretold)
    plain_needs = tokens._needs
    patch.setattr(tokens, "_needs", needed)
    about: dict[object, object] = {}
    patch.setattr(requests, "kept", kept)
    for module in (requests, planner):
        patch.setattr(module, "native_makers", makers)
        patch.setattr(module, "rehearse", rehearsed)
