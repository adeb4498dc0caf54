"""The shape of a decoder as a planner counts it: matrices, parameters and operations, no weights.

T tokens, H hidden size, V vocabulary. Operations count a multiply and an add apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from outsize.errors import OutsizeError, nearest

if TYPE_CHECKING:
    from outsize.foresight.module import Module

FIELDS = ("layers", "hidden", "heads", "vocab")


@dataclass(frozen=True)
class Latent:
    """Latent attention (DeepSeek-V2, 2024): ranks of queries (0: none) and of keys and values, and
    the sizes of a head with and without positions, and of its values."""

    queries: int
    values: int
    plain: int
    rotary: int
    head: int


@dataclass(frozen=True)
class Recurrent:
    """A layer that keeps a state in the place of keys and values (Dao and Gu, "Transformers are
    SSMs", 2024): its heads and their size, numbers of a state, groups of heads that write and read
    it alike."""

    heads: int
    head: int
    state: int
    groups: int = 1

    @property
    def inner(self) -> int:
        """Size of its values."""
        return self.heads * self.head

    def matrices(self, hidden: int) -> tuple[tuple[int, int, bool], ...]:
        """Values, gates, what writes and reads the state and steps of time; and back."""
        return ((hidden, self.inner + self.mixed + self.heads, True), (self.inner, hidden, True))

    @property
    def mixed(self) -> int:
        """Channels of its convolution: values, and what writes and reads the state."""
        return self.inner + 2 * self.groups * self.state


# Parts that a layer of a pattern is, in Megatron-LM's letters.
PARTS = {"M": "a recurrent state", "*": "attention", "-": "a dense MLP", "E": "experts"}


@dataclass(frozen=True)
class Shape:
    """A decoder. inner: of a dense MLP; gated: three matrices instead of two. experts: of each
    layer behind the first `dense` ones; shared: inner size of what every token passes there.
    Layers have attention and an MLP each, unless a pattern says which one part each of them is.
    module: that of a factory, whose rehearsals stand in the place of what is counted here; layers
    are its blocks then, and heads what a tensor axis may divide."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    inner: int = 0  # 4 H where it is 0
    groups: int = 0  # heads of keys and values; as many as heads where it is 0
    head: int = 0  # H / heads where it is 0
    gated: bool = False
    tied: bool = True
    experts: int = 0
    active: int = 0
    expert_inner: int = 0
    expert_hidden: int = 0  # what experts take and give; H where it is 0
    shared: int = 0
    dense: int = 0
    latent: Latent | None = None
    window: int = 0  # tokens that every second layer sees, 0: all
    capped: bool = False  # whether logits are scaled or capped
    dropout: bool = False
    positions: int = 0  # learnt ones
    predicted: int = 0  # further layers that predict later tokens; with a pattern, pairs of them
    pattern: str = ""  # a letter of PARTS for each layer
    recurrent: Recurrent | None = None
    module: Module | None = None

    def __post_init__(self) -> None:
        for name in FIELDS:
            if getattr(self, name) < 1:
                raise OutsizeError(f"model: {name} is {getattr(self, name)}; expected 1 or more")
        if self.experts and not 0 < self.active <= self.experts:
            raise OutsizeError(f"model: {self.active} of {self.experts} experts; expected some")
        if self.pattern:
            _check_pattern(self)

    @cached_property
    def d_inner(self) -> int:
        return self.inner or 4 * self.hidden

    @cached_property
    def d_head(self) -> int:
        return self.head or self.hidden // self.heads

    @cached_property
    def n_groups(self) -> int:
        return self.groups or self.heads

    @cached_property
    def parts(self) -> Parts:
        """What its layers are made of."""
        return parts(self)

    @cached_property
    def attention(self) -> tuple[tuple[int, int, bool], ...]:
        """Matrices of attention: (in, out, whether it is cut over a tensor axis)."""
        h, a = self.hidden, self.heads
        if self.latent is None:
            wide = (self.heads + 2 * self.n_groups) * self.d_head
            return ((h, wide, True), (a * self.d_head, h, True))
        m = self.latent
        first = ((h, m.queries, False), (m.queries, a * (m.plain + m.rotary), True))
        if not m.queries:
            first = ((h, a * (m.plain + m.rotary), True),)  # type: ignore[assignment]
        return (
            *first,
            (h, m.values + m.rotary, False),
            (m.values, a * (m.plain + m.head), True),
            (a * m.head, h, True),
        )

    @property
    def widths(self) -> tuple[int, int]:
        """Sizes of a head in the product with keys and with values."""
        if self.latent is None:
            return self.d_head, self.d_head
        return self.latent.plain + self.latent.rotary, self.latent.head

    def mlp(self, inner: int, hidden: int = 0) -> tuple[tuple[int, int, bool], ...]:
        """Matrices of an MLP of this inner size, into and out of H or what is said."""
        up, hidden = 2 * inner if self.gated else inner, hidden or self.hidden
        return ((hidden, up, True), (inner, hidden, True))

    @property
    def around(self) -> tuple[tuple[int, int, bool], ...]:
        """Matrices before and behind experts that take less than H (Elango et al., "LatentMoE",
        2026): a token passes them once."""
        less = self.expert_hidden
        return ((self.hidden, less, False), (less, self.hidden, False)) if less else ()

    # -- parameters --------------------------------------------------------------------------------

    @cached_property
    def of_attention(self) -> int:
        """Parameters of a layer's attention."""
        return _sizes(self.attention)

    @cached_property
    def of_norms(self) -> int:
        """Parameters of a layer's norms."""
        return int(2 * self.hidden * self.parts.halves)

    @cached_property
    def of_dense(self) -> int:
        """Parameters of a dense MLP."""
        return _sizes(self.mlp(self.d_inner))

    @cached_property
    def of_expert(self) -> int:
        """Parameters of one expert."""
        return _sizes(self.mlp(self.expert_inner, self.expert_hidden))

    @cached_property
    def of_shared(self) -> int:
        """Parameters of the router and of what every token passes beside experts of a layer."""
        shared = _sizes(self.mlp(self.shared)) if self.shared else 0
        return shared + _sizes(self.around) + self.hidden * self.experts

    @property
    def of_vocabulary(self) -> int:
        """Parameters of the embedding."""
        return self.vocab * self.hidden

    @cached_property
    def of_mixers(self) -> int:
        """Parameters of all layers' attention and recurrences."""
        recurrent = self.recurrent and _sizes(self.recurrent.matrices(self.hidden))
        return self.parts.attending * self.of_attention + self.parts.recurring * (recurrent or 0)

    @cached_property
    def parameters(self) -> int:
        """All of them."""
        routed = self.parts.routed * (self.experts * self.of_expert + self.of_shared)
        layers = (
            self.of_mixers + self.parts.plain * self.of_dense + routed + self.layers * self.of_norms
        )
        ends = self.of_vocabulary * (1 if self.tied else 2) + self.positions * self.hidden
        return layers + ends + self.hidden

    @cached_property
    def working(self) -> int:
        """Parameters of layers that a token meets, norms and embeddings aside."""
        routed = self.parts.routed * (self.active * self.of_expert + self.of_shared)
        return self.of_mixers + self.parts.plain * self.of_dense + routed

    @cached_property
    def end(self) -> float:
        """Parameters of the embedding, in those of an average layer."""
        ends = self.of_vocabulary * (1 if self.tied else 2)
        return self.of_vocabulary * self.layers / (self.parameters - ends)

    # -- operations --------------------------------------------------------------------------------

    def scores(self, sequence: int) -> float:
        """Operations of a token with all keys and values of its sequence, forward, without a mask:
        of all layers."""
        keys, values = self.widths
        seen = sequence if not self.window else (sequence + min(self.window, sequence)) / 2
        return 2.0 * self.parts.attending * self.heads * (keys + values) * seen


@dataclass(frozen=True)
class Parts:
    """Layers with attention, with a recurrent state, with a dense MLP and with experts. halves:
    parts of a layer over the two (attention and MLP) of most models, each with a norm and a sum
    into the stream; further: layers beyond, that predict later tokens."""

    attending: int
    recurring: int
    plain: int
    routed: int
    halves: float
    further: int


def parts(shape: Shape) -> Parts:
    """By its pattern, or attention and an MLP in each layer."""
    if shape.pattern:
        counts = [shape.pattern.count(letter) for letter in PARTS]
        return Parts(counts[1], counts[0], counts[2], counts[3], 0.5, 2 * shape.predicted)
    routed = shape.layers - shape.dense if shape.experts else 0
    return Parts(shape.layers, 0, shape.layers - routed, routed, 1.0, shape.predicted)


def _check_pattern(shape: Shape) -> None:
    if len(shape.pattern) != shape.layers:
        raise OutsizeError(
            f"model: a pattern of {len(shape.pattern)} letters for {shape.layers} layers; "
            "expected a letter each"
        )
    for letter in sorted(set(shape.pattern) - set(PARTS)):
        raise OutsizeError(
            f"model: pattern: {letter!r} is no part of a layer; "
            f"expected {', '.join(f'{key} ({what})' for key, what in PARTS.items())}"
        )
    for letter, lacks in (("M", shape.recurrent is None), ("E", not shape.experts)):
        if letter in shape.pattern and lacks:
            raise OutsizeError(f"model: pattern: {letter!r} without {PARTS[letter]} given")


def read_shape(values: Mapping[str, Any], what: str) -> Shape:
    """A shape from plain values. Raises OutsizeError for a key that it has not."""
    known = tuple(field.name for field in fields(Shape) if field.name != "module")
    for key in values:
        if key not in known:
            raise OutsizeError(f"{what}: {key!r} is unknown{nearest(key, known)}")
    made = dict(values)
    for key, kind in (("latent", Latent), ("recurrent", Recurrent)):
        if made.get(key) is not None:
            made[key] = kind(**made[key])
    return Shape(**made)


def _sizes(matrices: Iterable[tuple[int, int, bool]]) -> int:
    return sum(inner * out for inner, out, _ in matrices)
