"""Sums over the tensor axis that are taken beside what is computed: the joint for techniques."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from outsize.collectives import Collective, World
from outsize.collectives.courier import Flight
from outsize.models.config import DecoderConfig
from outsize.models.seams import Context, Past
from outsize.models.wiring import AnyBlock
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


class Through(Protocol):
    """One step's way through the blocks of a model, in their order."""

    def block(self, block: AnyBlock, x_TD: Tensor) -> Tensor:
        """What a block gives for what the one before it gave. It may be on its way."""

    def land(self, x_TD: Tensor) -> Tensor:
        """What the last block gave, there."""


class Prompts(Beside, Protocol):
    """Takes the sums of prompts beside what is computed, where generation asks for it."""

    @property
    def meaning(self) -> str:
        """What it does to a prompt, in a few words."""

    def fits_step(self, tokens: int) -> bool:
        """Whether a step of so many tokens can go through like this."""

    def through(self, context: Context, past: Past, leaving: Collection[int]) -> Through:
        """A step of generation that `fits_step`, over weights that stay. leaving: layers that give
        what goes to another worker."""

    def summed(self, x_TD: Tensor) -> tuple[float, float]:
        """Seconds of all sums of the blocks in a step with such hidden states, one after the other
        and as `through` takes them. All workers of the axis ask."""

    def silent(self) -> AbstractContextManager[None]:
        """Blocks compute, and nothing is summed."""


# By the setting of a plan that asks for it: what it has of a world of several workers on the axis.
BESIDE: Registry[Callable[[World, int], Beside]] = Registry("overlap of sums")


# Ways of prompts through a tensor axis, where no setting says how sums are taken.
PROMPTS: Registry[Callable[[World], Prompts]] = Registry("way of prompts")


def beside_of(world: World, settings: Settings) -> Beside | None:
    """Of the setting that has one, None where sums are taken at once."""
    if world.mesh.tensor == 1:
        return None
    found = ((BESIDE.find(one.name), value) for one, value in settings.every() if value)
    return next((make(world, value) for make, value in found if make is not None), None)


def prompts_of(world: World, config: DecoderConfig, settings: Settings) -> Prompts | None:
    """For generation: None where a setting says how sums are taken, if only that they are at once,
    and for models whose own wiring has them beside something."""
    said = any(BESIDE.find(one.name) is not None for one, _ in settings.every())
    if world.mesh.tensor == 1 or said or config.rewired:
        return None
    return next((make(world) for _, make in PROMPTS.items()), None)
