"""Prepared: somebody's own model under training, as `prepare` gives it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outsize.data import Batch
from outsize.decode.generate import GREEDY
from outsize.decode.samplers import Sampler
from outsize.errors import OutsizeError
from outsize.models.decoder import Decoder
from outsize.optim import Optimizer
from outsize.optim.optimizer import precision_for
from outsize.plan import Plan
from outsize.runtime import Job, Report
from outsize.runtime.adopted.reach import Uncut
from outsize.runtime.checks import check_rate
from outsize.runtime.generating import Generated
from outsize.simulate import Forecast
from outsize.train.prepared import states
from outsize.train.prepared.batches import AsGiven, filled, refuse_empty, rows_in, tokens_of
from outsize.train.prepared.bodies import Moving
from outsize.train.prepared.changed import Changes, absent, away, watched
from outsize.train.prepared.making import Preparing, refuse_small_budget
from outsize.train.prepared.module import Buffers, Guard, without_caches, without_sparse
from outsize.train.prepared.optimizers import Handed
from outsize.train.prepared.options import Settings
from outsize.train.prepared.refusals import check_first
from outsize.train.prepared.statistics import moved_once
from outsize.train.prepared.workers import leaving

_BELOW = (
    "its weights rest on tiers or on several workers, so its own forward and state_dict would give"
    " others; call job.evaluate(batch), or job.state_dict()"
)
_PARTS = (
    "its parameters are this worker's parts, so its own forward and state_dict would give others;"
    " call job.evaluate(batch), or read job.weights(), before job.close()"
)


class Prepared:
    """A model under training. `step` trains on a batch; `report` tells of the last step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | torch.optim.Optimizer | str,
        settings: Settings,
    ) -> None:
        self.model, self._handed = model, Handed(model, optimizer)
        if settings.plan is None:
            precision = precision_for(self._handed.update, settings.precision)
            settings = replace(settings, precision=precision)
        self._stack = ExitStack()  # of the stores and the world, while there is a job
        self.preparing = Preparing(model, self._handed, settings, self._stack)
        self._job: Job | None = None
        self._guard, self._buffers = Guard(model), Buffers(model)
        self._stack.callback(without_caches(model))
        self._stack.callback(without_sparse(model))
        self._closed = False
        self._broken = False  # whether a step was begun and has not ended
        self._changes = Changes(model, lambda job: self._handed.look(job, self._lone))
        self._pending = self._handed.states  # for the job to come
        self._lone = not settings.tiers and settings.mesh.size == 1  # with all that there is
        self._moving = Moving(model, settings.microbatches, self._lone)
        if self._lone:
            refuse_small_budget(model, self._handed.update, settings)
        self._stack.callback(self._handed.watch(self._take))

    @property
    def settings(self) -> Settings:
        """What `prepare` was told."""
        return self.preparing.settings

    @property
    def forecast(self) -> Forecast | None:
        """What was predicted of the plan, where one was chosen to fit memory or given; after a
        first step."""
        return self.preparing.forecast

    @property
    def plan(self) -> Plan:
        """The plan, once a first step has been made."""
        return self._made.plan

    @property
    def report(self) -> Report:
        """Loss, norm, seconds and trace of the last step."""
        return self._made.report

    @property
    def spread(self) -> str:
        """One line: how much of an adopted module the tensor axis cuts, and what is whole for which
        reason; empty where the axis has one worker. After a first step."""
        return self.preparing.spread

    @property
    def _made(self) -> Job:
        if self._job is None:
            raise OutsizeError(
                "job has no plan yet: it is made for the first batch; call step first"
            )
        return self._job

    def step(self, batch: Any, lr: float | None = None) -> Tensor:
        """Train on one batch; gives the mean loss, a scalar tensor. lr: this step's learning rate,
        where no optimizer of torch.optim says it.

        A native decoder takes token ids (B, S), a mapping with input_ids, labels and weights (of
        the labels; what each one's loss is times), or a Batch; an adopted module what its forward
        takes: a mapping by keyword, a tuple by place. Where one worker's batch is refused, all are.

        A parameter's requires_grad may change between steps; one that begins to train has the
        optimizer's first states.
        """
        parts = max(self.settings.microbatches, self.settings.mesh.rows) > 1
        if parts:
            self._moving.begin()
        may = self.settings.whole and (self._job is None or self._lone)
        drawn = torch.get_rng_state() if may else None
        if drawn is not None:
            self._buffers.begin()
        try:
            with self._guard.computing():
                loss = self._stepped(batch, lr)
        except Uncut:
            # Blocks that were found and are not called once each, in order, are no blocks.
            job, steps = self._job, int(self._handed.steps)
            able = job is None or _can_end(job, steps, self._lone)
            if drawn is None or not able or not self._buffers.back():
                raise
            torch.set_rng_state(drawn)
            if job is not None:
                self._pending, self._job = _ended(job, self._handed), None
            self.preparing.settings = replace(self.settings, blocks=())
            self._broken = False
            with self._guard.computing():
                loss = self._stepped(batch, lr)
        self._buffers.ended()
        if parts:
            self._moving.ended(self.preparing.world, rows_in(batch))
        return loss

    def _stepped(self, batch: Any, lr: float | None) -> Tensor:
        batch, job = self._ready(batch, lr)
        if self.preparing.outdated(job) or self._handed.regrouped(self._lone):
            self._pending, self._job = _ended(job, self._handed), None
            self._job = job = self._make(batch)
        lr = self._handed.ready(job, lr)
        averages = moved_once(self.model, self.preparing.world, job.plan.microbatches)
        self._broken = True
        if isinstance(batch, Batch):
            batch = filled(batch, job.plan.microbatches)
        with leaving(self.preparing.abort), averages:
            loss = job.step(batch, lr, rows_in(batch))
        self._broken = False
        self._changes.note(job)
        self._handed.count(int(self._handed.steps) + 1)
        self._handed.show(lambda: self._job, self._lone)
        return loss

    def evaluate(self, batch: Any) -> tuple[float, float]:
        """Sum of losses over a batch and what to divide it by, wherever the weights rest; after a
        first step."""
        job = self._made
        batch, _ = self._ready(batch)
        with self._guard.computing(), leaving(self.preparing.abort):
            return job.evaluate(batch, rows_in(batch))

    def generate(
        self,
        prompts: Iterable[Sequence[int]],
        max_tokens: int,
        sampling: Sampler | Sequence[Sampler] = GREEDY,
        stop: Collection[int] = (),
        logprobs: bool = False,
    ) -> list[Generated]:
        """What follows each of the prompts, ids of tokens, with the weights as they are, wherever
        they rest; see Job.generate. Of a native decoder, after a first step."""
        job = self._made
        with self._guard.computing():
            return job.generate(prompts, max_tokens, sampling, stop, logprobs)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by name; of what rests below or on other workers, a copy of one chunk at
        a time: use each before the next. The workers of a pipeline read together, to the end. After
        a first step."""
        return self._changes.follow(self._made).weights()

    def state_dict(self) -> dict[str, Any]:
        """Copies of weights, optimizer states, counts of updates and buffers, by name. After a
        first step; the workers of a pipeline or a tensor axis call it together."""
        job = self._changes.follow(self._made)
        return states.state_dict(job, self.model, int(self._handed.steps))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, of a job of the same model and optimizer, whatever its
        plan was; before the first step too. OutsizeError, naming the tensor, for another's."""
        self._take(lambda job: states.load_state_dict(job, self.model, state))

    def save(self, path: str | Path) -> Path:
        """Write all states below `path`, as the checkpoint of the steps made so far; gives its
        directory. The directory of a native decoder is one for outsize.load too. All workers call
        it; where one of them fails, all do."""
        job = self._changes.follow(self._made)
        steps = int(self._handed.steps)
        where = Path(path)
        self.preparing.alike(lambda: states.check_place(job, steps, where))
        with leaving(self.preparing.abort):
            return states.save(job, self.model, steps, where)

    def load(self, path: str | Path) -> None:
        """Go on from the last checkpoint that `save` wrote below `path`, as `load_state_dict`."""
        self._take(lambda job: states.load(job, self.model, Path(path)))

    def _take(self, into: Callable[[Job], int]) -> None:
        if self._job is None:
            self._pending = into
        else:
            job = self._job
            with self._guard.computing():
                self._handed.count(self.preparing.alike(lambda: into(job)))
            self._changes.note(job)
            self._handed.show(lambda: self._job, self._lone)

    def _ready(self, batch: Any, lr: float | None = None) -> tuple[Any, Job]:
        """A batch that no worker refuses, and the job, which the first one makes."""
        preparing = self.preparing
        if self._closed:
            raise OutsizeError(
                "job is closed, and the model's parameters, which were on tiers or on several"
                " workers, are not all here; make the model anew and call outsize.prepare"
            )
        preparing.join()

        def checked() -> Any:
            if self._job is not None:
                self._changes.follow(self._job)
            made = _checked(self.model, batch, lr, self._handed, self.settings.batches)
            if self._job is None:
                check_first(self.model, self.settings, made)
            return made

        made = preparing.alike(checked)
        if self._job is None:
            self._job = self._make(made)
        preparing.meet(made)
        return made, self._job

    def _make(self, batch: Any) -> Job:
        job, pending = self.preparing.make(batch), self._pending
        if self.preparing.derived or self.settings.mesh.pipeline > 1:
            self._guard.forward(_PARTS)
            self._guard.state_dict(_PARTS)
        if any(away(job)):
            self._stack.callback(self._guard.forward(_BELOW).remove)
            self._stack.callback(self._guard.state_dict(_BELOW).remove)
        if pending is not None:
            self._handed.count(self.preparing.alike(lambda: pending(job)))
            self._pending = None
        self._guard.hidden(absent(job), watched(job))
        return job

    def close(self) -> None:
        """Give the model back as an ordinary module. Parameters that rested on tiers, or in shares
        on several workers, are NaN from then on: read `weights` before. So of what the tensor
        axis has cut and of stages on other workers, which are not all here: the module's own
        forward and state_dict stay refused."""
        try:
            self._guard.hidden({}, {})
            if self._job is not None:
                if not self._broken:
                    self._job.method.settle(shown=True)
                self._job.close()
                _forget(self._job)
                self._closed = self.settings.parted or any(away(self._job))
                self._job = None
        finally:
            self._stack.close()


def _checked(
    model: nn.Module, batch: Any, lr: float | None, handed: Handed, batches: AsGiven
) -> Any:
    """A batch as a job takes it, and a rate and settings that it can have."""
    check_rate(lr)
    handed.follow(lr)
    if isinstance(model, Decoder):
        made: Any = tokens_of(batch, model.config.vocab)
    else:
        made = batches.seen_into(batch)
    refuse_empty(made)
    return made


def _can_end(job: Job, steps: int, lone: bool) -> bool:
    """Whether a job can be ended within the step behind so many: no update of it has begun, and no
    other worker waits in the middle of a sum."""
    begun = max(job.update_counts().values(), default=0) > steps
    return not begun and (lone or not any(away(job)))


def _ended(job: Job, handed: Handed) -> Callable[[Job], int]:
    """End a job; gives what puts its states into the next one."""
    into = states.moved(job, int(handed.steps))
    job.close()
    handed.anew()
    return into


def _forget(job: Job) -> None:
    """Parameters that passed through a pool are views of what holds something else."""
    for chunk in away(job):
        for slot in chunk.table.slots:
            parameter = job.owners[slot.name]
            lost = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
            parameter.data = lost.expand(parameter.shape)
