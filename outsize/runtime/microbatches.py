"""Microbatches: those of a step or an evaluation that are under way, and the losses they gave."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outsize.memory.upload import comes
from outsize.runtime.flow import Flow, Walk
from outsize.runtime.points import Points
from outsize.runtime.spill import Spill
from outsize.runtime.watch import Watch
from outsize.torch_private import tree_leaves

# By microbatch its walk, and what tells messages of other shapes apart.
Carried = Callable[[int], tuple[Walk, Hashable]]
SpillsOf = Callable[[int, int], Spill | None]  # by microbatch and stage


def nothing_leaves(microbatch: int, stage: int) -> None:
    """Every activation stays."""


class Microbatches:
    """Cuts a batch into walks, each of which begins with the first action that needs it.

    spills_of: what takes the activations that a stage keeps of a microbatch. sent: their tensors
    cross to other workers, in messages that differ with their shapes. device: to which they are
    copied, by actions; None: they are where they are computed with.
    """

    def __init__(
        self,
        flow: Flow,
        watch: Watch,
        spills_of: SpillsOf,
        sent: bool,
        device: torch.device | None = None,
    ) -> None:
        self.flow, self._watch, self._spills_of, self._sent = flow, watch, spills_of, sent
        self._device = device
        self._batch: Any = None
        self.under_way: dict[int, Walk] = {}
        self._parts: dict[int, Any] = {}  # of those that are copied and have not begun
        self._shapes: dict[int, Hashable] = {}
        self.ready(None, (), 1.0)

    def ready(self, batch: Any, cuts: Sequence[tuple[int, int]], factor: float) -> None:
        """Set out on a batch. cuts: the rows of each microbatch. factor: of their losses."""
        ledger = self._watch.ledger
        if ledger is not None:
            for tensor in tensors_of(self._batch):  # the caller may keep it; the job does not
                ledger.release(tensor)
        self._batch, self._cuts, self._factor = batch, cuts, factor
        self.loss: Tensor | None = None  # the sum of a step's
        self.losses: dict[int, Tensor] = {}  # of an evaluation's microbatches
        self._shapes.clear()
        self._carried: Carried | None = None
        if ledger is not None:
            with ledger.kind("data"):
                for tensor in tensors_of(batch):
                    if self._device is None or not comes(tensor, self._device):
                        ledger.see(tensor)

    def carry(self, begun: Carried) -> None:
        """Set out on walks of the caller's own, each made when it begins."""
        self.ready(None, (), 1.0)
        self._carried = begun

    def begin(self, points: Points) -> None:
        """A list of actions on them begins."""
        self._points = points

    def of(self, m: int) -> Walk:
        """The walk of a microbatch."""
        walk = self.under_way.get(m)
        return self._begun(m) if walk is None else walk

    def part(self, m: int) -> Any:
        """The rows of a microbatch, where the batch lies."""
        return self.flow.part(self._batch, *self._cuts[m])

    def bring(self, m: int, part: Any) -> None:
        """A microbatch's rows are on the device, or will be when it begins."""
        self._parts[m], self._shapes[m] = part, shapes_of(part) if self._sent else ()

    def _begun(self, m: int) -> Walk:
        points, flow = self._points, self.flow
        if self._carried is not None:
            self.under_way[m], self._shapes[m] = self._carried(m)
            return self.under_way[m]
        if self._device is None:
            with self._watch.kind("data"):
                self.bring(m, self.part(m))
        part = self._parts.pop(m)
        spill_of = partial(self._spills_of, m)
        walk = flow.begin(part, self._factor, spill_of, points.held(m), points.way(m))
        self.under_way[m] = walk
        return walk

    def shapes(self, m: int) -> Hashable:
        """What tells a microbatch from others whose messages have other shapes."""
        if m not in self._shapes:
            self.of(m)
        return self._shapes[m]

    def lose(self, m: int, loss: Tensor) -> None:
        """Book a microbatch's loss. Those of a step are added in place, to a copy: a graph may have
        saved the first one."""
        if self._points.evaluates:
            self.losses[m] = loss
        elif self.loss is None:
            self.loss = loss.clone()
        else:
            self.loss += loss

    def ending(self, index: int, points: Points) -> Callable[[], None] | None:
        """A microbatch that nothing behind a place needs has no more to say."""
        m = points.ends.get(index)
        return None if m is None else partial(self.end, m)

    def end(self, m: int) -> None:
        """Let a microbatch go."""
        del self.under_way[m]
        if self.flow.rows is not None:
            self.flow.rows.end(m)

    def reset(self) -> None:
        """Let all of them go."""
        self.under_way.clear()
        self._parts.clear()
        if self.flow.rows is not None:
            self.flow.rows.reset()


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """The tensors of a batch, dataclasses included."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf):
            yield from tensors_of([getattr(leaf, field.name) for field in fields(leaf)])


def shapes_of(part: Any) -> Hashable:
    """What tells microbatches apart whose tensors between stages differ in shape."""
    return tuple(tuple(tensor.shape) for tensor in tensors_of(part))
