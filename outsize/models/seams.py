"""The seams of the model: what it says, without saying how it is done.

`Linear` is a module (outsize/models/linear.py), and so is a `Mixer`; `Attend`, `Carry` and
`Dispatch` are handed in with the Context; collectives are met only inside implementations of these.

T tokens of a microbatch laid flat, D hidden, H query heads, G key-value heads, K head size,
W value head size, J experts chosen for a token, N sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor, nn

from outsize.models.layout import clip
from outsize.registry import Registry

if TYPE_CHECKING:
    from outsize.models.config import DecoderConfig
    from outsize.models.dropout import Noise


@dataclass(frozen=True)
class AttendSpec:
    """What a layer asks of attention, and what each query may see. Nobody sees another document.

    causal: a query sees itself and earlier tokens, else its whole document. window: of those it
    sees, the ones less than `window` tokens away. prefix: everybody sees the first so many tokens
    of the document too. tree: instead of all that, a token sees itself and its ancestors; the
    parent of each token, an earlier one, or -1. softcap c turns a score s into c * tanh(s / c).

    first_query, first_key: which token of the documents the first query and the first key are, so
    that both may be any stretch of the tokens. Bounds and tree count tokens from the first one.

    shared: values are the first numbers of keys, which who keeps them keeps once.
    """

    layer: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    causal: bool = True
    prefix: int = 0
    tree: tuple[int, ...] | None = None
    first_query: int = 0
    first_key: int = 0
    shared: bool = False

    @property
    def in_order(self) -> bool:
        """Whether a query sees itself and what is before it, at most `window` tokens, as a layer
        of a causal model does."""
        return self.causal and not self.prefix and self.tree is None

    @property
    def plain(self) -> bool:
        """Causal attention of all tokens to all tokens, what every kernel does."""
        return self.in_order and not self.first_query and not self.first_key


class Attend(Protocol):
    """Attention over documents laid flat.

    All implementations take a plain spec; outsize/models/attention.py takes any.
    """

    def __call__(
        self,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGW: Tensor,
        bounds: tuple[int, ...],
        spec: AttendSpec,
    ) -> Tensor:
        """o_THW. `bounds` are the cumulative offsets (0, ...) of the documents, to the last token
        of queries and keys at least: attention never crosses them. Query head h reads key-value
        head h // (H / G). A query that sees nothing gets 0."""


# -- what crosses tokens ---------------------------------------------------------------------------

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class StateSpec:
    """One tensor of what tokens leave for later ones. shape: of each token's, or of that of the
    whole sequence, which takes the same memory however long that is."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    per: Literal["token", "sequence"]

    def bytes(self, tokens: int) -> int:
        """Of a sequence with room for so many tokens."""
        count = tokens if self.per == "token" else 1
        return count * math.prod(self.shape) * self.dtype.itemsize


class Recurrence(Protocol):
    """How a recurrent state goes through tokens, in two forms that give the same."""

    def whole(
        self, inputs: Tensors, bounds: tuple[int, ...], state: Tensors | None
    ) -> tuple[Tensor, Tensors]:
        """y (T, ...) of documents laid flat, and the state behind the last token. The first one
        goes on from `state`, the others begin with zeros. inputs: (T, ...) each."""

    def step(self, inputs: Tensors, state: Tensors) -> tuple[Tensor, Tensors]:
        """y (N, ...) of one token of each of N sequences, and their states after it, (N, ...)."""


class Carry(Protocol):
    """Who has what earlier tokens left, and keeps what these leave."""

    def run(
        self,
        layer: int,
        states: tuple[StateSpec, ...],
        recurrence: Recurrence,
        inputs: Tensors,
        bounds: tuple[int, ...],
    ) -> Tensor:
        """y (T, ...) of a layer whose tokens leave one state for each sequence."""

    def keep(self, left: Tensors) -> None:
        """Keep what each of these tokens leaves, where nobody asks what it gives."""


class Past(Attend, Carry, Protocol):
    """One step of generation: what earlier steps left of its sequences, one a document.

    bounds: of the step's tokens; lengths: tokens of each whole sequence as far as they are known,
    what a rotary embedding that depends on the length goes by.
    """

    @property
    def bounds(self) -> tuple[int, ...]: ...

    @property
    def lengths(self) -> tuple[int, ...]: ...

    def cut(self, middle: int) -> tuple[Past, Past]:
        """The same step as two, one after the other in every layer: of the first `middle` tokens,
        and of the others."""


class Mixer(Protocol):
    """What mixes the tokens of a document, a module x_TD -> y_TD. The only one through which a
    token has an effect on later ones, by the states that it declares."""

    def __call__(self, x_TD: Tensor, ctx: Context) -> Tensor:
        """y_TD."""

    def states(self, dtype: torch.dtype) -> tuple[StateSpec, ...]:
        """What tokens leave, of this worker's part, where hidden states have this dtype."""

    def leave(self, x_TD: Tensor, ctx: Context) -> None:
        """Have the Context's Carry keep what these tokens leave; nothing else is computed."""


