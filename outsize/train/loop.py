"""The training loop: steps, validation, checkpoints, until the last step or until it is stopped."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console

from outsize import accelerator
from outsize.checkpoint.store import Store
from outsize.collectives import everyone, inside, received
from outsize.data import Batch, Data, TrainStream, ValidationStream
from outsize.errors import OutsizeError, counted
from outsize.hardware.host import memory
from outsize.launch import WorkerGroup
from outsize.memory import format_bytes
from outsize.runtime import Job, Report
from outsize.train.measure import Measure
from outsize.train.metrics import READ, WRITTEN, Metrics, Unwritten
from outsize.train.progress import Progress, Speed, Status, progress, resident
from outsize.train.recipe import noise_of
from outsize.train.setup import Setup, rate_of
from outsize.train.state import Place, join_saving, save
from outsize.train.stop import Stop

LOOK_SECONDS = 1.0  # between looks at the memory that the system allows


def resume_command(directory: Path) -> str:
    """What goes on with the run in `directory`."""
    return f"outsize train --resume {shlex.quote(str(directory))}"


@dataclass
class Loop:
    """A run between its first step and its last.

    place:
    where it is, kept up to date. saved: the step of the last checkpoint of this run.
    """

    setup: Setup
    data: Data
    job: Job
    store: Store
    metrics: Metrics | Unwritten
    measure: Measure
    place: Place
    stream: TrainStream
    saved: int | None = None
    worker_group: WorkerGroup = field(default_factory=WorkerGroup)
    speed: Speed = field(default_factory=Speed)
    bits_per_byte: float | None = None
    limit: int = field(default_factory=lambda: memory().total)  # bytes that the process may hold
    look: float = 0.0  # when to look at it again
    peak: int = 0  # bytes that it had held by then

    @property
    def rows_index(self) -> int:
        """Which part of a step's rows this worker takes."""
        return self.setup.plan.mesh.rows_index(self.worker_group.world.rank)

    @property
    def rows(self) -> tuple[int, int]:
        """Of a step's rows, the first and the end of those that this worker takes."""
        return self.setup.plan.rows_at(self.rows_index)

    def run(self, console: Console, stop: Stop) -> None:
        """Train until the end or until `stop` was asked, then save.

        OutsizeError, naming the checkpoint that is left, where it cannot go on.
        """
        try:
            with (
                progress(console, self.place.steps, self.place.step) as show,
                self.stream.prefetch(self.place.step, self.place.steps, own=self.rows) as batches,
            ):
                self._steps(batches, show, stop)
            self._save()
        except OutsizeError as error:
            if self.saved is None:
                raise
            where = f"step {self.saved} is saved: {resume_command(self.store.directory)}"
            raise OutsizeError(f"{error}; {where}") from error

    def _steps(self, batches: Iterator[Batch], show: Progress, stop: Stop) -> None:
        keys, pulse = self.setup.config.train, self.worker_group.pulse
        self._agree(stop, 0)
        if stop.asked():
            return
        pulse.during(f"step {self.place.step + 1}")
        pulse.at("reading a batch")
        for batch in batches:
            pulse.at("step")
            self._step(batch, show)
            step, last = self.place.step, self.place.finished
            if last or _due(step, keys.evaluate_every):
                self._evaluate(show)
            if _due(step, keys.save_every) and not last:
                self._save()
            over = self._agree(stop, 0 if last else self._over_limit())
            if stop.asked():
                return
            if over:
                self._refuse(over)
            pulse.during(f"step {step + 1}")
            pulse.at("reading a batch")

    def _agree(self, stop: Stop, over: int) -> int:
        """Whatever worker was asked to stop, all are; gives the most that any of them is over its
        limit. Every worker comes here after every step."""
        said = torch.tensor([stop.signal or 0, over], dtype=torch.float64, device=self.setup.device)
        signal, most = everyone(self.worker_group.world).all_reduce(said, "max").tolist()
        stop.agreed = int(signal) or None
        return int(most)

    def _step(self, batch: Batch, show: Progress) -> None:
        step, config = self.place.step, self.setup.config
        lr = rate_of(config, step)
        counted = self.measure.watch(self.job, step)
        before = moved_by(self.job)
        noise = noise_of(config, step, self.rows[0] * batch.ids_BS.shape[1])
        self.job.step(replace(batch, noise=noise), lr)
        report = self.job.report
        moved = {name: now - before[name] for name, now in moved_by(self.job).items()}
        self.measure.add(report, counted)
        tokens = self.setup.plan.rows * self.setup.plan.sequence  # read, be they targets or not
        self.speed.add(report.seconds, tokens, counted)
        self.place = replace(
            self.place,
            step=step + 1,
            tokens=self.place.tokens + tokens,
            cursor=self.stream.cursor(step + 1),
        )
        self._record(report, lr, moved, show)

    def _record(self, report: Report, lr: float, moved: Mapping[str, int], show: Progress) -> None:
        step = self.place.step
        now, peak = self._memory()
        scaling = report.scaling
        scaled = {} if scaling is None else {
            "loss_scale": scaling.factor, "skipped_steps": scaling.skipped
        }  # fmt: skip
        self.metrics.write(
            {
                "step": step,
                "tokens": self.place.tokens,
                "loss": report.loss,
                "gradient_norm": report.norm,
                "lr": lr,
                "seconds": report.seconds,
                "tokens_per_second": self.setup.plan.rows
                * self.setup.plan.sequence
                / report.seconds,
                "resident_bytes": now,
                "resident_peak_bytes": peak,
                **moved,
                **scaled,
            }
        )
        left = self.speed.left(self.place.steps - step)
        speed = self.speed.tokens_per_second
        show.update(Status(step, report.loss, speed, now, peak, left, sum(moved.values())))

    def _memory(self) -> tuple[int, int]:
        """Bytes now and at the peak: of the device, or of this process on a CPU."""
        device = self.setup.device
        if accelerator.queues(device):
            memory = torch.accelerator
            return memory.memory_allocated(device), memory.max_memory_allocated(device)
        return resident()

    def _evaluate(self, show: Progress) -> None:
        self.worker_group.pulse.at("validation")
        keys = self.setup.config.train
        if not self.data.validation.tokens or keys.sequence is None:
            return
        mesh = self.setup.plan.mesh
        rows = self.setup.plan.microbatch_rows * mesh.rows
        held = ValidationStream(self.data.validation, rows, keys.sequence, keys.evaluate_tokens)
        nats, weight = 0.0, 0.0
        for index in range(len(held)):
            mine = held.batch(index, self.rows_index, mesh.rows)
            total, targets = self.job.evaluate(mine, mine.ids_BS.shape[0])
            nats, weight = nats + total, weight + targets
        self.bits_per_byte = float(held.bits_per_byte(nats))
        step = self.place.step
        self.metrics.write(
            {
                "step": step,
                "validation_loss": nats / weight,
                "validation_bits_per_byte": self.bits_per_byte,
                "validation_bytes": round(held.bytes),
            }
        )
        show.say(
            f"step {step}: validation {self.bits_per_byte:.3f} bits per byte"
            f" (loss {nats / weight:.3f} over {counted(round(held.bytes), 'byte', ',')})"
        )

    def _over_limit(self) -> int:
        """Bytes that the steps of this process take beyond what the system lets it hold by now: the
        next one would be killed."""
        if time.monotonic() < self.look:
            return 0
        self.look = time.monotonic() + LOOK_SECONDS
        limit, self.peak = memory().total, resident()[1]
        if limit >= min(self.limit, self.peak) or self.setup.device.type != "cpu":
            return 0
        return self.peak - limit

    def _refuse(self, over: int) -> None:
        """Save and end."""
        self._save()
        raise OutsizeError(
            f"memory: this process may hold {format_bytes(self.peak - over)} now, but its steps"
            f" take {format_bytes(self.peak)}: {counted(over, 'byte')} missing; raise the limit,"
            " or go on with"
            " a smaller --memory"
        )

    def _save(self) -> None:
        if self.saved == self.place.step:
            return
        self.worker_group.pulse.at("saving a checkpoint")
        self.metrics.flush()
        config, resolved = self.setup.subject.config, self.setup.resolved
        if self.worker_group.first:
            save(self.store, self.job, config, resolved, self.place)
        else:
            join_saving(self.job, config)
        self.saved = self.place.step


def moved_by(job: Job) -> dict[str, int]:
    """Bytes that a job has read from and written to its tiers so far, and had from the workers with
    which it shares states and products, as metrics name them."""
    found = {}
    if isinstance(job, Job) and job.world.mesh.size > 1:
        layers = sum(sum(one.group.received.values()) for one in inside(job.world))
        between = received(job.world, "network", "merge", "stages", "exchange")
        found[f"workers{READ}"] = layers + between.total()
    for name, store in job.stores.items():
        found[f"{name}{READ}"], found[f"{name}{WRITTEN}"] = store.bytes_read, store.bytes_written
    return found


def _due(step: int, every: int | None) -> bool:
    return bool(every) and step % (every or 1) == 0
