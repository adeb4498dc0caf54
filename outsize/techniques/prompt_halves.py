"""Halves of a prompt in turns: while one half computes, the sums of the other half run.

Xiao and Su, "ISO: Overlap of Computation and Communication within Seqenence For LLM Inference",
2024. On a tensor axis each half goes through a branch and gives its summand to a courier
(outsize/collectives/courier.py); the other half's branch runs meanwhile. The second half attends
to the keys of the first: in every layer the first one's attention comes before the second one's.
The sum of a layer's last branch runs beside the first branch of the next layer, where weights stay.

Exact: every element is summed over the workers as without halves. Taken in generation where the
prompt would take less time, as foretold (outsize/serve/prompts.py).

T tokens of a step, D hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outsize import accelerator
from outsize.collectives import Collective, World, along
from outsize.collectives.courier import Courier, Flight
from outsize.models.decoder import Block
from outsize.models.linear import Linear
from outsize.models.seams import Context, Past
from outsize.models.wiring import AnyBlock
from outsize.parallel.sums import Crossing, cross
from outsize.parallel.tensor.beside import PROMPTS
from outsize.parallel.tensor.overlap_products import all_reduce

NAME = "prompt_halves"
LEAST = 64  # tokens of a half: a smaller product costs more than its sum hides
ROUNDS = 2  # of sums that are timed


@dataclass
class Summand:
    """What a branch of a half gave, whose sum is under way. biases: of its row weights."""

    y_TD: Tensor
    flight: Flight
    biases: tuple[Tensor, ...]

    def land(self) -> None:
        self.flight.wait()
        for bias_D in self.biases:
            self.y_TD += bias_D


@dataclass
class Half:
    """A stretch of a step's tokens. steps: of the block that it is in; away: its summands that
    have not landed."""

    context: Context
    first: int
    last: int
    steps: Generator[int, None, Tensor] | None = None
    away: list[Summand] = field(default_factory=list)

    def land(self) -> None:
        for one in self.away:
            one.land()
        self.away.clear()

    def ended(self) -> Tensor:
        """What the block gives that it is in."""
        self.land()
        assert self.steps is not None, "in a block"
        steps, self.steps = self.steps, None
        try:
            next(steps)
        except StopIteration as end:
            y_TD: Tensor = end.value
            return y_TD
        raise AssertionError("a block stops as often as it says")


class Halves:
    """Of the tensor axis. axis: a collective of the workers that nobody but the courier calls.
    What is computed in one half is `current`; None: sums are taken at once."""

    meaning = "prompts in halves, the sums of one beside the other"

    def __init__(self, axis: Collective) -> None:
        self.axis, self.courier = axis, Courier()
        self.current: Half | None = None
        self.branches = 0
        self._silent = False

    # -- as a Beside ------------------------------------------------------------------------------

    def send(self, work: Callable[[], None], device: torch.device) -> Flight:
        return self.courier.send(work, device)

    def fits(self, branch: nn.Module) -> bool:
        """A branch of a block, whatever it is made of."""
        return True

    def take_over(
        self, branch: nn.Module, entering: Crossing, leaving: Crossing, axis: Collective
    ) -> None:
        rows = [
            row
            for row in branch.children()
            if isinstance(row, Linear) and row.use == "row" and row.bias is not None
        ]
        for row in rows:
            row.adds_bias = False
        self.branches += 1

        def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (cross(args[0], entering, axis), *args[1:])

        def leave(_: nn.Module, args: tuple[Any, ...], y_TD: Tensor) -> Tensor:
            biases = tuple(row.bias for row in rows if row.bias is not None)
            if self._silent:
                return y_TD
            if self.current is None:
                y_TD = cross(y_TD, leaving, axis)
                for bias_D in biases:
                    y_TD = y_TD + bias_D
                return y_TD
            y_TD = y_TD.contiguous()
            flight = self.send(partial(all_reduce, self.axis, y_TD), y_TD.device)
            self.current.away.append(Summand(y_TD, flight, biases))
            return y_TD

        branch.register_forward_pre_hook(enter)
        branch.register_forward_hook(leave)

    # -- as Prompts -------------------------------------------------------------------------------

    def fits_step(self, tokens: int) -> bool:
        return tokens >= 2 * LEAST

    def through(self, context: Context, past: Past, leaving: Collection[int]) -> InHalves:
        return InHalves(self, context, past, leaving)

    @contextmanager
    def silent(self) -> Iterator[None]:
        self._silent = True
        try:
            yield
        finally:
            self._silent = False

    def summed(self, x_TD: Tensor) -> tuple[float, float]:
        """By the time of half of one and of its first token."""
        half, token = (self._seconds(x_TD[:count].clone()) for count in (len(x_TD) // 2, 1))
        return self.branches * (2 * half - token), self.branches * 2 * half

    def _seconds(self, y_TD: Tensor) -> float:
        """Of a sum, by the courier."""
        spent = list[float]()
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            self.send(partial(all_reduce, self.axis, y_TD), y_TD.device).wait()
            accelerator.settle(y_TD.device)
            spent.append(time.perf_counter() - begin)
        return min(spent)


class InHalves:
    """One step's way through the blocks."""

    def __init__(self, way: Halves, context: Context, past: Past, leaving: Collection[int]) -> None:
        count = len(context.positions_T)
        middle = count // 2
        spans, parts = ((0, middle), (middle, count)), past.cut(middle)
        self._halves = [
            Half(context.at(first, last, part, part), first, last)
            for (first, last), part in zip(spans, parts, strict=True)
        ]
        self._way, self._leaving = way, leaving

    def block(self, block: AnyBlock, x_TD: Tensor) -> Tensor:
        """Without a token where it may be on its way."""
        assert isinstance(block, Block), "a model that is wired as others are"
        left = 0
        for half in self._halves:
            mine_TD = x_TD[half.first : half.last] if half.steps is None else half.ended()
            half.steps = block.branches(mine_TD, half.context)
            del mine_TD
            left = self._go_on(half)
        for _ in range(left):
            for half in self._halves:
                self._go_on(half)
        if block.layer in self._leaving:
            return self.land(x_TD)
        return x_TD.new_empty((0, x_TD.shape[1]))

    def land(self, x_TD: Tensor) -> Tensor:
        under_way = all(half.steps is not None for half in self._halves)
        return torch.cat([half.ended() for half in self._halves]) if under_way else x_TD

    def _go_on(self, half: Half) -> int:
        """To the next stop; gives how many are left."""
        half.land()
        assert half.steps is not None, "in a block"
        self._way.current = half
        try:
            return next(half.steps)
        finally:
            self._way.current = None


def of_world(world: World) -> Halves:
    """Of the tensor axis."""
    return Halves(along(world, "tensor", "beside"))


PROMPTS.add(NAME, of_world)
