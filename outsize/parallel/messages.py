"""Codes: how the messages of states that are cut over workers are written, where not as they are.

A technique registers what makes a Code of a plan; it acts where `approximate` names it. The runtime
talks through `over`; what the prover, the forecast and `verify` count is `bytes`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol

from outsize.collectives import Collective
from outsize.registry import Registry

if TYPE_CHECKING:
    from outsize.plan import Plan

# Parameters to those that use them, gradients to who updates, and what was updated, of which that
# worker has a master copy, to the others that hold it.
Way = Literal["gather", "reduce", "collect"]


class Code(Protocol):
    """How messages are written."""

    @property
    def memory(self) -> int:
        """Bytes that writing and reading a number moves in a worker's memory."""

    def bytes(self, numel: int) -> int:
        """Of the message of so many numbers."""

    def over(self, group: Collective, way: Way) -> Collective:
        """What gathers or reduces over a group by such messages."""


CODES: Registry[Callable[[Plan, Way], Code | None]] = Registry("code of messages")


def code_of(plan: Plan, way: Way) -> Code | None:
    """The code of a plan's messages; None: they are written as they are."""
    for name in plan.approximate:
        made = CODES.find(name)
        if made is not None and (code := made(plan, way)) is not None:
            return code
    return None
