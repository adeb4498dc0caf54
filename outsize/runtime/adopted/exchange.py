"""What one microbatch of an adopted module has from other workers, and has for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.runtime.adopted.absent import Source
from outsize.runtime.adopted.entered import Entered

if TYPE_CHECKING:
    from outsize.runtime.adopted.walk import Share

_FEW: Mapping[int, tuple[Source, ...]] = {}


class Exchange:
    """The outputs of blocks that cross between workers. An output that something far behind needs
    is handed on by every worker on the way; its gradients come back the same way and add up."""

    def __init__(self, share: Share | None) -> None:
        self._crossing = _FEW if share is None else share.crossing
        self._left = () if share is None else share.sends
        self._values: dict[Source, Tensor] = {}
        self._dtypes: dict[Source, torch.dtype] = {}
        self._waiting: set[Source] = set()  # for the code here to come by
        self._apart: set[Source] = set()  # copied

    def keep(self, segment: int, outs: Sequence[Tensor]) -> None:
        """Hold what a block here gives, where it is sent on."""
        for source in self._wanted():
            if source.segment == segment:
                if source.number >= len(outs):
                    raise OutsizeError(
                        f"block {source.name!r} gives {len(outs)} tensors; it gave more in the"
                        " first batch, and blocks on other workers read them: give batches of one"
                        " kind"
                    )
                self._hold(source, outs[source.number])

    def _wanted(self) -> frozenset[Source]:
        return frozenset(source for stage in self._left for source in self._crossing[stage])

    def part(self) -> None:
        """The code here goes on and may change in place what it has been given: what is sent later
        is a copy."""
        for source in self._values.keys() - self._waiting - self._apart:
            self._values[source] = self._values[source].clone()
            self._apart.add(source)

    def _hold(self, source: Source, value: Tensor) -> None:
        self._values[source] = value
        self._dtypes[source] = value.dtype

    def known(self, segment: int) -> tuple[list[int], list[Tensor]]:
        """Which outputs of another worker's block have come, for the code behind it."""
        found = sorted(s for s in self._waiting if s.segment == segment)
        values = [self._values[source] for source in found]
        self._waiting.difference_update(found)
        self._let_go()
        self.part()
        return [source.number for source in found], values

    def _let_go(self) -> None:
        """Drop what has been given to the code here and is not sent any more."""
        wanted = self._wanted() | self._waiting
        self._values = {s: value for s, value in self._values.items() if s in wanted}

    def put(self, stage: int, tensors: Sequence[Tensor]) -> None:
        """Outputs come; those that are here already stay as they are."""
        for source, tensor in zip(self._crossing[stage], tensors, strict=True):
            if source not in self._dtypes:
                self._hold(source, tensor)
                self._waiting.add(source)

    def take(self, stage: int, ended: bool) -> list[Tensor]:
        """Outputs go; what no later stage here sends is let go. ended: the code here is over."""
        taken = [self._values[source] for source in self._crossing[stage]]
        self._left = tuple(s for s in self._left if s != stage)
        self._let_go()
        # A send may count as a change of what a graph has saved: `data` does not tell the graph.
        return [value.data if ended else value.clone() for value in taken]

    def _floating(self, stage: int) -> list[Source]:
        crossing = self._crossing[stage]
        return [source for source in crossing if self._dtypes[source].is_floating_point]

    def take_gradient(self, stage: int, calls: Sequence[Entered]) -> list[Tensor | None]:
        """Gradients of what came with a stage. That of an output which was here before comes back
        to it by the way that its values went."""
        sources = self._floating(stage)
        return [calls[s.segment - 1].gradients.pop(s.number, None) for s in sources]

    def put_gradient(
        self, stage: int, gradients: Sequence[Tensor | None], calls: Sequence[Entered]
    ) -> None:
        """Add the gradients of what was taken."""
        for source, gradient in zip(self._floating(stage), gradients, strict=True):
            if gradient is not None:
                calls[source.segment - 1].add(source.number, gradient)
