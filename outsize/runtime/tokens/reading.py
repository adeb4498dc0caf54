"""Generation with weights that pass through a pool: every step plays a schedule with FETCHes.

The stages of a step come in the same order for ever, so a step is a cycle: what the next one needs
first is fetched at the end of this one. Layers that the pool keeps are read once; the others are
read again in every step, while the layers before them compute (Li et al., "TPI-LLM", 2024, section
3.4: a sliding window over layers; which stay is Belady's rule, as in training).

T tokens of the step laid flat, N sequences, U different tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from outsize.errors import OutsizeError
from outsize.memory.store import pool
from outsize.models.decoder import Decoder
from outsize.models.seams import Context, Past
from outsize.runtime.engine import Deed, Engine
from outsize.runtime.handlers.tokens import Tokens
from outsize.runtime.points import Points
from outsize.runtime.tokens.cycle import Layout
from outsize.runtime.tokens.parts import TOKENS
from outsize.runtime.tokens.player import apply_stage
from outsize.runtime.tokens.source import Source
from outsize.runtime.watch import Watch
from outsize.schedule import Action, Kind
from outsize.schedule.item import Item

SAMPLED = 4  # stages whose computation is timed for the forecast


class Reading:
    """A decoder whose parameters pass through a pool; a Forward of outsize.decode.

    model: on the meta device; its parameters become views of the pool. After an error in a step the
    next one begins with an empty pool.
    """

    def __init__(
        self,
        model: Decoder,
        source: Source,
        layout: Layout,
        device: torch.device,
    ) -> None:
        self.model, self.source, self.layout, self.device = model, source, layout, device
        self.seconds: dict[Kind, list[float]] = {Kind.PREFILL: [], Kind.DECODE: []}  # of steps
        self.pool = _pool(layout.pool, device)
        self._tokens = Tokens(self._stage)
        self._engine = Engine([self._tokens, _Rooms(self.fetch)], device, Watch())
        self._lists = {
            kind: self._engine.load(each, Points(each, layout.residency.uses))
            for kind, each in layout.schedules.items()
        }
        self._present: frozenset[Item] = frozenset()
        self._rooms = {
            name.stage: self.pool[start : start + source.stages[name.stage].bytes]
            for name, (start, _) in layout.residency.rooms.items()
        }
        _bind(model, source, self._rooms, device)

    def fill(self) -> None:
        """Read what a step finds in the pool, where it is not there."""
        wanted = self.layout.schedules[Kind.DECODE].residency
        assert wanted is not None
        for name in sorted(wanted.start - self._present):
            self.source.read(name.stage, self._rooms[name.stage])
        self._present = wanted.start

    def __call__(
        self, ids_T: Tensor, positions_T: Tensor, bounds: tuple[int, ...], past: Past
    ) -> Tensor:
        """logits_NV of the last token of each sequence."""
        single = all(stop - start == 1 for start, stop in pairwise(bounds))
        context = self.model.context(positions_T, bounds, past=past)
        return self._play(Kind.DECODE if single else Kind.PREFILL, ids_T, context, last=True)

    def logits(self, ids_T: Tensor, positions_T: Tensor, bounds: tuple[int, ...]) -> Tensor:
        """logits_TV of every token, with nothing kept."""
        context = self.model.context(positions_T, bounds)
        return self._play(Kind.PREFILL, ids_T, context, last=False)

    def _play(self, kind: Kind, ids_T: Tensor, context: Context, last: bool) -> Tensor:
        begin = time.perf_counter()
        self.fill()
        present, self._present = self._present, frozenset()  # in case that the step fails
        self._tokens.ready(ids_T, context, last)
        with torch.no_grad():
            self._engine.play(self._lists[kind], begin)
        self._present = present
        self.seconds[kind].append(time.perf_counter() - begin)
        return self._tokens.taken()

    def close(self) -> None:
        """End the thread that fetches, and let the pool go."""
        self._engine.close()
        self._rooms.clear()
        del self.pool

    def _stage(self, stage: int, carry: Tensor, context: Context, last: bool) -> Tensor:
        if stage == 0:
            return self.embed(carry, context)
        return apply_stage(self.model, stage, carry, context, last)

    def compute_rate(self) -> float:
        """Bytes of weights that one token passes in a second, of stages that are in the pool."""
        positions = torch.zeros(1, dtype=torch.int64, device=self.device)
        context = self.model.context(positions, (0, 1))
        width = self.model.config.hidden
        x_TD = torch.zeros(1, width, dtype=self.source.table.target, device=self.device)
        stages = sorted({name.stage for name in self._present} - {0})[:SAMPLED]
        spent = 0.0
        with torch.no_grad():
            for stage in stages:
                spent += min(self._timed(stage, x_TD, context) for _ in range(2))
        return sum(self.source.stages[stage].bytes for stage in stages) / max(spent, 1e-9)

    def _timed(self, stage: int, x_TD: Tensor, context: Context) -> float:
        begin = time.perf_counter()
        apply_stage(self.model, stage, x_TD, context)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - begin

    def fetch(self, stage: int) -> None:
        """Read a stage's parameters into its room."""
        self.source.read(stage, self._rooms[stage])

    def embed(self, ids_T: Tensor, context: Context) -> Tensor:
        """x_TD: the prologue with no more of the token embedding than the rows that are used."""
        prologue = self.model.prologue
        ids_U, index_T = ids_T.unique(return_inverse=True)
        if len(ids_U) and not 0 <= int(ids_U[0]) <= int(ids_U[-1]) < self.source.table.rows:
            raise OutsizeError(
                f"token ids from {int(ids_U[0])} to {int(ids_U[-1])}; expected 0 to"
                f" {self.source.table.rows - 1}, the model's vocabulary"
            )
        whole = prologue.tokens.weight
        rows = self.source.rows(ids_U.tolist()).to(self.device)
        prologue.tokens.weight = nn.Parameter(rows, requires_grad=False)
        try:
            return prologue(index_T, context)  # type: ignore[no-any-return]
        finally:
            prologue.tokens.weight = whole


class _Rooms:
    """FETCH of a stage's parameters into its room, which is there for ever."""

    kinds = (Kind.FETCH,)

    def __init__(self, fetch: Callable[[int], None]) -> None:
        self._fetch = fetch

    def bind(self, action: Action, index: int, points: Points) -> Deed:
        return Deed(partial(self._fetch, action.stage))

    def begin(self, points: Points) -> None:
        """What a step finds in the pool is there."""

    def reset(self) -> None:
        """The next step begins with an empty pool."""


def _pool(nbytes: int, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return pool(nbytes)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


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
    for name, value in weights.items():
        if name != TOKENS:
            owner, _, leaf = name.rpartition(".")
            parameter = nn.Parameter(value, requires_grad=False)
            model.get_submodule(owner).register_parameter(leaf, parameter)
    if source.tied:
        model.epilogue.head.weight = nn.Parameter(weights[TOKENS], requires_grad=False)
    table = source.table
    shell = torch.empty((), dtype=table.target, device=device).expand(table.rows, table.width)
    model.prologue.tokens.weight = nn.Parameter(shell, requires_grad=False)


def unbind(model: Decoder) -> None:
    """Parameters are shapes without values again."""
    for name, value in list(model.named_parameters(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        bare = nn.Parameter(value.detach().to("meta"), requires_grad=False)
        model.get_submodule(owner).register_parameter(leaf, bare)
