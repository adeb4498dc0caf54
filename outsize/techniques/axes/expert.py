"""Expert parallelism: the experts of every layer are dealt out over the workers of an axis, and
tokens go to them and back by an all-to-all.

The workers take different rows. Each holds all dense weights and its own run of a layer's experts,
which see the tokens of all workers of the axis. So the gradient of a dense weight is a sum over the
axis and the data axis, that of an expert over the data axis alone (Lepikhin et al., "GShard", 2020,
section 3; Rajbhandari et al., "DeepSpeed-MoE", 2022, section 5). No expert has a capacity and no
token is dropped: exact.

T tokens that are here, D hidden, J experts chosen for a token, N = T * J rows in the order of their
experts, M rows that come for the experts that are here, E experts of all workers, W workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from outsize.collectives import Collective
from outsize.collectives.axes import AXES, Axis, Clash
from outsize.errors import OutsizeError
from outsize.models.cuts import Cut
from outsize.models.declared import declarations
from outsize.models.decoder import Decoder
from outsize.models.experts import Reorder, dispatched, sizes_of, unknown
from outsize.models.seams import ExpertSet
from outsize.parallel.divide import DIVISIONS
from outsize.parallel.execution import DISPATCHES
from outsize.parallel.shards import even
from outsize.parallel.tensor.decoder import keep

NAME = "expert"


def dealt(experts: int, workers: int) -> tuple[int, ...]:
    """The worker r of the axis has experts [dealt[r], dealt[r + 1])."""
    return even(0, experts, workers)


@dataclass(frozen=True)
class Route:
    """An exchange of rows. sent, had: how many to and from each worker, in their order; room: for
    how many there is memory, more than come where that is not known before."""

    axis: Collective
    sent: tuple[int, ...]
    had: tuple[int, ...]
    room: int
    held: int

    @property
    def back(self) -> Route:
        """The way back."""
        return Route(self.axis, self.had, self.sent, self.held, self.room)

    def carry(self, x_ND: Tensor) -> Tensor:
        """Everybody's rows to where they go."""
        x_ND, y_MD = x_ND.contiguous(), x_ND.new_empty((self.room, *x_ND.shape[1:]))
        given = x_ND[: sum(self.sent)].split(self.sent)
        self.axis.all_to_all(given, y_MD[: sum(self.had)].split(self.had))
        return y_MD


