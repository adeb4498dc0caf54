"""Sums over the tensor axis that are taken beside what is computed: the joint for techniques."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from outsize.collectives import Collective, World
from outsize.collectives.courier import Flight
from outsize.parallel.sums import Crossing
from outsize.plan.settings import Settings
from outsize.registry import Registry


class Beside(Protocol):
    """Takes sums while the worker computes."""

    @property
    def axis(self) -> Collective:
        """The workers that sum; nobody else calls this collective."""

    def send(self, work: Callable[[], None], device: torch.device) -> Flight:
        """Have something done on the axis. device: where its tensors are, which may not change
        until the flight has landed."""

    def fits(self, branch: nn.Module) -> bool:
        """Whether it can take a branch over."""

    def take_over(
        self, branch: nn.Module, entering: Crossing, leaving: Crossing, axis: Collective
    ) -> None:
        """Stand in for the boundaries of a branch that `fits`, from now on. axis: for sums that are
        taken at once."""


# By the setting of a plan that asks for it: what it has of a world of several workers on the axis.
BESIDE: Registry[Callable[[World, int], Beside]] = Registry("overlap of sums")


def beside_of(world: World, settings: Settings) -> Beside | None:
    """Of the setting that has one, None where sums are taken at once."""
    if world.mesh.tensor == 1:
        return None
    found = ((BESIDE.find(one.name), value) for one, value in settings.every())
    return next((make(world, value) for make, value in found if make is not None), None)
