"""The seams of the model: what it says, without saying how it is done.

`Linear` is a module (outsize/models/linear.py); `Attend` and `Dispatch` are handed in with the
Context; collectives are met only inside implementations of these.

T tokens of a microbatch laid flat, D hidden, H query heads, G key-value heads, K head size,
W value head size, J experts chosen for a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outsize.models.dropout import Noise
from outsize.models.layout import clip


@dataclass(frozen=True)
class AttendSpec:
    """What a layer asks of attention. Causal always; with a window a query sees itself and the
    window - 1 tokens before it. softcap c turns a score s into c * tanh(s / c)."""

    layer: int
    scale: float
    window: int | None = None
    softcap: float | None = None


class Attend(Protocol):
    """Attention over documents laid flat."""

    def __call__(
        self,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGW: Tensor,
        bounds: tuple[int, ...],
        spec: AttendSpec,
    ) -> Tensor:
        """o_THW. `bounds` are the cumulative offsets (0, ..., T) of the documents: attention
        never crosses them. Query head h reads key-value head h // (H / G)."""


class ExpertSet(Protocol):
    """The experts that lie on this worker."""

    count: int

    def __call__(self, x_ND: Tensor, sizes: Sequence[int]) -> Tensor:
        """y_ND: the first sizes[0] rows through expert 0, the next sizes[1] through 1, ..."""


class Dispatch(Protocol):
    """Tokens to their experts and back."""

    def __call__(
        self, x_TD: Tensor, chosen_TJ: Tensor, weight_TJ: Tensor, experts: ExpertSet
    ) -> Tensor:
        """y_TD, the sum over j of weight_TJ times the output of expert chosen_TJ (int64)."""


@dataclass(frozen=True)
class Context:
    """What a block needs beside the hidden state; made once per microbatch.

    rope maps the name of each rotary embedding to its cosines and sines, (T, dim / 2) each. noise:
    the dropout of these tokens, in training where it is wanted.
    """

    positions_T: Tensor
    bounds: tuple[int, ...]
    rope: Mapping[str, tuple[Tensor, Tensor]]
    attend: Attend
    dispatch: Dispatch
    noise: Noise | None = None

    def drop(self, x_TD: Tensor, name: str) -> Tensor:
        """x_TD with dropout, if there is any. name: of the place in the model."""
        return x_TD if self.noise is None else self.noise(x_TD, name)

    def at(self, start: int, stop: int, attend: Attend) -> Context:
        """The same for tokens start .. stop alone, which attend by other means."""
        here = slice(start, stop)
        rope = {name: (cos[here], sin[here]) for name, (cos, sin) in self.rope.items()}
        bounds = clip(self.bounds, start, stop)
        noise = None if self.noise is None else self.noise.at(start)
        return Context(self.positions_T[here], bounds, rope, attend, self.dispatch, noise)
