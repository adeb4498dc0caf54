"""Layers that change least are left alone for a while: fewer gradients, fewer activations kept.

Ardakani et al., "SlimFit: Memory-Efficient Fine-Tuning of Transformer-based Models Using Training
Dynamics", 2023. A layer is one weight matrix, embedding or norm; biases are trained always. Its
distance is the mean over its weights of |change / weight| in the last step that trained it. In
every step the layers of the smallest distances are frozen, as many as the rate says; what is frozen
keeps its distance, so that a layer comes back when the others have become calmer. At first
distances are large and random: every layer has its turn.

A frozen layer has no weight gradient, no update, no step of its moments, and keeps no input for the
backward pass; the gradient of its input still flows. What blocks keep all the same (norms, the
gate, attention) may wait in 8 bits (outsize/runtime/special/compressed.py). The paper's pruned
activations are not here.

    plan: {approximate: [frozen-by-dynamics]}
    frozen-by-dynamics: {share: 0.9}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outsize import accelerator
from outsize.errors import OutsizeError
from outsize.kernels.pieces import pieces
from outsize.memory.chunk import is_layer
from outsize.models.cuts import Cut
from outsize.models.random import uniform
from outsize.plan import Plan
from outsize.runtime.engine import Loaded, Ran
from outsize.runtime.flow import Flow
from outsize.runtime.handlers.training import Training
from outsize.runtime.recipe import Here, Recipe
from outsize.runtime.special.compressed import check_resting, rounding_blocks
from outsize.runtime.storage.update import updated_weights
from outsize.schedule import Kind
from outsize.schedule.kept import MASTER
from outsize.schedule.layout import Placement

if TYPE_CHECKING:
    from outsize.runtime.job import Job
    from outsize.runtime.method import Notes

NAME = "frozen-by-dynamics"
NOTES = "freezing"  # of a checkpoint: how far every layer moved last
UNKNOWN = 1e10  # distances of layers that no step has trained yet are from here on


class Freezing(Training):
    """Steps with some layers frozen in each: see outsize/runtime/method.py.

    The recipe's seed gives the order in which layers have their first turn.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        own = job.recipe.of(NAME)
        self._job, self.left = job, float(own.share)
        self._rate: float = self.left
        names = [n for n, p in job.owners.items() if p.requires_grad and is_layer(n, p.ndim)]
        first = uniform(job.recipe.seed, "freezing", 0, len(names))
        self._distances = {n: UNKNOWN * (1 + float(u)) for n, u in zip(names, first, strict=True)}
        self._moved: tuple[list[str], Callable[[], list[float]]] | None = None  # in the last step
        if own.keep == "int8":
            around = rounding_blocks(job)
            self.engine.around |= {Kind.FORWARD: around, Kind.RECOMPUTE: around}

    @staticmethod
    def recipe(said: Recipe) -> Recipe:
        share = said.of(NAME).share
        if not share < 1:
            raise OutsizeError(f"{NAME}.share is {share:g}; expected less than 1")
        return said

    @staticmethod
    def placement(
        flow: Flow, plan: Plan, recipe: Recipe, here: Here, cuts: Mapping[str, Cut]
    ) -> Placement:
        if recipe.of(NAME).keep == "int8":
            check_resting(plan, f"{NAME}.keep")
        return Training.placement(flow, plan, recipe, here, cuts)

    @property
    def distances(self) -> dict[str, float]:
        """By layer, after all steps made so far. What the last one moved has come to the host with
        its loss, which the caller has read."""
        if self._moved is not None:
            (names, read), self._moved = self._moved, None
            numbers = read()
            for name, total, count in zip(names, numbers[::2], numbers[1::2], strict=True):
                self._distances[name] = total / count if count else UNKNOWN
        return self._distances

    def notes(self) -> Notes:
        return {NOTES: dict(self.distances)}

    def recall(self, notes: Mapping[str, Any]) -> None:
        found = notes.get(NOTES, {})
        if not isinstance(found, dict) or not all(isinstance(d, float) for d in found.values()):
            raise OutsizeError("checkpoint: its distances of layers are not numbers")
        self.distances.update(found)

    def frozen(self) -> frozenset[str]:
        """The layers that the next step leaves alone."""
        distances = self.distances
        order = sorted(distances, key=distances.__getitem__)
        return frozenset(order[: int(self._rate * len(order))])

    def play(self, step: Loaded, begin: float) -> list[Ran]:
        """With the calmest layers frozen."""
        frozen, watch = self.frozen(), self._job.watch
        with watch.on(), watch.kind("optimizer"):
            before = {n: [w.clone() for w in ws] for n, ws in self._mine(frozen).items()}
        with self._still(frozen):
            ran = super().play(step, begin)
        mine = changes(before, self._mine(frozen))
        trained = [name for name in self._distances if name not in frozen]
        if trained:
            nothing = torch.zeros(2, dtype=torch.float64, device=self._job.weight_pool.device)
            summed = torch.cat([mine.get(name, nothing) for name in trained])
            self._moved = trained, accelerator.later(self._job.totals.added(summed))
        return ran

    def _mine(self, frozen: frozenset[str]) -> dict[str, list[Tensor]]:
        """The weights of layers that train, as far as this worker updates and counts them."""
        pool, found = self._job.weight_pool, dict[str, list[Tensor]]()
        for index, table in enumerate(pool.placement.chunks.tables):
            first, last = pool.placement.chunks.extent(index, MASTER)
            if not self._job.totals.counts(index):
                continue
            flat = updated_weights(pool, index)
            for slot in table.slots:
                begin, end = max(slot.offset, first), min(slot.offset + slot.numel, last)
                if slot.name in self._distances and slot.name not in frozen and begin < end:
                    found.setdefault(slot.name, []).append(flat[begin - first : end - first])
        return found

    @contextmanager
    def _still(self, names: frozenset[str]) -> Iterator[None]:
        for name in names:
            self._job.owners[name].requires_grad_(False)
        try:
            yield
        finally:
            for name in names:
                self._job.owners[name].requires_grad_(True)


@torch.no_grad()
def changes(
    before: dict[str, list[Tensor]], after: Mapping[str, list[Tensor]]
) -> dict[str, Tensor]:
    """By name, over the weights that were not 0: the sum of |(after - before) / before|, and their
    count, where the weights are, float64. before: emptied on the way."""
    found = dict[str, Tensor]()
    for name in list(before):
        olds = before.pop(name)
        both = found[name] = olds[0].new_zeros(2, dtype=torch.float64)
        for x, y in zip(_all(olds), _all(after[name]), strict=True):
            zero = x == 0
            both[0] += ((y - x) / x).abs_().masked_fill_(zero, 0).double().sum()
            both[1] += x.numel() - zero.sum()
    return found


def _all(flats: list[Tensor]) -> Iterator[Tensor]:
    return (piece for flat in flats for piece in pieces(flat))
