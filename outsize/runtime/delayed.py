"""Delayed updates: the optimizer works on the host while the next step computes.

A step's gradients wait on the host. While the step after it goes forward and back, a thread makes
the update that they ask for, on the master copy and the moments where these rest; then parameters
become the new weights, and the new gradients wait in turn. So every gradient is applied one step
late: w[t+1] = w[t] - update(gradient at w[t-1]). The first steps, in which a gradient of the step
before is of little use, are made without delay. (Ren et al., "ZeRO-Offload", 2021: one-step delayed
parameter update.)

    delayed = Delayed(flow, plan, AdamW(lr), stores, warmup=40)   # approximate: [delayed-update]
    loss = delayed.step(batch)

The plan's gradients and optimizer states rest on a tier of memory, with a master copy, and are
updated there. What waits is a state like the moments, "pending", saved and restored with them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.memory import Chunk, Meter
from outsize.memory.store import MemoryStore, Store
from outsize.optim import Optimizer
from outsize.optim.around import Around
from outsize.plan import Plan
from outsize.runtime.flow import Flow
from outsize.runtime.job import Fill, Job
from outsize.runtime.placement import MASTER, Piece
from outsize.runtime.update import Settings, Updates
from outsize.schedule import Action

NAME = "delayed-update"  # what `approximate` must name
PENDING = "pending"
NONE = float("nan")  # stands first where no gradient waits for the update


@dataclass(frozen=True)
class Waiting(Around):
    """An optimizer that puts gradients by, after `warmup` updates of `inner` without delay."""

    EXTRA = PENDING
    warmup: int

    @property
    def rest(self) -> Optimizer | None:
        """Every parameter waits."""
        return None

    def update(
        self,
        weights: Tensor,
        gradients: Tensor,
        state: Mapping[str, Tensor],
        step: int,
        lr: float,
        weight_decay: float,
    ) -> None:
        """Update at once, or put the gradients by."""
        if step <= self.warmup:
            self.inner.update(weights, gradients, state, step, lr, weight_decay)
        else:
            state[PENDING].copy_(gradients)


class _Joined:
    """The updates of a job; none begins before the thread of the delayed ones has ended."""

    def __init__(self, updates: Updates, join: Callable[[], None]) -> None:
        self._updates, self._join = updates, join

    @property
    def groups(self) -> Sequence[Settings]:
        return self._updates.groups

    @property
    def scale(self) -> float:
        return self._updates.scale

    @scale.setter
    def scale(self, scale: float) -> None:
        self._updates.scale = scale

    def reset(self) -> None:
        self._updates.reset()

    def run(self, action: Action, lr: float, touched: set[str], outdated: bool) -> None:
        self._join()
        self._updates.run(action, lr, touched, outdated)

    def at_rest(self, action: Action, lr: float, touched: set[str]) -> None:
        self._join()
        self._updates.at_rest(action, lr, touched)


class Delayed:
    """Trains with updates one step late; `job` evaluates, saves and loads as any other does.

    plan: names delayed-update under approximate. warmup: steps without delay. The rest: as for Job.
    """

    def __init__(
        self,
        flow: Flow,
        plan: Plan,
        optimizer: Optimizer,
        stores: Mapping[str, Store],
        warmup: int = 40,
        clip: float | None = None,
        ledger: Meter | None = None,
        fill: Fill | None = None,
    ) -> None:
        _check(plan, optimizer, stores, warmup)
        self.plan, self.optimizer, self.warmup = plan, optimizer, warmup
        names = tuple(name for name in plan.approximate if name != NAME)
        bare, waiting = replace(plan, approximate=names), Waiting(optimizer, warmup)
        self.job = Job(flow, bare, waiting, clip=clip, ledger=ledger, stores=stores, fill=fill)
        self.job.updates = cast(Updates, _Joined(self.job.updates, self._join))
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None
        self._torn = False

    def step(self, batch: Any, lr: float | None = None) -> Tensor:
        """Train on one batch: its gradients wait, those of the step before are applied at `lr`."""
        if self._torn:
            raise OutsizeError(
                "job: a step was cut off while an update was under way; load a checkpoint to go on"
            )
        rate = self.optimizer.lr if lr is None else lr
        self._thread = threading.Thread(target=self._apply, args=(rate,), name="delayed update")
        self._torn = True
        self._thread.start()
        try:
            loss = self.job.step(batch, lr)
        finally:
            self._end()
        self._torn = False
        return loss

    def load(self, value: Fill | None, state: Fill, counts: Mapping[str, int]) -> None:
        """Go on from saved weights, states and counts; see Job.load."""
        self.job.load(value, state)
        self.job.restore_counts(counts)
        self._torn = False

    # -- the thread -------------------------------------------------------------------------------

    def _join(self) -> None:
        """Have the delayed update done. Any thread."""
        thread = self._thread
        if thread is not None:
            thread.join()
        if self._fault is not None:
            raise self._fault

    def _end(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def _apply(self, lr: float) -> None:
        try:
            with torch.no_grad():
                for pieces in self.job.placement.pieces.values():
                    for piece in pieces:
                        self._piece(piece, lr)
        except BaseException as fault:  # it is raised where the step was asked for
            self._fault = fault

    def _piece(self, piece: Piece, lr: float) -> None:
        """Apply what waits in a piece, where it rests."""
        chunk, groups = self.job.chunks[piece.chunk], self.job.updates.groups
        held = dict(self.job.residence.resting(piece))
        states = {name: held[name] for name in self.optimizer.states}
        for first, last, group, step in self._runs(chunk, piece, held[PENDING]):
            span = slice(first - piece.first, last - piece.first)
            here = {name: flat[span] for name, flat in states.items()}
            settings = groups[group]
            self.optimizer.update(
                held[MASTER][span], held[PENDING][span], here, step, lr * settings.lr,
                settings.weight_decay,
            )  # fmt: skip
            held[PENDING][span] = NONE

    def _runs(
        self, chunk: Chunk, piece: Piece, pending: Tensor
    ) -> Iterator[tuple[int, int, int, int]]:
        """(first, last, group, step) of the parameters in a piece whose gradients wait."""
        runs: list[tuple[int, int, int, int]] = []
        for slot in chunk.table.slots:
            first = max(slot.offset, piece.first)
            last = min(slot.offset + slot.numel, piece.last)
            step = chunk.steps.get(slot.name, 0)
            if first >= last or step <= self.warmup or pending[first - piece.first].isnan():
                continue
            if runs and runs[-1][1:] == (first, slot.group, step):
                first = runs.pop()[0]
            runs.append((first, last, slot.group, step))
        return iter(runs)


def _check(plan: Plan, optimizer: Optimizer, stores: Mapping[str, Store], warmup: int) -> None:
    """Refuse what cannot be, before anything is allocated."""
    if NAME not in plan.approximate:
        raise OutsizeError(
            f"plan: approximate is {list(plan.approximate)}; updates one step late change the"
            f" maths: name {NAME} there"
        )
    if warmup < 0:
        raise OutsizeError(f"{NAME}: warmup is {warmup}; expected 0 or more steps")
    if optimizer.layout == "matrix" or optimizer.rest is not None:
        raise OutsizeError(
            f"{NAME}: the optimizer updates whole matrices; expected one that updates numbers by"
            " themselves, as adamw or sgd"
        )
    for stage in plan.stages:
        for tier in (stage.rest.optimizer, stage.rest.gradients):
            if not isinstance(stores.get(tier), MemoryStore):
                raise OutsizeError(
                    f"{NAME}: states rest on {tier!r}; expected a tier of memory, where they are"
                    " updated while the device computes"
                )
