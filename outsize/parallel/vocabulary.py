"""A vocabulary whose tokens lie on several workers: the embedding, and what the loss is told.

T tokens, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from outsize.collectives import Collective
from outsize.kernels.entropy import Vocabulary
from outsize.kernels.linear import embedding
from outsize.models.linear import Embedding
from outsize.parallel.sums import spans_of


def lookup(tokens: Embedding, axis: Collective, vocab: int) -> Callable[[Tensor], Tensor]:
    """A forward for an embedding that holds this worker's rows: zeros for the tokens of others, so
    that the sum over the axis is the embedding."""
    first, last = spans_of(vocab, axis)[axis.rank]

    def forward(ids_T: Tensor) -> Tensor:
        other_T = (ids_T < first) | (ids_T >= last)
        local_T = (ids_T - first).masked_fill(other_T, 0)
        rows_TD = embedding(local_T, tokens.weight, tokens.sink)
        return rows_TD.masked_fill(other_T.unsqueeze(-1), 0.0)

    return forward


def vocabulary(axis: Collective, vocab: int) -> Vocabulary:
    """Which tokens' logits each worker has, for the loss."""
    return Vocabulary(spans_of(vocab, axis), axis)
