"""Host memory that cannot be page-locked is refused with its bytes, or used where that is said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import strict
from cases import CASES, CPU, TIER, Case, device, stores_of

from outsize import accelerator
from outsize.errors import OutsizeError
from outsize.hardware import measure
from outsize.memory.tiers import TierSpec
from outsize.train.tiers import opened

SPECS = (TierSpec("host", "memory", (), TIER),)
BELOW, LOCKED = {"host": 1 << 20}, 1 << 20  # bytes that are planned, and that can be locked


def _losses(case: Case, on: Any, stores: Mapping[str, Any]) -> tuple[list[float], list[Any]]:
    """Of three steps; then the kinds of waits."""
    job = case.job(on, stores)
    with strict.waits() as counted:
        losses = [float(job.step(batch, 1e-2)) for batch in case.batches()]
    job.close()
    return losses, [kind for kind, _ in counted]


def test_it_is_refused_or_used_as_the_plan_says() -> None:
    strict.start("random", seed=3, pinned_bytes=LOCKED)
    case, said = CASES["states on host"], list[str]()
    with TemporaryDirectory() as name, stores_of(case, CPU, Path(name)) as plain:
        expected, _ = _losses(case, CPU, plain)
        plan = case.plan()
        with (
            pytest.raises(
                OutsizeError, match=r"'host': [\d,]+ bytes cannot be page-locked .*SIZE:page"
            ),
            opened(SPECS, plan, BELOW, device(), said.append),
        ):
            pass
        assert not said
        allowed = [replace(spec, pageable=True) for spec in SPECS]
        with opened(tuple(allowed), plan, BELOW, device(), said.append) as stores:
            losses, kinds = _losses(case, device(), stores)
    assert losses == expected and "copy of unpinned memory" in kinds
    (line,) = said
    assert "bytes cannot be page-locked" in line and line.endswith("beside the computation")


def test_copies_are_measured_with_what_can_be_locked() -> None:
    """Of 8 MiB a quarter, which the host's allocator rounds up; ordinary memory below that."""
    for bytes_, note in ((4 * LOCKED, "pinned"), (LOCKED, "not pinned")):
        strict.start("demand", pinned_bytes=bytes_ + accelerator.ALIGN, device_bytes=1 << 26)
        rates = measure.host_copies(device(), lambda work, _: (work(), 1.0)[1], "2026-11-27")
        assert [rate.note for rate in rates] == [note, note], (rates, bytes_)
