"""What a layout rule is given, and how it says no."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outsize.parallel.layouts import Layout, Sharded


class Refusal(Exception):
    """The operator would compute something else than on one worker. what: the reason; missing: the
    collective that would mend it."""

    def __init__(self, what: str, missing: str) -> None:
        super().__init__(what)
        self.what, self.missing = what, missing


@dataclass(frozen=True)
class Call:
    """One operator on n workers: the layouts and whole shapes of the tensors that it takes, its
    arguments, the whole shapes that it gives."""

    op: str
    layouts: tuple[Layout, ...]
    shapes: tuple[tuple[int, ...], ...]
    args: Any
    kwargs: Mapping[str, Any]
    out: tuple[tuple[int, ...], ...]
    n: int

    @property
    def numbers(self) -> list[int]:
        """Arguments that are whole numbers."""
        return [a for a in self.args if isinstance(a, int) and not isinstance(a, bool)]


def common(layouts: Sequence[Layout], done: str) -> Layout:
    """The one layout that all have."""
    first = layouts[0]
    for other in layouts[1:]:
        if other != first:
            raise Refusal(
                f"a tensor that is {first} is {done} with one that is {other}", mend(first, other)
            )
    return first


def mend(a: Layout, b: Layout) -> str:
    """The collective that brings tensors together."""
    kinds = (a, b)
    if any(not isinstance(x, Sharded) for x in kinds) and any(
        isinstance(x, Sharded) for x in kinds
    ):
        return "all_gather"
    return "all_reduce"
