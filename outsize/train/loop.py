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
from outsize.plan import FILES
from outsize.runtime import Job, Report
from outsize.runtime.storage.base_files import BaseFiles
from outsize.techniques.callbacks import Running, Told
from outsize.train.config import seconds_of
from outsize.train.measure import Measure
from outsize.train.metrics import READ, WRITTEN, Metrics, Unwritten
from outsize.train.progress import Progress, Speed, Status, progress, resident
from outsize.train.recipe import noise_of, virtual_of
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

    place: where it is, kept up to date. saved: the step of the last checkpoint of this run; clock:
    when that was. told: the callbacks. ended: whether one of them has ended the run.
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
    told: Told = field(default_factory=lambda: Told(Running(Path(), {}, ())))
    ended: bool = False
    clock: float = field(default_factory=time.monotonic)

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
                self.told.tell("begin", self.told.run)
                self._steps(batches, show, stop)
            self._save()
            self.told.tell("end", self.place.step)
            if self.told.failed is not None:
                raise self.told.failed
        except OutsizeError as error:
            if self.saved is None:
                raise
            where = f"step {self.saved} is saved: {resume_command(self.store.directory)}"
            raise OutsizeError(f"{error}; {where}") from error

    def _steps(self, batches: Iterator[Batch], show: Progress, stop: Stop) -> None:
        keys, pulse = self.setup.config.train, self.worker_group.pulse
        self._agree(stop, 0)
        if stop.asked() or self.ended:
            return
        pulse.during(f"step {self.place.step + 1}")
        pulse.at("reading a batch")
        for batch in batches:
            pulse.at("step")
            self._step(batch, show)
            step, last = self.place.step, self.place.finished
            if last or _due(step, keys.evaluate_every):
                self._evaluate(show)
            over, save = self._agree(stop, 0 if last else self._over_limit())
            if save or (_due(step, keys.save_every) and not last):
                self._save()
            if name := self.told.taken():
                self.store.keep(step, name)
            if stop.asked() or self.ended:
                return
            if over:
                self._refuse(over)
            pulse.during(f"step {step + 1}")
            pulse.at("reading a batch")

    def _agree(self, stop: Stop, over: int) -> tuple[int, bool]:
        """Whatever worker was asked to stop, all are, and what the first one's callbacks and clock
        want all do; gives the most that any of them is over its limit, and whether to save. Every
        worker comes here after every step."""
        late = self.worker_group.first and self._late(self.setup.config.train.save_every)
        save = late or bool(self.told.run.name)
        said = (stop.signal or 0, over, save, self.told.ending)
        asked = torch.tensor(said, dtype=torch.float64, device=self.setup.device)
        agreed = everyone(self.worker_group.world).all_reduce(asked, "max").tolist()
        stop.agreed, self.ended = int(agreed[0]) or None, bool(agreed[3])
        return int(agreed[1]), bool(agreed[2])

    def _late(self, every: int | str | None) -> bool:
        """Whether a checkpoint is due by the clock."""
        return isinstance(every, str) and time.monotonic() - self.clock >= seconds_of(every)

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
        self._write(
            "step",
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
            },
        )
        left = self.speed.left(self.place.steps - step)
        speed = self.speed.tokens_per_second
        show.update(Status(step, report.loss, speed, now, peak, left, sum(moved.values())))

    def _write(self, what: str, record: Mapping[str, float | int]) -> None:
        """Keep a record, and tell the callbacks."""
        self.metrics.write(record)
        self.told.tell(what, record)

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
        before = virtual_of(self.setup.config)
        held = ValidationStream(
            self.data.validation, rows, keys.sequence, keys.evaluate_tokens, before
        )
        nats, weight = 0.0, 0.0
        for index in range(len(held)):
            mine = held.batch(index, self.rows_index, mesh.rows)
            total, targets = self.job.evaluate(mine, mine.ids_BS.shape[0])
            nats, weight = nats + total, weight + targets
        self.bits_per_byte = float(held.bits_per_byte(nats))
        step = self.place.step
        self._write(
            "evaluated",
            {
                "step": step,
                "validation_loss": nats / weight,
                "validation_bits_per_byte": self.bits_per_byte,
                "validation_bytes": round(held.bytes),
            },
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
        files = self.job.stores.get(FILES)
        if isinstance(files, BaseFiles):
            files.check()
        subject, resolved = self.setup.subject, self.setup.resolved
        config = subject.config
        if self.worker_group.first:
            save(self.store, self.job, config, resolved, self.place, subject.base)
        else:
            join_saving(self.job, config)
        self.saved, self.clock = self.place.step, time.monotonic()
        self.told.tell("saved", self.saved, self.store.path(self.saved))


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


def _due(step: int, every: int | str | None) -> bool:
    return isinstance(every, int) and every > 0 and step % every == 0
