"""Where the bytes that a device's allocator counts differ from those foretold.

    python benchmarks/gpu_bytes.py DEVICE SHAPE ROWS SEQUENCE [MEMORY]

DEVICE as PyTorch calls it, or "strict"; SHAPE of benchmarks/support/gpu/shapes.py; MEMORY in bytes.
One step by the planner's plan, measured by the allocator, beside the forecast: action by action;
what libraries hold; then by operator what each takes within itself and gives back, and what it
leaves that a ledger does not see.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [path for path in (str(HERE), str(HERE.parent)) if path not in sys.path]

from support.gpu import training  # noqa: E402
from support.gpu.place import Place  # noqa: E402
from support.gpu.shapes import Work, native_draw  # noqa: E402

from outsize import accelerator  # noqa: E402
from outsize.data import Batch  # noqa: E402
from outsize.memory import Ledger, Meter, meter  # noqa: E402
from outsize.models.build import shells  # noqa: E402
from outsize.runtime import Job  # noqa: E402
from outsize.runtime.making import NativeModel, make_job  # noqa: E402
from outsize.runtime.recipe import Here, Recipe  # noqa: E402
from outsize.simulate import Forecast  # noqa: E402
from outsize.torch_private import DispatchMode  # noqa: E402

MIB, MOST = 1 << 20, 25  # lines of a table


class Operators(DispatchMode):
    """By operator: calls, most bytes that one takes within itself, bytes that all leave unseen."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger, self.found = ledger, defaultdict[str, list[int]](lambda: [0, 0, 0])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        held, seen = torch.accelerator.memory_allocated(), self.ledger.total
        torch.accelerator.reset_peak_memory_stats()
        result = func(*args, **(kwargs or {}))  # the ledger, entered before, sees it first
        after, peak = torch.accelerator.memory_allocated(), torch.accelerator.max_memory_allocated()
        one = self.found[str(func)]
        one[0] += 1
        one[1] = max(one[1], peak - max(held, after))
        one[2] += (after - held) - (self.ledger.total - seen)
        return result


@contextmanager
def job_of(work: Work, place: Place, made: Forecast, ledger: Meter) -> Iterator[Job]:
    """A job of the plan, nothing below the device."""
    precision = made.plan.precision
    dtype = getattr(torch, precision.master or precision.compute)
    model = NativeModel(
        shells(work.config, dtype, place.device), fill=native_draw(work.config, place.device)
    )
    recipe, here = Recipe(training.OPTIMIZER, training.CLIP), Here(ledger=ledger)
    with closing(make_job(model, made.plan, recipe, here)) as job:
        yield job


def batch_of(work: Work, number: int) -> Batch:
    ids = work.ids(number)
    return Batch(ids, training.targets_of(ids), ((0, work.sequence),) * work.rows)


def by_action(work: Work, place: Place, made: Forecast) -> None:
    """Peaks and what is left alive, of the first microbatch and of what follows all."""
    reserved = accelerator.reserved(place.device)
    with job_of(work, place, made, meter(place.device, reserved=reserved)) as job:
        for number in range(2):
            job.step(batch_of(work, number))
            place.settle()
        events = job.report.trace.events
        held = torch.accelerator.memory_allocated()
        accelerator.clear_workspaces(place.device)
        kept = held - torch.accelerator.memory_allocated()
    print(f"libraries keep {kept:,} bytes after two steps; {reserved:,} were found beforehand")
    known = {(e.kind, e.stage, e.microbatch, e.part): e for e in made.trace.events}
    print("MiB: action, stage; peak foretold, measured, more; left alive foretold, measured, more")
    for e in events:
        f = known.get((e.kind, e.stage, e.microbatch, e.part))
        if f is None or not e.live or e.microbatch > 0:
            continue
        ours, theirs = sum(f.live.values()) / MIB, sum(e.live.values()) / MIB
        peaks = f"{f.peak / MIB:10.2f}{e.peak / MIB:10.2f}{(e.peak - f.peak) / MIB:9.2f}"
        print(f"{e.kind:10}{e.stage:4}{peaks}  {ours:10.2f}{theirs:10.2f}{theirs - ours:9.2f}")
    top = max(events, key=lambda e: e.peak)
    print(f"peak: {top.peak:,} in {top.kind} of {top.stage}; foretold {made.peak:,}")


def by_operator(work: Work, place: Place, made: Forecast) -> None:
    """What operators take in the second step."""
    ledger = Ledger(device=place.device.type, grain=accelerator.grain(place.device))
    with job_of(work, place, made, ledger) as job:
        job.step(batch_of(work, 0))
        with ledger, Operators(ledger) as operators:
            job.step(batch_of(work, 1))
    found = operators.found.items()
    print("MiB: operator, calls, most within one call, left unseen by all")
    within = sorted(found, key=lambda one: -one[1][1])[:MOST]
    unseen = sorted(found, key=lambda one: -abs(one[1][2]))[:MOST]
    for name, (calls, most, left) in dict((*within, *unseen)).items():
        if most or left:
            print(f"{name:60}{calls:7}{most / MIB:10.3f}{left / MIB:10.3f}")


def main() -> None:
    name, shape, rows, sequence, *memory = sys.argv[1:]
    work = Work(shape, int(rows), int(sequence), 1, 1)
    with tempfile.TemporaryDirectory() as folder:
        place = Place(name, folder)
        place.begin()
        budget = int(memory[0]) if memory else int(0.9 * place.hardware().tier("device").bytes)
        made = training.foretold(work, place, training.request_of(work, place, budget=budget))
        print(torch.__version__, training.described(made))
        handed = place.hardware().devices[0].measured.handed
        print(f"foretold {made.seconds:.4f} s, an operator handed out in {handed and handed.value}")
        by_action(work, place, made)
        by_operator(work, place, made)


if __name__ == "__main__":
    main()
