"""The shape of a decoder as a planner counts it: matrices, parameters and operations, no weights.

T tokens, H hidden size, V vocabulary. Operations count a multiply and an add apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from outsize.errors import OutsizeError, nearest

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
class Shape:
    """A decoder. inner: of a dense MLP; gated: three matrices instead of two. experts: of each
    layer behind the first `dense` ones; shared: inner size of what every token passes there."""

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
    shared: int = 0
    dense: int = 0
    latent: Latent | None = None
    window: int = 0  # tokens that every second layer sees, 0: all
    dropout: bool = False
    positions: int = 0  # learnt ones
    predicted: int = 0  # further layers that predict later tokens

    def __post_init__(self) -> None:
        for name in FIELDS:
            if getattr(self, name) < 1:
                raise OutsizeError(f"model: {name} is {getattr(self, name)}; expected 1 or more")
        if self.experts and not 0 < self.active <= self.experts:
            raise OutsizeError(f"model: {self.active} of {self.experts} experts; expected some")

    @cached_property
    def d_inner(self) -> int:
        return self.inner or 4 * self.hidden

    @cached_property
    def d_head(self) -> int:
        return self.head or self.hidden // self.heads

    @cached_property
    def n_groups(self) -> int:
        return self.groups or self.heads

    @property
    def routed(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense if self.experts else 0

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

    def mlp(self, inner: int) -> tuple[tuple[int, int, bool], ...]:
        """Matrices of an MLP of this inner size."""
        up = 2 * inner if self.gated else inner
        return ((self.hidden, up, True), (inner, self.hidden, True))

    # -- parameters --------------------------------------------------------------------------------

    @cached_property
    def of_attention(self) -> int:
        """Parameters of a layer's attention and norms."""
        return sum(i * o for i, o, _ in self.attention) + 2 * self.hidden

    @cached_property
    def of_dense(self) -> int:
        """Parameters of a dense MLP."""
        return sum(i * o for i, o, _ in self.mlp(self.d_inner))

    @cached_property
    def of_expert(self) -> int:
        """Parameters of one expert."""
        return sum(i * o for i, o, _ in self.mlp(self.expert_inner))

    @cached_property
    def of_shared(self) -> int:
        """Parameters of the router and of shared experts of a layer."""
        shared = sum(i * o for i, o, _ in self.mlp(self.shared)) if self.shared else 0
        return shared + self.hidden * self.experts

    @property
    def of_vocabulary(self) -> int:
        """Parameters of the embedding."""
        return self.vocab * self.hidden

    @cached_property
    def parameters(self) -> int:
        """All of them."""
        dense = (self.layers - self.routed) * self.of_dense
        routed = self.routed * (self.experts * self.of_expert + self.of_shared)
        ends = self.of_vocabulary * (1 if self.tied else 2) + self.positions * self.hidden
        return self.layers * self.of_attention + dense + routed + ends + self.hidden

    @cached_property
    def working(self) -> int:
        """Parameters of layers that a token meets, norms and embeddings aside."""
        attention = self.layers * (self.of_attention - 2 * self.hidden)
        dense = (self.layers - self.routed) * self.of_dense
        return attention + dense + self.routed * (self.active * self.of_expert + self.of_shared)

    # -- operations --------------------------------------------------------------------------------

    def scores(self, sequence: int) -> float:
        """Operations of a token with all keys and values of its sequence, forward, without a mask:
        of all layers."""
        keys, values = self.widths
        seen = sequence if not self.window else (sequence + min(self.window, sequence)) / 2
        return 2.0 * self.layers * self.heads * (keys + values) * seen


def read_shape(values: Mapping[str, Any], what: str) -> Shape:
    """A shape from plain values. Raises OutsizeError for a key that it has not."""
    known = tuple(field.name for field in fields(Shape))
    for key in values:
        if key not in known:
            raise OutsizeError(f"{what}: {key!r} is unknown{nearest(key, known)}")
    latent = values.get("latent")
    made = {**values, "latent": None if latent is None else Latent(**latent)}
    return Shape(**made)
