"""Layouts of a decoder on the tensor axis: what its modules declare, and a table of boundaries.

Both who cuts a model (outsize/parallel/tensor/decoder.py) and who checks that nothing is missing
(outsize/parallel/check/decoder.py) read these tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from outsize.models.declared import INSIDE, Lies, declarations
from outsize.models.decoder import Decoder
from outsize.parallel.layouts import PARTIAL, REPLICATED, Exchange, Laid, Sharded
from outsize.parallel.tensor.rewired import over_axis

TOKENS, FEATURES = Sharded(0), Sharded(1)
WHOLE = Laid()  # every worker computes the same with it, from here on
FANNED = Laid(REPLICATED, PARTIAL)  # every worker computes its own part of what comes of it
SUMMAND = Laid(PARTIAL, REPLICATED)
BY_TOKENS = Laid(TOKENS, TOKENS)
BY_FEATURES = Laid(FEATURES, FEATURES)


def stream(sequence_parallel: bool) -> Laid:
    """The residual stream between the branches."""
    return BY_TOKENS if sequence_parallel else WHOLE


@dataclass(frozen=True)
class Boundary:
    """A module (a pattern of its path) takes or gives a tensor whose layout changes there, outside
    the module's own computation: `before` becomes `after` in the direction of the forward pass.
    first: of blocks, those from this one on."""

    module: str
    edge: Literal["input", "output"]
    before: Laid
    after: Laid
    first: int = 0

    def of(self, name: str) -> bool:
        """Whether it is one of the module with this path."""
        return fnmatchcase(name, self.module) and not is_of_first(name, self.first)

    @property
    def crossing(self) -> tuple[str, str]:
        """What runs (forward, backward)."""
        return Exchange(self.before, self.after).names

    @property
    def dim(self) -> int:
        """The dim that is sharded on one of the sides; 0 where none is."""
        sides = (self.before.value, self.after.value)
        return next((side.dim for side in sides if isinstance(side, Sharded)), 0)


def is_of_first(name: str, blocks: int) -> bool:
    """Whether a path leads to or into one of the first blocks."""
    head, _, rest = name.partition(".")
    return head == "blocks" and int(rest.partition(".")[0] or blocks) < blocks


def layouts(model: Decoder) -> dict[str, Lies]:
    """How each parameter lies: as its module declares, or as the blocks' wiring has it."""
    wiring = over_axis(model.config)
    rewired = () if wiring is None else wiring.inside()
    return {
        name: INSIDE if any(fnmatchcase(name, one) for one in rewired) else declared.lies
        for name, declared in declarations(model)
    }


def boundaries(sequence_parallel: bool, by_rows: int = 0) -> tuple[Boundary, ...]:
    """Where layouts change in a plain model. The row weights' biases are added behind the sum: the
    "output" of a branch is the product of its last weight. by_rows: blocks at the front whose
    weights are whole; a microbatch's rows are shared there, which is a cut of its tokens."""
    between = stream(sequence_parallel)
    ends: tuple[Boundary, ...] = ()
    if by_rows and between != BY_TOKENS:
        ends = (
            Boundary("blocks.0", "input", between, BY_TOKENS),
            Boundary(f"blocks.{by_rows - 1}", "output", BY_TOKENS, between),
        )
    return (
        *ends,
        Boundary("prologue.tokens", "output", SUMMAND, between),
        Boundary("prologue.positions", "input", WHOLE, between),
        Boundary("prologue.virtual", "input", WHOLE, between),
        Boundary("blocks.*.attention", "input", between, FANNED, by_rows),
        Boundary("blocks.*.attention", "output", SUMMAND, between, by_rows),
        Boundary("blocks.*.mlp", "input", between, FANNED, by_rows),
        Boundary("blocks.*.mlp", "output", SUMMAND, between, by_rows),
        Boundary("epilogue", "output", between, FANNED),
        Boundary("epilogue.head", "output", BY_FEATURES, WHOLE),  # the loss takes its weight alone
    )
