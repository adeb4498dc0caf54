"""SAMPLE: the next tokens, drawn where the logits are and told to every worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from outsize.decode.generate import Draw
from outsize.decode.samplers import Drawn, drawn
from outsize.runtime.engine import Deed
from outsize.runtime.points import Points
from outsize.schedule import Action, Kind

Logits = Callable[[int], Tensor | None]  # of a microbatch, where its last stage is here


def untold(numbers: Tensor) -> Tensor:
    """There is one worker."""
    return numbers


class Sample:
    """logits: logits_NV of the step. draws: whether this worker does. tell: gives what that worker
    has, on every one. given: logits that were asked for."""

    kinds = (Kind.SAMPLE,)

    def __init__(
        self, logits: Logits, draws: bool = True, tell: Callable[[Tensor], Tensor] = untold
    ) -> None:
        self._logits, self._here, self.tell = logits, draws, tell
        self._drawn = list[Drawn]()
        self._draws: Callable[[int], Sequence[Draw]] = lambda m: ()
        self._take: Callable[[int, list[Drawn]], None] = self._book
        self._form: Tensor | None = None
        self.given: Tensor | None = None

    def ready(self, draws: Sequence[Draw], form: Tensor | None = None) -> None:
        """Set out on a step: what it is to draw, the same on every worker. form: the logits
        themselves are asked for, which look like this, on meta."""
        self._draws, self._take, self._form = lambda m: draws, self._book, form

    def ready_by(
        self, draws: Callable[[int], Sequence[Draw]], take: Callable[[int, list[Drawn]], None]
    ) -> None:
        """The same of several microbatches, each asked about when it is there."""
        self._draws, self._take, self._form = draws, take, None

    def taken(self) -> list[Drawn]:
        """What the step has drawn."""
        taken, self._drawn = self._drawn, []
        return taken

    def _book(self, m: int, drawn: list[Drawn]) -> None:
        self._drawn += drawn

    def bind(self, action: Action, index: int, points: Points) -> Deed:
        return Deed(partial(self._run, action.microbatch))

    def begin(self, points: Points) -> None:
        """The draws are there."""

    def reset(self) -> None:
        self._drawn = []

    def _run(self, m: int) -> None:
        logits_NV, draws = self._logits(m), self._draws(m)
        if self._form is not None:
            made = logits_NV if self._here else torch.empty_like(self._form, device="cpu")
            assert made is not None, "who draws has the last stage"
            self.given = self.tell(made)
        if not draws:
            return
        mine = [(0, 0.0)] * len(draws)
        if self._here:
            assert logits_NV is not None, "who draws has the last stage"
            here_NV = logits_NV.cpu()  # the one wait of a step
            mine = [drawn(here_NV[d.row], d.sampler, d.number, d.scored) for d in draws]
        told = self.tell(torch.tensor(mine, dtype=torch.float64))  # ids are exact in it
        self._take(m, [Drawn(int(token), logprob) for token, logprob in told.tolist()])
