"""A worker's rows of a cut vocabulary: its passes of the embedding and of the head, and what is
exchanged between them (ends.py says in what order).

The passes run on the thread that computes, exchanges on a lane of their own. An exchange sums in
the memory of what was made for it, so that nothing is allocated beside the computing thread but a
few numbers a token. What all workers have summed is of use to one of them; the others let it go
when they come to use a later exchange, by which it has certainly ended.

T tokens of a microbatch, D hidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from outsize.errors import OutsizeError
from outsize.kernels.loss import Head, Targets
from outsize.kernels.vocabulary import (
    Agreed,
    Part,
    Scored,
    agree,
    early_gradient,
    score,
    settle,
)
from outsize.models.decoder import Decoder
from outsize.runtime.engine import Deed
from outsize.runtime.microbatches import Microbatches
from outsize.runtime.points import Points
from outsize.runtime.rows import ROWS
from outsize.schedule import Action, Kind, State
from outsize.schedule.ends import Ends
from outsize.techniques.vocabulary.divide import Grid
from outsize.techniques.vocabulary.ends import EMBED, EMBED_BACKWARD, NAME, OUTPUT_S, OUTPUT_T


@dataclass
class _Microbatch:
    """One that is under way. first, last: whether its first and its last stage are here. given: by
    what it is, the last stage's output or the gradient of the first stage's input, own or from
    another worker. going: what an exchange sums."""

    ids_T: Tensor
    learning: tuple[Targets, Part] | None  # None: tokens are asked for, not losses
    first: bool
    last: bool
    edge: GradientEdge | None = None
    given: dict[State, Tensor] = field(default_factory=dict)
    going: dict[State, Tensor] = field(default_factory=dict)
    scored: Scored | None = None
    agreed: Agreed | None = None


class Rows:
    """Those of one worker of a pipeline. model: with the rows that cut_vocabulary has left
    (divide.py). OutsizeError for a whole model."""

    def __init__(self, model: Decoder, ends: Ends) -> None:
        self.model, self.ends = model, ends
        others = model.epilogue.vocabulary
        if others is None:
            raise OutsizeError(
                f"model: whole, while pipeline.vocabulary is {ends.variant}; cut it with"
                " outsize.parallel.divide.divide before, and hand over what that gives"
            )
        self._grid = cast(Grid, others.others)
        self._line, self._across = self._grid.line, self._grid.across
        self._under_way: dict[int, _Microbatch] = {}
        self._exchanged: deque[tuple[State, int]] = deque()

    def begin(
        self, microbatch: int, ids_T: Tensor, targets: Targets, head: Head, first: bool, last: bool
    ) -> None:
        """Take a microbatch up. head: how its losses are made. first, last: whether its first and
        its last stage are here."""
        part = Part(*self.model.epilogue.head.fused(), head)
        self._under_way[microbatch] = _Microbatch(ids_T, (targets, part), first, last)

    def ask(self, microbatch: int, ids_T: Tensor, first: bool) -> None:
        """Take up tokens of requests, whose logits every worker is to have."""
        self._under_way[microbatch] = _Microbatch(ids_T, None, first, True)

    def end(self, microbatch: int) -> None:
        """Let a microbatch go."""
        del self._under_way[microbatch]

    def reset(self) -> None:
        """Forget the step."""
        self._under_way.clear()
        self._exchanged.clear()

    @property
    def received(self) -> Mapping[str, int]:
        """Bytes that exchanges have brought, by axis."""
        groups = {"pipeline": self._line, "tensor": self._across}
        return {axis: sum(group.received.values()) for axis, group in groups.items()}

    def summed(self, state: State, microbatch: int) -> int:
        """Bytes of what an exchange sums, few numbers a token aside."""
        going = self._under_way[microbatch].going.get(state)
        return 0 if going is None else going.nbytes

    # -- passes ----------------------------------------------------------------------------------

    def embed(self, microbatch: int) -> None:
        """EMBED: the rows that are here, zeros for other tokens."""
        here = self._under_way[microbatch]
        rows_TD = self.model.prologue.tokens(here.ids_T)
        if rows_TD.requires_grad:
            here.edge = get_gradient_edge(rows_TD)
        here.going[State.ACTIVATIONS] = rows_TD.detach()

    def embed_backward(self, microbatch: int) -> None:
        """EMBED_BACKWARD: the gradient of the rows, from that of the first stage's input."""
        here = self._under_way[microbatch]
        edge, here.edge = here.edge, None
        if State.GRADIENTS not in here.given:  # the first stages are frozen
            self._use(self.back, microbatch)
            return
        gradient_TD = here.given.pop(State.GRADIENTS)
        if edge is not None:  # of a table that is trained
            torch.autograd.backward([edge], [gradient_TD])

    def score(self, microbatch: int) -> None:
        """OUTPUT_S: the logits that are here, and in variant 2 their part of the gradient."""
        here = self._under_way[microbatch]
        if here.learning is None:
            h_ND = here.given[State.ACTIVATIONS]
            here.going[State.SUMS] = _logits(self.model, h_ND)
            return
        early = self.ends.back is State.SUMS and torch.is_grad_enabled()
        here.scored = score(here.given[State.ACTIVATIONS], *here.learning, early)

    def settle(self, microbatch: int) -> Tensor:
        """OUTPUT_T: gradients of the rows; gives the microbatch's loss, the same everywhere."""
        self._use(State.SUMS, microbatch)
        here = self._under_way[microbatch]
        scored, here.scored = here.scored, None
        agreed, here.agreed = here.agreed, None
        assert scored is not None and agreed is not None and here.learning is not None
        gradient_TD = settle(scored, agreed, here.learning[1])
        if gradient_TD is not None:  # summed in the precision of the logits
            here.going[State.GRADIENTS] = gradient_TD.to(scored.numbers_XT.dtype)
        del here.given[State.ACTIVATIONS]
        return agreed.loss

    def loss(self, microbatch: int) -> Tensor | None:
        """Of a microbatch that was scored and exchanged, and goes no further; tokens have none."""
        agreed = self._under_way[microbatch].agreed
        return None if agreed is None else agreed.loss

    # -- between the workers ---------------------------------------------------------------------

    def announce(self, state: State, microbatch: int) -> None:
        """An EXCHANGE has its turn now; on the computing thread."""
        self._exchanged.append((state, microbatch))

    @torch.no_grad()
    def exchange(self, state: State, microbatch: int) -> None:
        """EXCHANGE, on the lane of exchanges; all workers call it in one order."""
        here = self._under_way[microbatch]
        if state is State.SUMS and here.learning is not None:
            scored = here.scored
            assert scored is not None
            here.agreed = agree(scored, here.learning[1])
            if scored.soft_TD is not None:
                here.going[state] = early_gradient(scored, here.agreed)
        if state in here.going:
            self._line.all_reduce(here.going[state])
        if state is State.SUMS and here.learning is None and self._across.size > 1:
            self._across.all_reduce(here.going[state])  # logits of whole tokens

    def take(self, state: State, microbatch: int) -> Tensor:
        """What all workers have summed: the embedding (ACTIVATIONS), or the gradient of the last
        stage's output (GRADIENTS; SUMS in variant 2), in the dtype of the model."""
        self._use(state, microbatch)
        summed = self._under_way[microbatch].going.pop(state)
        return summed.to(self.model.prologue.tokens.weight.dtype)

    def _use(self, state: State, microbatch: int) -> None:
        """An exchange is used: those before it have ended, and what is of no use here goes."""
        while (state, microbatch) in self._exchanged:
            what, m = self._exchanged.popleft()
            here = self._under_way.get(m)
            if here is not None and not (here.first if what is State.ACTIVATIONS else here.last):
                here.going.pop(what, None)

    @property
    def back(self) -> State:
        """What brings the gradient of the last stage's output."""
        return self.ends.back

    def give(self, state: State, microbatch: int, tensor: Tensor) -> None:
        """The last stage's output (ACTIVATIONS) or the gradient of the first one's input."""
        self._under_way[microbatch].given[state] = tensor

    def given(self, state: State, microbatch: int) -> Tensor:
        """What was given, for the workers that have other rows."""
        return self._under_way[microbatch].given[state]

    def handler(self, microbatches: Microbatches, counts: bool) -> Vocabulary:
        """What carries their passes out. counts: this worker books the losses, which all have."""
        return Vocabulary(self, microbatches, counts)


