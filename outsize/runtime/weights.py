"""Weights: those of a model's stages as the steps of a job or of a generation meet them.

Where they rest is no affair of a step: its list says what comes when, and a stage's parameters are
views of where it comes to. In memory, whole or one worker's part, nothing comes (`Resident`); the
pool of a job brings what rests on tiers or is cut over workers (storage/weight_pool.py), that of a
streamed model what rests in files (tokens/pooled.py), in any format and codec.
"""

from __future__ import annotations

from typing import Protocol

from outsize.schedule.item import Item


class Weights(Protocol):
    """Brings the weights of stages to where they are computed with."""

    def fetch(self, name: Item) -> None:
        """Bring an item into its room from where it rests. Blocks; any thread."""

    def gather(self, name: Item) -> None:
        """Bring an item into its room from the workers that have parts of it. Blocks."""

    def ensure(self, start: frozenset[Item]) -> None:
        """Have in their rooms what a list expects to find when it begins."""

    def forget(self) -> None:
        """A list has failed: nothing in the rooms can be relied on any more."""


class Resident:
    """Weights that are in memory: a list over them brings nothing."""

    def fetch(self, name: Item) -> None:
        raise AssertionError(f"{name} is here")

    def gather(self, name: Item) -> None:
        raise AssertionError(f"{name} is here")

    def ensure(self, start: frozenset[Item]) -> None:
        assert not start, "there are no rooms"

    def forget(self) -> None:
        """They are where they were."""
