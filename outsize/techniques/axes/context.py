"""Context parallelism: the tokens of each row are cut over the workers of an axis, keys and values
are gathered.

Every worker has two stretches of each row, one from the front and its mirror image from the back,
so that causal attention costs all of them alike (Brandon et al., "Striped Attention", 2023, give
the problem; the mirrored halves are those of Grattafiori et al., "The Llama 3 Herd of Models",
2024, section 3.3.2, as are gathered keys and values). Going back, the gradients of keys and values
are summed and scattered. What a query may see is what the layer says: documents that reach over
several workers, windows, caps and grouped heads are those of the whole row.

Exact. T tokens that are here, L of all workers, H query heads, G key-value heads, K head size, W
value size, E either of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor

from outsize.collectives import Collective
from outsize.collectives.axes import AXES, Axis, Clash
from outsize.models.attention import LocalAttend
from outsize.models.chunk import Left
from outsize.models.seams import Attend, AttendSpec
from outsize.parallel.execution import TOKEN_CUTS, Span
from outsize.plan.spread import share

NAME = "context"


def stretches(tokens: int, workers: int, place: int) -> tuple[Span, ...]:
    """The tokens of a row that a worker has: as many as the others, or one more."""
    counts = [last - first for first, last in (share(tokens, workers, p) for p in range(workers))]
    halves = [count - count // 2 for count in counts]
    before = list(accumulate(halves, initial=0))
    behind = list(accumulate((n - half for n, half in zip(counts, halves, strict=True)), initial=0))
    front = (before[place], before[place + 1])
    back = (tokens - behind[place + 1], tokens - behind[place])
    return ((front[0], back[1]),) if front[1] == back[0] else (front, back)


@dataclass(frozen=True)
class Mirrored:
    """The cut, from the place of one worker of the axis."""

    axis: Collective

    def spans(self, tokens: int) -> tuple[Span, ...]:
        return stretches(tokens, self.axis.size, self.axis.rank)

    def attend(self, rows: int, tokens: int, bounds: tuple[int, ...]) -> Attend:
        spans = [stretches(tokens, self.axis.size, place) for place in range(self.axis.size)]
        starts = range(0, rows * tokens, tokens)
        every = [[(s + a, s + b) for s in starts for a, b in spans_of] for spans_of in spans]
        return Gathered(self.axis, bounds, tuple(map(tuple, every)))


@dataclass(frozen=True)
class Gathered:
    """Attention of the tokens that are here to all of them. bounds: of the documents of the whole
    rows, laid flat; every: by worker of the axis, the stretches of those tokens that it has."""

    axis: Collective
    bounds: tuple[int, ...]
    every: tuple[tuple[Span, ...], ...]

    def __call__(
        self,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGW: Tensor,
        bounds: tuple[int, ...],
        spec: AttendSpec,
    ) -> Tensor:
        k_LGK, v_LGW = (_Gather.apply(x, self) for x in (k_TGK, v_TGW))  # type: ignore[no-untyped-call]
        here = self.every[self.axis.rank]
        queries = q_THK.split([last - first for first, last in here])
        local = LocalAttend()
        return torch.cat(
            [
                local(q, k_LGK, v_LGW, self.bounds, replace(spec, first_query=first))
                for q, (first, _) in zip(queries, here, strict=True)
            ]
        )

    @property
    def spans(self) -> tuple[Span, ...]:
        """The stretches that are here."""
        return self.every[self.axis.rank]

    def gathered(self, left: Left) -> Left:
        """What the tokens of all workers leave, of what those here do."""
        k_LGK, v_LGW = (self.gather(x_TGE) for x_TGE in left.values)
        return Left(self.bounds, given=(k_LGK, v_LGW))

    def summed(self, held: Left) -> tuple[Tensor, Tensor]:
        """Gradients of the keys and values of the tokens here, summed over the workers."""
        gk_TGK, gv_TGW = (self.scatter(g_LGE) for g_LGE in held.gradients)
        return gk_TGK, gv_TGW

    def gather(self, x_TGE: Tensor) -> Tensor:
        """x_LGE of everybody's, in the order of the rows."""
        shape = x_TGE.shape[1:]
        spans = self.elements(shape.numel())
        came = x_TGE.new_empty(spans[-1][1])
        self.axis.all_gather(x_TGE.detach().contiguous().view(-1), spans, came)
        return self.in_order(came.view(-1, *shape))

    def scatter(self, g_LGE: Tensor) -> Tensor:
        """The own part of the sum of everybody's."""
        shape = g_LGE.shape[1:]
        spans = self.elements(shape.numel())
        first, last = spans[self.axis.rank]
        mine = g_LGE.new_empty(last - first)
        self.axis.reduce_scatter(self.as_they_come(g_LGE).view(-1), spans, mine)
        return mine.view(-1, *shape)

    def elements(self, each: int) -> list[Span]:
        """Of everybody's tokens as they come, worker by worker, the elements of each worker, where
        a token has `each`."""
        counts = (each * sum(b - a for a, b in spans) for spans in self.every)
        return list(pairwise(accumulate(counts, initial=0)))

    def in_order(self, came_LGE: Tensor) -> Tensor:
        """Tokens as they come, in the order of the rows."""
        spans = list(chain.from_iterable(self.every))
        parts = came_LGE.split([last - first for first, last in spans])
        return torch.cat([parts[i] for i in sorted(range(len(spans)), key=spans.__getitem__)])

    def as_they_come(self, x_LGE: Tensor) -> Tensor:
        """The other way round."""
        return torch.cat([x_LGE[first:last] for first, last in chain.from_iterable(self.every)])


class _Gather(torch.autograd.Function):
    """x_LGE of everybody's x_TGE, in the order of the rows; back, the own part of the sum."""

    @staticmethod
    def forward(ctx: Any, x_TGE: Tensor, laid: Gathered) -> Tensor:
        ctx.laid = laid
        return laid.gather(x_TGE)

    @staticmethod
    def backward(ctx: Any, g_LGE: Tensor) -> tuple[Tensor, None]:
        return ctx.laid.scatter(g_LGE), None


TOKEN_CUTS.add(NAME, Mirrored)
AXES.add(
    NAME,
    Axis(
        NAME,
        20,
        "tokens",
        "workers that take different tokens of each row; keys and values are gathered",
        (
            Clash(
                "rows have fewer than two tokens for each worker of the axis",
                lambda plan: 0 < plan.sequence < 2 * plan.mesh[NAME],
                "take longer rows, or fewer workers",
            ),
        ),
    ),
)
