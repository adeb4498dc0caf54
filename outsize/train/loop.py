"""The training loop: steps, validation, checkpoints, until the last step or until it is stopped."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console

from outsize.checkpoint.store import Store
from outsize.data import Batch, Data, TrainStream, ValidationStream
from outsize.errors import OutsizeError
from outsize.hardware.host import memory
from outsize.memory import format_bytes
from outsize.runtime import Job, Report
from outsize.train.measure import Measure
from outsize.train.metrics import READ, WRITTEN, Metrics
from outsize.train.progress import Progress, Speed, Status, progress, resident
from outsize.train.setup import Setup, rates_of
from outsize.train.state import Place, save
from outsize.train.stop import Stop

LOOK_SECONDS = 1.0  # between looks at the memory that the system allows


def resume_command(directory: Path) -> str:
    """What goes on with the run in `directory`."""
    return f"outsize train --resume {shlex.quote(str(directory))}"


@dataclass
class Loop:
    """A run between its first step and its last.

    place: where it is, kept up to date. saved: the step of the last checkpoint of this run.
    """

    setup: Setup
    data: Data
    job: Job
    store: Store
    metrics: Metrics
    measure: Measure
    place: Place
    stream: TrainStream
    saved: int | None = None
    speed: Speed = field(default_factory=Speed)
    bits_per_byte: float | None = None
    limit: int = field(default_factory=lambda: memory().total)  # bytes that the process may hold
    look: float = 0.0  # when to look at it again

    def run(self, console: Console, stop: Stop) -> None:
        """Train until the end or until `stop` was asked, then save.

        OutsizeError, naming the checkpoint that is left, where it cannot go on.
        """
        try:
            with (
                progress(console, self.place.steps, self.place.step) as show,
                self.stream.prefetch(self.place.step, self.place.steps) as batches,
            ):
                self._steps(batches, show, stop)
            self._save()
        except OutsizeError as error:
            if self.saved is None:
                raise
            where = f"step {self.saved} is saved: {resume_command(self.store.directory)}"
            raise OutsizeError(f"{error}; {where}") from error

    def _steps(self, batches: Iterator[Batch], show: Progress, stop: Stop) -> None:
        keys = self.setup.config.train
        if stop.asked():
            return
        for batch in batches:
            self._step(batch, show)
            step, last = self.place.step, self.place.finished
            if last or _due(step, keys.evaluate_every):
                self._evaluate(show)
            if _due(step, keys.save_every) and not last:
                self._save()
            if stop.asked():
                return
            if not last:
                self._check_limit()

    def _step(self, batch: Batch, show: Progress) -> None:
        step = self.place.step
        lr = self.job.optimizer.lr * rates_of(self.setup.config).factor(step)
        counted = self.measure.watch(self.job, step)
        before = moved_by(self.job)
        self.job.step(batch, lr=lr)
        report = self.job.report
        moved = {name: now - before[name] for name, now in moved_by(self.job).items()}
        self.measure.add(report, counted)
        self.speed.add(report.seconds, report.count, counted)
        self.place = replace(
            self.place,
            step=step + 1,
            tokens=self.place.tokens + report.count,
            cursor=self.stream.cursor(step + 1),
        )
        self._record(report, lr, moved, show)

    def _record(self, report: Report, lr: float, moved: Mapping[str, int], show: Progress) -> None:
        step = self.place.step
        now, peak = self._memory()
        self.metrics.write(
            {
                "step": step,
                "tokens": self.place.tokens,
                "loss": report.loss,
                "gradient_norm": report.norm,
                "lr": lr,
                "seconds": report.seconds,
                "tokens_per_second": report.count / report.seconds,
                "resident_bytes": now,
                "resident_peak_bytes": peak,
                **moved,
            }
        )
        left = self.speed.left(self.place.steps - step)
        speed = self.speed.tokens_per_second
        show.update(Status(step, report.loss, speed, now, peak, left, sum(moved.values())))

    def _memory(self) -> tuple[int, int]:
        """Bytes now and at the peak: of the device, or of this process on a CPU."""
        device = self.setup.device
        if device.type == "cuda":
            return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        return resident()

    def _evaluate(self, show: Progress) -> None:
        keys = self.setup.config.train
        if not self.data.validation.tokens or keys.sequence is None:
            return
        rows = self.setup.plan.microbatch_rows
        held = ValidationStream(self.data.validation, rows, keys.sequence, keys.evaluate_tokens)
        nats, count = 0.0, 0
        for batch in held:
            total, targets = self.job.evaluate(batch, batch.ids_BS.shape[0])
            nats, count = nats + total, count + targets
        self.bits_per_byte = float(held.bits_per_byte(nats))
        step = self.place.step
        self.metrics.write(
            {
                "step": step,
                "validation_loss": nats / count,
                "validation_bits_per_byte": self.bits_per_byte,
                "validation_bytes": held.bytes,
            }
        )
        show.say(
            f"step {step}: validation {self.bits_per_byte:.3f} bits per byte"
            f" (loss {nats / count:.3f} over {held.bytes:,} bytes)"
        )

    def _check_limit(self) -> None:
        """Save and end where the system has lowered what this process may hold below what its steps
        take: the next one would be killed."""
        if time.monotonic() < self.look:
            return
        self.look = time.monotonic() + LOOK_SECONDS
        limit, peak = memory().total, resident()[1]
        if limit >= min(self.limit, peak) or self.setup.device.type != "cpu":
            return
        self._save()
        raise OutsizeError(
            f"memory: this process may hold {format_bytes(limit)} now, but its steps take"
            f" {format_bytes(peak)}: {peak - limit} bytes missing; raise the limit, or go on with"
            " a smaller --memory"
        )

    def _save(self) -> None:
        if self.saved == self.place.step:
            return
        self.metrics.flush()
        save(self.store, self.job, self.setup.subject.config, self.setup.resolved, self.place)
        self.saved = self.place.step


def moved_by(job: Job) -> dict[str, int]:
    """Bytes that a job has read from and written to its tiers so far, as metrics name them."""
    found = {}
    for name, store in job.stores.items():
        found[f"{name}{READ}"], found[f"{name}{WRITTEN}"] = store.bytes_read, store.bytes_written
    return found


def _due(step: int, every: int | None) -> bool:
    return bool(every) and step % (every or 1) == 0


@contextmanager
def closing(job: Job) -> Iterator[Job]:
    """The job, its model an ordinary module again afterwards."""
    try:
        yield job
    finally:
        job.close()
