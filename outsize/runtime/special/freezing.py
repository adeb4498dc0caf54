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

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.kernels.pieces import pieces
from outsize.memory.chunk import is_layer
from outsize.models.cuts import Cut
from outsize.models.random import uniform
from outsize.plan import Plan
from outsize.runtime.engine import Call, Loaded, Ran
from outsize.runtime.flow import Flow
from outsize.runtime.handlers.training import Training
from outsize.runtime.points import Points
from outsize.runtime.recipe import Here, Recipe
from outsize.runtime.special.compressed import compressing
from outsize.runtime.storage.update import updated_weights
from outsize.schedule import Action, Kind
from outsize.schedule.kept import MASTER
from outsize.schedule.layout import Placement
from outsize.torch_private import storage_key

if TYPE_CHECKING:
    from outsize.runtime.job import Job
    from outsize.runtime.method import Notes

NAME = "frozen-by-dynamics"
NOTES = "freezing"  # of a checkpoint: how far every layer moved last
UNKNOWN = 1e10  # distances of layers that no step has trained yet are from here on


class Freezing(Training):
    """Steps with some layers frozen in each: see outsize/runtime/method.py.

    distances: by layer. The recipe's seed gives the order in which layers have their first turn.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        own = job.recipe.of(NAME)
        self._job, self.left = job, float(own.share)
        self._rate: float = self.left
        names = [n for n, p in job.owners.items() if p.requires_grad and is_layer(n, p.ndim)]
        first = uniform(job.recipe.seed, "freezing", 0, len(names))
        self.distances = {n: UNKNOWN * (1 + float(u)) for n, u in zip(names, first, strict=True)}
        if own.keep == "int8":
            self.engine.around |= {Kind.FORWARD: self._round, Kind.RECOMPUTE: self._round}

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
        if recipe.of(NAME).keep == "int8" and plan.rests_below("activations"):
            raise OutsizeError(
                f"{NAME}: activations rest below the device and keep is 'int8', which do not go"
                " together: leave one of them out"
            )
        return Training.placement(flow, plan, recipe, here, cuts)

    def notes(self) -> Notes:
        return {NOTES: dict(self.distances)}

    def recall(self, notes: Mapping[str, Any]) -> None:
        found = notes.get(NOTES, {})
        if not isinstance(found, dict) or not all(isinstance(d, float) for d in found.values()):
            raise OutsizeError("checkpoint: its distances of layers are not numbers")
        self.distances |= found

    def _round(self, run: Call, action: Action, points: Points) -> Call:
        """Of stages of blocks alone: what the head keeps stays as it is."""
        stage, blocks = self._job.plan.stages[action.stage], len(self._job.flow.blocks)
        if points.evaluates or not 1 <= stage.first < stage.last <= blocks + 1:
            return run
        kept = {storage_key(chunk.parameters) for chunk in self._job.chunks}

        def rounding() -> None:
            with compressing(kept):
                run()

        return rounding

    def frozen(self) -> frozenset[str]:
        """The layers that the next step leaves alone."""
        count = int(self._rate * len(self.distances))
        order = sorted(self.distances, key=self.distances.__getitem__)
        return frozenset(order[:count])

    def play(self, step: Loaded, begin: float) -> list[Ran]:
        """With the calmest layers frozen."""
        frozen, watch = self.frozen(), self._job.watch
        with watch.on(), watch.kind("optimizer"):
            before = {n: [w.clone() for w in ws] for n, ws in self._mine(frozen).items()}
        with self._still(frozen):
            ran = super().play(step, begin)
        mine = changes(before, self._mine(frozen))
        trained = [name for name in self.distances if name not in frozen]
        summed = self._job.totals.added([x for n in trained for x in mine.get(n, (0.0, 0.0))])
        for name, total, count in zip(trained, summed[::2], summed[1::2], strict=True):
            self.distances[name] = total / count if count else UNKNOWN
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
                if slot.name in self.distances and slot.name not in frozen and begin < end:
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
) -> dict[str, tuple[float, float]]:
    """By name, over the weights that were not 0: the sum of |(after - before) / before|, and their
    count. before: emptied on the way.

    The host waits for a device twice, and once more for what has zeros.
    """
    names = list(before)
    zeros = _read([torch.stack([(p == 0).any() for p in _all(before[n])]).any() for n in names])
    sums, counts = list[Tensor](), list[int]()
    for name, some in zip(names, zeros, strict=True):
        olds = before.pop(name)
        total, count = olds[0].new_zeros((), dtype=torch.float64), 0
        for x, y in zip(_all(olds), _all(after[name]), strict=True):
            ratio = ((y - x) / x).abs_()
            ratio = ratio[x != 0] if some else ratio
            total, count = total + ratio.double().sum(), count + ratio.numel()
        sums.append(total)
        counts.append(count)
    return {n: (s, float(c)) for n, s, c in zip(names, _read(sums), counts, strict=True)}


def _all(flats: list[Tensor]) -> Iterator[Tensor]:
    return (piece for flat in flats for piece in pieces(flat))


def _read(numbers: list[Tensor]) -> list[float]:
    """One wait for all of them."""
    if not numbers:
        return []
    found: list[float] = torch.stack([x.to(numbers[0].device) for x in numbers]).tolist()
    return found