# By LayerFacts.kind: what makes a layer's Mixer, which is a module too.
MIXERS: Registry[Callable[[DecoderConfig, int], nn.Module]] = Registry("mixer")


class Beginning:
    """Documents are here whole: nothing came before, nobody comes after."""

    def run(
        self,
        layer: int,
        states: tuple[StateSpec, ...],
        recurrence: Recurrence,
        inputs: Tensors,
        bounds: tuple[int, ...],
    ) -> Tensor:
        return recurrence.whole(inputs, bounds, None)[0]

    def keep(self, left: Tensors) -> None:
        """Nobody comes after."""


class ExpertSet(Protocol):
    """The experts of a layer that lie on this worker."""

    @property
    def every(self) -> int:
        """How many the layer has."""

    @property
    def count(self) -> int:
        """How many they are."""

    def __call__(self, x_ND: Tensor, sizes: Sequence[int] | Tensor) -> Tensor:
        """y_ND: the first sizes[0] rows through expert 0, the next sizes[1] through 1, ... A tensor
        of sizes is on the device and not read by the host."""


class Dispatch(Protocol):
    """Tokens to their experts and back."""

    def __call__(
        self, x_TD: Tensor, chosen_TJ: Tensor, weight_TJ: Tensor, experts: ExpertSet
    ) -> Tensor:
        """y_TD, the sum over j of weight_TJ times the output of expert chosen_TJ (int64)."""


def all_of(tokens: int) -> tuple[int, int]:
    """Every token lies here."""
    return 0, tokens


@dataclass(frozen=True)
class Context:
    """What a block needs beside the hidden state; made once per microbatch.

    rope maps the name of each rotary embedding to its cosines and sines, (T, dim / 2) each. noise:
    the dropout of these tokens, in training where it is wanted. most: as many tokens as any worker
    may have that runs the same layers with this one, who all call them as often; 0: nobody does.
    between: of so many tokens, those that lie here between branches, [first, last). factor: of the
    sum of losses, in training; None where parts of documents are elsewhere. taken: by layer, what
    its block took, where an adapter's block behind them wants that. rows: that the tokens are, all
    equally long and documents whole; 0: nobody knows.
    """

    positions_T: Tensor
    bounds: tuple[int, ...]
    rope: Mapping[str, tuple[Tensor, Tensor]]
    attend: Attend
    dispatch: Dispatch
    carry: Carry
    noise: Noise | None = None
    most: int = 0
    between: Callable[[int], tuple[int, int]] = all_of
    factor: float | None = 0.0
    taken: dict[int, Tensor] = field(default_factory=dict, compare=False)
    rows: int = 0

    def drop(self, x_TD: Tensor, name: str) -> Tensor:
        """x_TD with dropout, if there is any. name: of the place in the model."""
        if self.noise is None:
            return x_TD
        first, _ = self.between(self.bounds[-1])
        return self.noise.at(first)(x_TD, name)

    def at(self, start: int, stop: int, attend: Attend, carry: Carry) -> Context:
        """The same for tokens start .. stop alone, which meet others by other means."""
        here = slice(start, stop)
        rope = {name: (cos[here], sin[here]) for name, (cos, sin) in self.rope.items()}
        bounds = clip(self.bounds, start, stop)
        noise = None if self.noise is None else self.noise.at(start)
        positions = self.positions_T[here]
        return Context(
            positions, bounds, rope, attend, self.dispatch, carry, noise, between=self.between,
            factor=None,
        )  # fmt: skip