class _Exchange(torch.autograd.Function):
    """Rows over a route; the gradients of what came go back over it."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return route.carry(x_ND.detach())

    @staticmethod
    def backward(ctx: Any, g_MD: Tensor) -> tuple[Tensor, None]:
        return ctx.route.back.carry(g_MD), None


@dataclass(frozen=True)
class Exchanged:
    """The dispatch."""

    axis: Collective

    def __call__(
        self, x_TD: Tensor, chosen_TJ: Tensor, weight_TJ: Tensor, experts: ExpertSet
    ) -> Tensor:
        return dispatched(
            x_TD, chosen_TJ, weight_TJ, lambda x_ND: self._there(x_ND, chosen_TJ, experts)
        )

    def _there(self, x_ND: Tensor, chosen_TJ: Tensor, experts: ExpertSet) -> Tensor:
        """Rows in the order of their experts through these, wherever they are."""
        if unknown(chosen_TJ):
            route, came = self._foreseen(chosen_TJ, experts.count)
            counts_WE = torch.tensor(came, device=x_ND.device)
        else:
            route, came, counts_WE = self._agreed(sizes_of(chosen_TJ, experts.every))
        # Worker by worker they come, and go through expert by expert.
        expert_M = torch.arange(experts.count, device=x_ND.device).repeat(self.axis.size)
        order_M = expert_M.repeat_interleave(counts_WE.flatten(), output_size=route.room).argsort(
            stable=True
        )
        inverse_M = order_M.argsort()
        x_MD: Tensor = _Exchange.apply(x_ND, route)  # type: ignore[no-untyped-call]
        x_MD = Reorder.apply(x_MD, order_M, inverse_M)  # type: ignore[no-untyped-call]
        y_MD = experts(x_MD, [sum(each) for each in zip(*came, strict=True)])
        y_MD = Reorder.apply(y_MD, inverse_M, order_M)  # type: ignore[no-untyped-call]
        y_ND: Tensor = _Exchange.apply(y_MD, route.back)  # type: ignore[no-untyped-call]
        return y_ND

    def _agreed(self, sizes_E: Tensor) -> tuple[Route, list[list[int]], Tensor]:
        """The route, and by worker and expert how many rows come, on the host and on the device.
        sizes_E: rows for each expert.

        Workers tell each other how many before the host knows: it waits once, for both.
        """
        bounds, size = dealt(len(sizes_E), self.axis.size), self.axis.size
        given = sizes_E.split([last - first for first, last in pairwise(bounds)])
        came_WE = sizes_E.new_empty((size, len(given[self.axis.rank])))
        self.axis.all_to_all(given, came_WE.unbind())
        both: list[int] = torch.cat([sizes_E, came_WE.flatten()]).tolist()
        here, came = came_WE.shape[1], both[len(sizes_E) :]
        by_worker = [came[here * w : here * (w + 1)] for w in range(size)]
        sent = tuple(sum(both[first:last]) for first, last in pairwise(bounds))
        had = tuple(map(sum, by_worker))
        return Route(self.axis, sent, had, sum(had), sum(sent)), by_worker, came_WE

    def _foreseen(self, chosen_TJ: Tensor, here: int) -> tuple[Route, list[list[int]]]:
        """The same where no values exist. What crosses is expected to be even; there is memory for
        every token of every worker to choose as many experts of this one as it can."""
        (tokens, chosen), size = chosen_TJ.shape, self.axis.size
        numbers = [torch.empty(here, dtype=torch.int64, device="meta")] * size
        self.axis.all_to_all(numbers, numbers)
        came = [[tokens if e < chosen else 0 for e in range(here)]] * size
        rows = tokens * chosen
        crossing = tuple(last - first for first, last in pairwise(even(0, rows, size)))
        most = max(rows, sum(map(sum, came)))
        return Route(self.axis, crossing, crossing, most, rows), came


def divide_experts(model: Decoder, axis: Collective) -> dict[str, Cut]:
    """Leave of a decoder's experts those of this worker; gives how their weights were cut."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    stacks = [name for name, said in declarations(model) if said.stack == "experts"]
    if not stacks:
        raise OutsizeError(
            f"mesh: {NAME} is {axis.size}, but the model has no experts; set {NAME} to 1, and data"
            f" to {axis.size} for workers that take different rows"
        )
    count = min(shapes[name][0] for name in stacks)
    if count < axis.size:
        raise OutsizeError(
            f"mesh: {NAME} is {axis.size}, but a layer of the model has {count} experts, too"
            f" few for {axis.size} workers; the nearest that works is {NAME}={count}"
        )
    bounds = dealt(count, axis.size)
    span = bounds[axis.rank], bounds[axis.rank + 1]
    cuts = {name: Cut(shapes[name], 0, (span,), axis=NAME) for name in stacks}
    keep(model, cuts)
    return cuts


DISPATCHES.add(NAME, Exchanged)
DIVISIONS.add(NAME, divide_experts)
AXES.add(
    NAME,
    Axis(
        NAME,
        15,
        "rows",
        "workers that take different rows and hold different experts; tokens go to their experts",
        (
            Clash(
                "chunks of the sequence of fewer tokens than a microbatch has rows: workers with"
                " fewer rows call layers as often, and would have none",
                lambda plan: 0 < plan.block_tokens < plan.most_rows,
                "take longer chunks",
            ),
        ),
        parts=True,
    ),
)
