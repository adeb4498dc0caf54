"""The parameters of an optimizer that updates other weights than those that gradients are taken at
(outsize/optim/optimizer.py, Apart): the weights at which they are, or those that it updates, which
evaluations and generation see.

Both follow from the master copy and its states, so that a change to the one and back is the same
bits, wherever they rest. Every worker changes at the same moment.
"""

from __future__ import annotations

import torch

from outsize.optim import Optimizer, taker
from outsize.optim.optimizer import Apart
from outsize.runtime.storage.weight_pool import WeightPool
from outsize.schedule.kept import MASTER, PARAMETERS


def apart(optimizer: Optimizer) -> tuple[Apart | None, Apart | None]:
    """Of what updates the rest, and of the optimizer itself, those that are."""
    rest, main = (taker(optimizer, main) for main in (False, True))
    return rest if isinstance(rest, Apart) else None, main if isinstance(main, Apart) else None


class Shown:
    """Of a job's chunks. kept: whether the parameters are what is updated."""

    def __init__(self, weight_pool: WeightPool, optimizer: Optimizer) -> None:
        self._pool, self._apart, self.kept = weight_pool, apart(optimizer), False

    def show(self, kept: bool) -> None:
        """Have the parameters be what is updated, or where gradients are taken."""
        if self.kept != kept:
            self.make(kept)

    @property
    def alone(self) -> bool:
        """Whether no other worker and no tier has a part in that."""
        return self._pool.shard_groups.whole[0].size == 1 and not self._pool.homes.known

    @torch.no_grad()
    def make(self, kept: bool) -> None:
        """The same, whatever they are: weights or states may have been replaced."""
        self.kept = kept
        placed = self._pool.placement.chunks
        for index, table in enumerate(placed.tables):
            own = self._apart[table.main]
            if own is None or not table.trainable:
                continue
            mine = self._pool.mine(index, MASTER)
            made = mine
            if not kept:
                states = {n: self._pool.mine(index, n) for n in placed.kept.names(table)}
                own.taken_at(mine, states, made := torch.empty_like(mine))
            whole = self._pool.shard_groups.complete(index, MASTER, made)
            self._pool.write(index, PARAMETERS, whole.to(dict(placed.held(index))[PARAMETERS]))
