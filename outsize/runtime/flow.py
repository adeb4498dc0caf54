"""Flow and Walk: how a model's segments are run, one microbatch at a time.

A Flow knows a model and cuts a batch into parts; a Walk takes one part through the stages, forward
and back, as the schedule's actions ask. The runtime sees nothing else of a model, so native
decoders and adopted modules play the same schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from outsize.collectives.turns import differentiating
from outsize.runtime.again import leaf
from outsize.runtime.rows import Rows
from outsize.runtime.spill import Handle, Spill, restore
from outsize.torch_private import differentiate

SpillOf = Callable[[int], Spill | None]


def no_spill(stage: int) -> None:
    """Every activation stays."""


@dataclass(frozen=True)
class Way:
    """A microbatch's number, and its first and last stage."""

    microbatch: int
    first: int
    last: int


class Walk(Protocol):
    """One microbatch on its way. Stages are run in the order that a valid schedule has."""

    @property
    def loss(self) -> Tensor | None:
        """The scaled sum of the losses, once the last stage has run forward."""

    def forward(self, stage: int) -> None: ...

    def recompute(self, stage: int) -> None: ...

    def backward(self, stage: int) -> None: ...

    def take(self, stage: int) -> list[Tensor]:
        """What a stage has given, let go: the next one is on another worker."""

    def put(self, stage: int, tensors: list[Tensor]) -> None:
        """What a stage has given on another worker."""

    def take_gradient(self, stage: int) -> list[Tensor | None]:
        """Gradients of the floating tensors that a stage has given, of those that `put` brought:
        None where there is none. Let go."""

    def put_gradient(self, stage: int, gradients: list[Tensor | None]) -> None:
        """Gradients of the floating tensors that `take` has had of a stage."""


class Flow(Protocol):
    """A model as the runtime sees it."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def blocks(self) -> Sequence[nn.Module]: ...

    @property
    def replay(self) -> bool:
        """A second forward needs its random numbers and buffers guarded."""

    @property
    def splits(self) -> bool:
        """Whether `part` gives some rows of a batch; else a batch is one microbatch."""

    @property
    def wide(self) -> Collection[str]:
        """Names of the parameters that are held in float32 at least, whatever the plan says."""

    @property
    def aside(self) -> Collection[str]:
        """Names of the parameters that are of the training alone, and no part of the model."""

    @property
    def uses(self) -> Sequence[Sequence[int]]:
        """By segment, the segments whose parameters its computation reads: itself, and others
        where a parameter is shared."""

    @property
    def segments(self) -> Sequence[tuple[str, Sequence[tuple[str, nn.Parameter]]]]:
        """Names and named parameters of the segments, in order."""

    def attach(self, sink: Any) -> None:
        """Send weight gradients to a sink (None: back to autograd alone)."""

    def count(self, batch: Any) -> Tensor:
        """What the sum of losses is divided by, and the number of targets: (2,), float64."""

    def part(self, batch: Any, start: int, stop: int) -> Any:
        """Rows [start, stop) of a batch, where that lies; `begin` takes them on the device."""

    @property
    def rows(self) -> Rows | None:
        """The part that is here of layers which all workers of a pipeline share."""

    def begin(
        self,
        part: Any,
        factor: float,
        spill_of: SpillOf = no_spill,
        held: Collection[int] | None = None,
        way: Way | None = None,
    ) -> Walk:
        """A walk of a part whose losses are multiplied by `factor`. spill_of: by stage, what
        takes the activations that it keeps, where they leave the device. held: the stages that the
        walk will run here, where it does not run all. way: of the microbatch, for `rows`."""


class Record:
    """One stage's run of one microbatch: its input leaves and, once it ran with gradients, the
    graph of its outputs. Not the outputs themselves: those belong to who reads them, so that what
    a stage holds does not depend on what the next one does."""

    def __init__(
        self, run: Any, inputs: list[Tensor], spill: Spill | None = None, own: bool = True
    ) -> None:
        self.run, self.inputs, self.spill = run, inputs, spill
        self._own = own  # nobody else reads these input tensors: they may be emptied
        self.edges: list[GradientEdge | None] = []
        self._handles: list[Handle | None] = []

    def forward(self, keep: bool) -> list[Tensor]:
        """Run; with `keep`, hold the graph. Gives detached outputs."""
        spill = self.spill if keep else None
        with torch.set_grad_enabled(keep), nullcontext() if spill is None else spill.watching():
            outputs = self.run(self.inputs)
        if keep:
            self.edges = [get_gradient_edge(o) if o.requires_grad else None for o in outputs]
        given = [out.detach() for out in outputs]  # before: one may be an input as it came
        if self.spill is not None and self._own:
            self._handles = self.spill.hold(self.inputs)
        return given

    def again(self) -> None:
        """Run a second time, from the inputs alone, holding the graph."""
        restore(self.inputs, self._handles)
        self.spill, self._handles = None, []
        self.forward(True)

    def backward(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Differentiate; gives the inputs' gradients and lets everything go."""
        edges, self.edges = self.edges, []
        if self.spill is not None:
            self.spill.hand_over()
        pairs = [
            (edge, g)
            for edge, g in zip(edges, gradients, strict=True)
            if edge is not None and g is not None
        ]
        if pairs:
            with differentiating(pairs[0][1].device):
                differentiate(*map(list, zip(*pairs, strict=True)))
        return [i.grad for i in self.inputs]


def input_leaf(tensor: Tensor, differentiable: bool) -> Tensor:
    """A stage's input: a leaf that collects a gradient where some earlier stage can use it."""
    return leaf(tensor) if differentiable else tensor.detach()
