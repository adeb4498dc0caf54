"""Weights that pass through a pool from files: every step of generation has FETCHes.

The stages of a step come in the same order for ever, so a step is a cycle: what the next one needs
first is fetched at the end of this one. Layers that the pool keeps are read once; the others are
read again in every step, while the layers before them compute (Li et al., "TPI-LLM", 2024, section
3.4: a sliding window over layers; which stay is Belady's rule, as in training).

T tokens of the step laid flat, U different tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from outsize import accelerator
from outsize.checkpoint.hub import TOKENS
from outsize.errors import OutsizeError
from outsize.models.decoder import Decoder
from outsize.models.linear import Embedding, rows
from outsize.runtime.storage.weight_pool import pool_on
from outsize.runtime.tokens.cycle import Layout
from outsize.runtime.tokens.source import Source
from outsize.schedule.item import Item


class PooledFiles:
    """The Weights (outsize/runtime/weights.py) of a decoder whose parameters become views of a
    pool. filled: by a list of FETCHes, which is played first and after an error in a step.

    model: on the meta device; `close` makes it so again.
    """

    def __init__(
        self, model: Decoder, source: Source, layout: Layout, device: torch.device
    ) -> None:
        self.model, self.source, self.layout, self.device = model, source, layout, device
        self.pool = pool_on(layout.pool, device)
        self.filled = False
        self._rooms = {
            name.stage: self.pool[start : start + source.stages[name.stage].bytes]
            for name, (start, _) in layout.residency.rooms.items()
        }
        _bind(model, source, self._rooms, device)
        model.prologue.tokens.lookup, model.prologue.tokens.on_host = self._look_up, True

    def fetch(self, name: Item) -> None:
        self.source.read(name.stage, self._rooms[name.stage])

    def gather(self, name: Item) -> None:
        raise AssertionError("one worker reads all of the files")

    def ensure(self, start: frozenset[Item]) -> None:
        assert self.filled or not start, "the list that fills the pool comes first"
        self.filled = True

    def forget(self) -> None:
        self.filled = False

    def close(self) -> None:
        """Let the pool go: parameters are shapes without values again."""
        self._rooms.clear()
        del self.pool
        tokens = self.model.prologue.tokens
        tokens.lookup, tokens.on_host = rows, False
        for name, value in list(self.model.named_parameters(remove_duplicate=False)):
            _set(self.model, name, value.detach().to("meta"))

    def _look_up(self, table: Embedding, ids_T: Tensor) -> Tensor:
        """x_TD of the token embedding, with no more of it than the rows that are used; zeros for
        the tokens that other workers look up."""
        ids_T, (first, last) = ids_T.cpu(), self.source.table.span
        whole = last - first == self.source.table.rows
        if len(ids_T) and not 0 <= int(ids_T.min()) <= int(ids_T.max()) < self.source.table.rows:
            raise OutsizeError(
                f"token ids from {int(ids_T.min())} to {int(ids_T.max())}; expected 0 to"
                f" {self.source.table.rows - 1}, the model's vocabulary"
            )
        other_T = (ids_T < first) | (ids_T >= last)
        ids_U, index_T = ids_T.masked_fill(other_T, first).unique(return_inverse=True)
        rows_UD = accelerator.sent(self.source.rows(ids_U.tolist()), self.device)
        x_TD = nn.functional.embedding(accelerator.sent(index_T, self.device), rows_UD)
        if not whole:
            x_TD.masked_fill_(accelerator.sent(other_T, self.device).unsqueeze(-1), 0.0)
        return x_TD


def _bind(
    model: Decoder,
    source: Source,
    rooms: Mapping[int, Tensor],
    device: torch.device,
) -> None:
    """Parameters become views of their rooms. The token embedding, whose rows are looked up, gets a
    shell with its shape, dtype and device, and one element."""
    weights = dict[str, Tensor]()
    for number, stage in enumerate(source.stages):
        weights |= {part.name: part.of(rooms[number]) for part in stage.parts}
    if source.tied and TOKENS in weights:
        weights["epilogue.head.weight"] = weights.pop(TOKENS)
    table = source.table
    rows_here = table.span[1] - table.span[0]
    shell = torch.empty((), dtype=table.target, device=device).expand(rows_here, table.width)
    for name, value in (weights | {TOKENS: shell}).items():
        _set(model, name, value)


def _set(model: Decoder, name: str, value: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner).register_parameter(leaf, nn.Parameter(value, requires_grad=False))
