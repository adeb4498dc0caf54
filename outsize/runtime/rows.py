"""Rows: a worker's part of the first and the last layer of a model, where all workers of a pipeline
have some, and what is exchanged between their passes (outsize/schedule/ends.py).

T tokens of a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from outsize.kernels.loss import Head, Targets
from outsize.models.decoder import Decoder
from outsize.registry import Registry
from outsize.schedule import State
from outsize.schedule.ends import Ends

if TYPE_CHECKING:
    from outsize.runtime.engine import Handler
    from outsize.runtime.microbatches import Microbatches


class Rows(Protocol):
    """Those of one worker."""

    def begin(
        self, microbatch: int, ids_T: Tensor, targets: Targets, head: Head, first: bool, last: bool
    ) -> None:
        """Take a microbatch up. head: how its losses are made. first, last: whether its first and
        its last stage are here."""

    def ask(self, microbatch: int, ids_T: Tensor, first: bool) -> None:
        """Take up tokens of requests, whose logits every worker is to have."""

    def end(self, microbatch: int) -> None:
        """Let a microbatch go."""

    def reset(self) -> None:
        """Forget the step."""

    @property
    def received(self) -> Mapping[str, int]:
        """Bytes that exchanges have brought, by axis."""

    def summed(self, state: State, microbatch: int) -> int:
        """Bytes of what an exchange sums, few numbers a token aside."""

    def take(self, state: State, microbatch: int) -> Tensor:
        """What all workers have summed."""

    @property
    def back(self) -> State:
        """What brings the gradient of the last stage's output."""

    def give(self, state: State, microbatch: int, tensor: Tensor) -> None:
        """The last stage's output (ACTIVATIONS) or the gradient of the first one's input."""

    def given(self, state: State, microbatch: int) -> Tensor:
        """What was given, for the workers that have other parts."""

    def handler(self, microbatches: Microbatches, counts: bool) -> Handler:
        """What carries their passes out. counts: this worker books the losses, which all have."""


# By name of Ends, what makes the rows of a model that was cut (outsize/parallel/divide.py).
ROWS: Registry[Callable[[Decoder, Ends], Rows]] = Registry("part of the ends of a pipeline")
