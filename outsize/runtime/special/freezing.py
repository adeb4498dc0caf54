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

    freezing = Freezing(job, rate=0.9)   # plan.approximate: [frozen-by-dynamics]
    loss = freezing.step(batch)          # in place of job.step
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from outsize.errors import OutsizeError, nearest
from outsize.kernels.pieces import pieces
from outsize.memory.chunk import is_layer
from outsize.models.random import uniform
from outsize.runtime.intercept import Undo, intercept
from outsize.runtime.job import Job
from outsize.runtime.special.compressed import compressing
from outsize.torch_private import storage_key

NAME = "frozen-by-dynamics"  # what `approximate` must name
KEEP = ("whole", "int8")
UNKNOWN = 1e10  # distances of layers that no step has trained yet are from here on


class Freezing:
    """Plays a job's steps with some layers frozen in each.

    rate: the share of layers that is frozen, 0 to below 1. seed: of the order in which layers have
    their first turn. distances: by layer, to go on with; a state to save is `distances`. keep:
    what blocks keep for the backward pass as it is ("whole"), or in 8 bits ("int8").
    """

    def __init__(
        self,
        job: Job,
        rate: float,
        seed: int = 0,
        distances: Mapping[str, float] | None = None,
        keep: Literal["whole", "int8"] = "whole",
    ) -> None:
        if NAME not in job.plan.approximate:
            raise OutsizeError(
                f"plan: approximate is {list(job.plan.approximate)}; frozen layers change the"
                f" maths: name {NAME} there"
            )
        if not 0 <= rate < 1:
            raise OutsizeError(f"{NAME}: rate is {rate}; expected 0 or more and less than 1")
        self.job, self.rate = job, rate
        names = [n for n, p in job.owners.items() if p.requires_grad and is_layer(n, p.ndim)]
        first = uniform(seed, "freezing", 0, len(names))
        self.distances = {n: UNKNOWN * (1 + float(u)) for n, u in zip(names, first, strict=True)}
        self.distances |= {n: float(d) for n, d in (distances or {}).items()}
        if keep not in KEEP:
            raise OutsizeError(f"{NAME}: keep is {keep!r}{nearest(keep, KEEP)}")
        self._undo: list[Undo] = []
        if keep == "int8":
            self._compress()

    def _compress(self) -> None:
        if self.job.plan.rests_below("activations"):
            raise OutsizeError(
                f"{NAME}: activations rest below the device and keep is 'int8', which do not go"
                " together: leave one of them out"
            )
        chunks = (chunk.parameters for chunk in self.job.chunks)
        kept = {storage_key(flat) for flat in chunks}
        self._undo = [intercept(b, compressing(b, kept)) for b in self.job.flow.blocks]

    def close(self) -> None:
        """Give the job's blocks their own forward back."""
        while self._undo:
            self._undo.pop()()

    def frozen(self) -> frozenset[str]:
        """The layers that the next step leaves alone."""
        count = int(self.rate * len(self.distances))
        order = sorted(self.distances, key=self.distances.__getitem__)
        return frozenset(order[:count])

    def step(self, batch: Any, lr: float | None = None) -> Tensor:
        """Job.step, with the calmest layers frozen."""
        frozen = self.frozen()
        active = [name for name in self.distances if name not in frozen]
        read = self.job.weight_reader()
        with self.job.watch.on(), self.job.watch.kind("optimizer"):
            before = {name: read(name).clone() for name in active}
        with self._still(frozen):
            loss = self.job.step(batch, lr)
        self._measure(before, self.job.weight_reader())
        return loss

    @contextmanager
    def _still(self, names: frozenset[str]) -> Iterator[None]:
        for name in names:
            self.job.owners[name].requires_grad_(False)
        try:
            yield
        finally:
            for name in names:
                self.job.owners[name].requires_grad_(True)

    def _measure(self, before: dict[str, Tensor], read: Callable[[str], Tensor]) -> None:
        for name in list(before):
            self.distances[name] = distance(before.pop(name), read(name))


@torch.no_grad()
def distance(before: Tensor, after: Tensor) -> float:
    """Mean of |(after - before) / before| over the weights that were not 0; UNKNOWN if all were."""
    total, count = 0.0, 0
    for old, new in zip(pieces(before), pieces(after), strict=True):
        there = old != 0
        ratio = ((new - old) / old).abs_()[there]
        total, count = total + float(ratio.double().sum()), count + ratio.numel()
    return total / count if count else UNKNOWN
