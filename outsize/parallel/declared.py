"""Layouts of a decoder on the tensor axis, declared beside the model as data.

Both who cuts a model (outsize/parallel/tensor.py) and who checks that nothing is missing
(outsize/parallel/check_decoder.py) read these tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from outsize.models.config import DecoderConfig
from outsize.parallel.layouts import PARTIAL, REPLICATED, Exchange, Laid, Sharded

# What is never cut apart, and how many there are of it: a field of DecoderConfig or ExpertFacts.
Unit = Literal["heads", "kv_heads", "inner", "expert_inner", "shared_inner", "vocab"]

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
    the module's own computation: `before` becomes `after` in the direction of the forward pass."""

    module: str
    edge: Literal["input", "output"]
    before: Laid
    after: Laid

    @property
    def crossing(self) -> tuple[str, str]:
        """What runs (forward, backward)."""
        return Exchange(self.before, self.after).names

    @property
    def dim(self) -> int:
        """The dim that is sharded on one of the sides; 0 where none is."""
        sides = (self.before.value, self.after.value)
        return next((side.dim for side in sides if isinstance(side, Sharded)), 0)


@dataclass(frozen=True)
class Weight:
    """How parameters (a pattern of their names) lie. dim, unit: cut along dim between units; None:
    whole on every worker. gradient: "whole" where every worker that holds an element has all of its
    gradient, "partial" where each has a summand, "stream" partial where the activations that it
    meets are cut by tokens, else whole."""

    name: str
    dim: int | None = None
    unit: Unit | None = None
    gradient: Literal["whole", "partial", "stream"] = "whole"


_ATTENTION = (
    Weight("blocks.*.attention.q.*", 0, "heads"),
    Weight("blocks.*.attention.[kv].*", 0, "kv_heads"),  # partial too, where a head is shared
    Weight("blocks.*.attention.kv.*", 0, "heads"),
    Weight("blocks.*.attention.o.weight", 1, "heads"),
    Weight("blocks.*.attention.o.bias", gradient="stream"),
)
_WHOLE_NORMS = (
    Weight("blocks.*.attention.q_norm.*", 0, "heads"),
    Weight("blocks.*.attention.k_norm.*", 0, "kv_heads"),
)
_REST = (
    Weight("blocks.*.attention.*", gradient="partial"),  # norms by head, projections to low ranks
    Weight("blocks.*.mlp.router.correction"),  # no gradient ever moves it
    Weight("blocks.*.mlp.router.*", gradient="partial"),
    Weight("blocks.*.mlp.experts.gate", 1, "expert_inner"),
    Weight("blocks.*.mlp.experts.up", 1, "expert_inner"),
    Weight("blocks.*.mlp.experts.down", 2, "expert_inner"),
    Weight("blocks.*.mlp.shared.down.weight", 1, "shared_inner"),
    Weight("blocks.*.mlp.shared.*", 0, "shared_inner"),
    Weight("blocks.*.mlp.down.weight", 1, "inner"),
    Weight("blocks.*.mlp.down.bias", gradient="stream"),
    Weight("blocks.*.mlp.*", 0, "inner"),
    Weight("prologue.tokens.weight", 0, "vocab"),
    Weight("epilogue.head.*", 0, "vocab"),
    Weight("*", gradient="stream"),  # norms of the residual stream, positions, its projections
)


def weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """The table of a decoder's parameters; the first entry that matches a name says how it lies."""
    whole = config.qk_norm == "whole" and config.latent is None
    return _rewired(config) + _ATTENTION + (_WHOLE_NORMS if whole else ()) + _REST


def _rewired(config: DecoderConfig) -> tuple[Weight, ...]:
    """What lies otherwise in ladder and Kraken models: the first worker alone counts the biases of
    row weights; what each way sees of the stream is its own."""
    biases = ("attention.o.bias", "mlp.down.bias")
    if config.ways > 1:
        norms = ("blocks.*_norm.*", "epilogue.norm.*", "epilogue.project.*")
        partial = (*norms, *(f"blocks.*.{bias}" for bias in biases))
    elif config.ladder_from is not None:
        layers = range(config.ladder_from, len(config.layers))
        partial = tuple(f"blocks.{i}.{bias}" for i in layers for bias in biases)
    else:
        return ()
    return tuple(Weight(name, gradient="partial") for name in partial)


def weight(config: DecoderConfig, name: str) -> Weight:
    """The entry of a parameter."""
    return next(w for w in weights(config) if fnmatchcase(name, w.name))


def boundaries(sequence_parallel: bool, ways: int = 1) -> tuple[Boundary, ...]:
    """Where layouts change. The row weights' biases are added behind the sum: the "output" of a
    branch is the product of its last weight. ways: of a Kraken model, whose blocks sum inside."""
    if ways > 1:
        return (
            Boundary("prologue.tokens", "output", SUMMAND, WHOLE),
            Boundary("blocks.0", "input", WHOLE, FANNED),
            Boundary("epilogue.head", "output", BY_FEATURES, WHOLE),
        )
    between = stream(sequence_parallel)
    return (
        Boundary("prologue.tokens", "output", SUMMAND, between),
        Boundary("prologue.positions", "input", WHOLE, between),
        Boundary("blocks.*.attention", "input", between, FANNED),
        Boundary("blocks.*.attention", "output", SUMMAND, between),
        Boundary("blocks.*.mlp", "input", between, FANNED),
        Boundary("blocks.*.mlp", "output", SUMMAND, between),
        Boundary("epilogue", "output", between, FANNED),
        Boundary("epilogue.head", "output", BY_FEATURES, WHOLE),  # the loss takes its weight alone
    )