class Vocabulary:
    """rows: those that are here. counts: this worker books the losses, which all have."""

    kinds = (EMBED, EMBED_BACKWARD, OUTPUT_S, OUTPUT_T, Kind.EXCHANGE)

    def __init__(self, rows: Rows, microbatches: Microbatches, counts: bool) -> None:
        self.rows, self._microbatches, self._counts = rows, microbatches, counts

    def bind(self, action: Action, index: int, points: Points) -> Deed:
        rows, m = self.rows, action.microbatch
        if action.kind is Kind.EXCHANGE:
            run = partial(self._exchange, action, points.evaluates)
            return Deed(run, partial(rows.announce, action.state, m))
        passes = {
            EMBED: self._embed, EMBED_BACKWARD: rows.embed_backward,
            OUTPUT_S: rows.score, OUTPUT_T: self._settle,
        }  # fmt: skip
        return Deed(partial(passes[action.kind], m))

    def begin(self, points: Points) -> None:
        """Nothing is there."""

    def reset(self) -> None:
        self.rows.reset()

    def _embed(self, m: int) -> None:
        self._microbatches.of(m)
        self.rows.embed(m)

    def _settle(self, m: int) -> None:
        """The rest of the head."""
        loss = self.rows.settle(m)
        if self._counts:
            self._microbatches.lose(m, loss)

    def _exchange(self, action: Action, evaluates: bool) -> None:
        m = action.microbatch
        self.rows.exchange(action.state, m)
        if evaluates and self._counts and action.state is State.SUMS:
            loss = self.rows.loss(m)
            if loss is not None:
                self._microbatches.lose(m, loss)


def _logits(model: Decoder, h_ND: Tensor) -> Tensor:
    """logits_NV with zeros for the tokens whose rows are elsewhere. By the head alone: what a
    tensor axis puts together behind it is not all that is cut."""
    epilogue = model.epilogue
    own_NV, vocabulary = epilogue.soften(epilogue.head.forward(h_ND)), epilogue.vocabulary
    assert vocabulary is not None, "rows know who has the others"
    first, last = vocabulary.span
    return torch.nn.functional.pad(own_NV, (first, vocabulary.size - last))


ROWS.add(NAME, Rows)
