"""A decoder keeps this worker's rows of its tables.

Every worker of a pipeline has rows of the token embedding and of the head (one table where they are
tied), and plays its part of both for every microbatch (rows.py). Of tables that the tensor axis has
cut, the pipelines of its workers share out what that has left to each. Exact: what is summed in
another order differs by rounding alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outsize.collectives import Collective
from outsize.errors import OutsizeError
from outsize.kernels.entropy import Span, Vocabulary
from outsize.models.cuts import Cut
from outsize.models.decoder import Decoder
from outsize.parallel.divide import DIVISIONS
from outsize.parallel.shards import even
from outsize.parallel.tensor.decoder import keep
from outsize.parallel.tensor.vocabulary import lookup
from outsize.techniques.vocabulary.ends import NAME


@dataclass(frozen=True)
class Grid:
    """All workers with rows of the head: the pipelines of the tensor axis, one behind the other.
    line: the workers of this pipeline. across: those with the same stages, on the tensor axis. Both
    say what they say here beside what other lanes do."""

    line: Collective
    across: Collective

    @property
    def rank(self) -> int:
        return self.across.rank * self.line.size + self.line.rank

    def all_gather(self, mine: Tensor, spans: Sequence[Span], out: Tensor) -> None:
        """Along the pipeline first, then what each pipeline has."""
        size = self.line.size
        each = [spans[i : i + size] for i in range(0, len(spans), size)]
        wholes = [(own[0][0], own[-1][1]) for own in each]
        first, last = wholes[self.across.rank]
        own = [(a - first, b - first) for a, b in each[self.across.rank]]
        self.line.all_gather(mine, own, out[first:last])
        if self.across.size > 1:
            self.across.all_gather(out[first:last], wholes, out)


def cut_vocabulary(model: Decoder, line: Collective, across: Collective) -> dict[str, Cut]:
    """Leave of a decoder's tables this worker's rows; gives how what was there was cut, by name.

    line, across: see Grid. Shells and meta parameters stay such, values are copied. OutsizeError
    for fewer tokens than workers.
    """
    tokens, head = model.prologue.tokens, model.epilogue.head
    if model.config.vocab < line.size * across.size:
        each = f" and {across.size} of mesh.tensor" if across.size > 1 else ""
        raise OutsizeError(
            f"plan: pipeline.vocabulary cuts {model.config.vocab} tokens over {line.size}"
            f" workers{each}; expected one token for each at least: set it to 0"
        )
    had = model.epilogue.vocabulary
    wholes = ((0, model.config.vocab),) if had is None else had.spans
    spans = [_shared(whole, line.size) for whole in wholes]
    mine = spans[across.rank][line.rank]
    first, last = wholes[across.rank]
    tables = {id(p) for p in (tokens.weight, head.weight, head.bias) if p is not None}
    cuts = {
        name: Cut(
            (last - first, *p.shape[1:]), 0, ((mine[0] - first, mine[1] - first),), axis="pipeline"
        )
        for name, p in model.named_parameters()
        if id(p) in tables
    }
    keep(model, cuts)
    tokens.lookup = lookup(mine)
    every = tuple(span for each in spans for span in each)
    model.epilogue.vocabulary = Vocabulary(every, Grid(line, across))
    return cuts


def _shared(whole: Span, workers: int) -> list[Span]:
    """Rows by worker."""
    bounds = even(*whole, workers)
    return [(bounds[i], bounds[i + 1]) for i in range(workers)]


DIVISIONS.add(NAME, cut_vocabulary)
