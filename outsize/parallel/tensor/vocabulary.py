"""A vocabulary whose tokens lie on several workers: the embedding, and what the loss is told.

T tokens, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from outsize.collectives import Collective
from outsize.kernels.entropy import Span, Vocabulary
from outsize.models.linear import Embedding, rows
from outsize.parallel.sums import spans_of


def lookup(span: Span) -> Callable[[Embedding, Tensor], Tensor]:
    """The lookup of an embedding that holds these rows: zeros for the tokens of others, so that the
    sum over all workers is the embedding."""
    first, last = span

    def here(tokens: Embedding, ids_T: Tensor) -> Tensor:
        other_T = (ids_T < first) | (ids_T >= last)
        local_T = (ids_T - first).masked_fill(other_T, 0)
        return rows(tokens, local_T).masked_fill(other_T.unsqueeze(-1), 0.0)

    return here


def vocabulary(axis: Collective, vocab: int) -> Vocabulary:
    """Which tokens' logits each worker has, for the loss."""
    return Vocabulary(spans_of(vocab, axis), axis)
