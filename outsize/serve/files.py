"""A model that generates within a memory budget: its weights stay in its files.

What fits beside keys, values and activations stays in memory from the first token on; the rest is
read again in every step, beside the computation. Logits are those of the whole model in memory, bit
for bit. On a mesh every worker does so with its part of the weights, within a budget of its own (Li
et al., "TPI-LLM", 2024), and the lists of all are proved together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import gettempdir
from typing import NamedTuple

import torch

from outsize import accelerator
from outsize.checkpoint.hub import Described
from outsize.collectives import Lone, World, along
from outsize.collectives.world import told
from outsize.decode.generate import Request
from outsize.errors import counted
from outsize.memory.sizes import format_bytes
from outsize.parallel.tensor.units import cuts_of
from outsize.plan.settings import NONE, Settings
from outsize.runtime.session import Session
from outsize.runtime.tokens.cycle import Layout, layout_of
from outsize.runtime.tokens.parts import ALL, Mine
from outsize.runtime.tokens.pooled import PooledFiles
from outsize.runtime.tokens.source import Source, outline
from outsize.schedule import Kind, prove
from outsize.schedule.layout import Placement
from outsize.schedule.programs import program_of
from outsize.schedule.schedule import Schedule
from outsize.serve.budget import Budget, Outlook, Room, outlook, over_stages
from outsize.serve.meshed import Division, placed_on, session_peers, split_on
from outsize.serve.shells import shells
from outsize.simulate.tokens import Needs, Seconds, needs, pace, probed, seconds

NEAR = 0.9  # of the pool that could be had: one as large is kept for the next request


@dataclass(frozen=True)
class Limits:
    """memory: most bytes of tensors on a device. disk: the folder where weights that rest
    transposed, by rows that are cut, or in another dtype are converted to; None: the system's for
    temporary files. sparse: weights of pruned models are kept there as bitmap images where that is
    smaller by a fifth."""

    memory: int
    disk: str | Path | None = None
    sparse: bool = False


class _Told(NamedTuple):
    """What every worker says of a request, in numbers."""

    peak: float
    token: float
    prompt: float


class InFiles:
    """The Home (outsize/serve/model.py) of a described model of whose tensors no more than a budget
    are on the device at a time.

    dtype None keeps that of the files. world: the workers that share it, who all make one, and ask
    it for the same in the same order; leave: called in the end; settings: of the plan.
    OutsizeError where the folder has not the room, and for a mesh that the model does not fit on.
    """

    what = "memory"

    def __init__(
        self,
        found: Described,
        limits: Limits,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        world: World | None = None,
        leave: Callable[[], None] | None = None,
        settings: Settings = NONE,
    ) -> None:
        dtypes, world = found.dtypes(dtype), world or Lone()
        self.world, self.mesh, self._leave = world, world.mesh, leave
        self.device, self.model = accelerator.named(device), found.model
        self._found, self._dtype, self._settings = found, dtype, settings
        self.division = Division.of(
            found.model, dtypes, self.mesh, world.rank, settings, self.device
        )
        self._turn = self.mesh.index("pipeline", world.rank)
        mine, self._cuts = ALL, cuts_of(found.model, 1, 0, False)
        if self.mesh.size > 1:
            self.model = shells(found, dtypes, self.device)
            self._cuts = split_on(self.model, world, settings)
            mine = self._mine(self._turn)
        folder = Path(limits.disk or gettempdir())
        pinned = accelerator.queues(self.device)
        self.source = Source(found, dtype, folder, limits.sparse, mine, pinned)
        self.pooled: PooledFiles | None = None
        self.session: Session | None = None
        self.outlook: Outlook | None = None
        self._request: Request | None = None
        self.held = replace(self.division.held[self._turn], stored=self.source.table.dtype)
        self.budget = Budget(limits.memory, self.held, self.source)

    @property
    def buffers(self) -> int:
        return self.source.bytes_held

    def ready(self, request: Request) -> tuple[Session, int]:
        """What plays the steps of a request, its pool filled, and how many tokens of a prompt it
        is fed at once; `outlook` says what to expect.

        OutsizeError where the budget of a worker is too small, with what is missing.
        """
        rooms = [Room(*map(int, each)) for each in told(self.world, self.budget.room(request))]
        self._refuse(rooms, request.capacity)
        found = needs(self.budget.held, request, min(room.slice for room in rooms))
        self._request = request
        return self._with(found), found.slice

    def ready_for(self, found: Needs, tokens: int) -> Session:
        """The same for any steps, of whose needs somebody else knows. tokens: of the cache."""
        room = self.budget.short(found)
        self._refuse([Room(*map(int, each)) for each in told(self.world, room)], tokens)
        self._request = None
        return self._with(found)

    @property
    def weights(self) -> int:
        """Bytes on the device for them, once it is ready."""
        assert self.outlook is not None, "it is ready"
        return self.outlook.share.weights + self.outlook.share.buffers

    def foretold(self, request: Request, length: int) -> Seconds:
        """Of a request for which it is ready, whose prompt is fed `length` tokens at once after the
        first, where nobody else asks. All workers ask."""
        assert self.outlook is not None, "it is ready"
        some = self._computing(self.outlook.layout, probed(request, length))
        own = seconds(request, length, self.outlook.computing, some, self.outlook.reading)
        said = [_Told(*each) for each in told(self.world, (self.outlook.share.peak, *own))]
        return self._of_all(said, -(-len(request.ids) // (1 + length)))

    def peak(self, request: Request) -> int:
        self.ready(request)
        assert self.outlook is not None
        return self.outlook.share.peak

    def ready_for_rows(self, rows: int, length: int) -> Session:
        """The same for the logits of all tokens of rows."""
        found, room = self.budget.room_for_rows(rows, length)
        self._refuse([Room(*map(int, each)) for each in told(self.world, room)], rows * length)
        return self._with(found)

    def __str__(self) -> str:
        return str(self.outlook)

    def timing(self) -> str:
        session, outlook, request = self.session, self.outlook, self._request
        assert session is not None and outlook is not None and request, "asked after a request"
        layout = outlook.layout
        token, prompt = self.foretold(request, outlook.share.needs.slice)
        steps = sum(map(len, session.seconds.values()))
        return (
            f"{session.timing(outlook.share.peak, prompt, token)};"
            f" {format_bytes(layout.read)} read in each of {counted(steps, 'step')}"
        )

    def close(self, faulty: bool = False) -> None:
        """Let files and memory go, and leave the other workers."""
        try:
            self._release(faulty)
            self.source.close()
        finally:
            if self._leave is not None:
                self._leave()

    def _mine(self, turn: int) -> Mine:
        """What the worker has of a stage of the pipeline that shares its other places."""
        return Mine(self._cuts, self.division.held[turn].here)

    def _refuse(self, rooms: Sequence[Room], tokens: int) -> None:
        """All workers in the words of the one that misses most."""
        worst = max(rooms, key=lambda room: room.missing)
        if worst.missing:
            raise worst.refusal(tokens)

    def _with(self, found: Needs) -> Session:
        """Over a filled pool as large as the needs allow, or nearly so; all workers make their
        pools anew where one must."""
        most, wanted = self.budget.left(found), self.budget.pool(found)
        old = None if self.pooled is None else self.pooled.layout
        anew = old is None or old.pool > most or old.capacity < NEAR * wanted
        every = told(self.world, (anew, wanted))
        if any(each[0] for each in every):
            self._release()  # before the next pool is there
            self._lay_out([int(each[1]) for each in every])
        assert self.pooled is not None and self.session is not None
        self.session.forget()
        before = self.source.bytes_read
        spent = 0.0 if self.pooled.filled else self.session.fill()
        read = self.source.bytes_read - before
        self.outlook = self._outlook(found, self.pooled, read / spent if read else None)
        return self.session

    def _lay_out(self, pools: Sequence[int]) -> None:
        """Make the pool and the lists of steps, proved with those of the others. pools: bytes of
        each worker's."""
        if self.mesh.size == 1:
            layout = layout_of(self.source, pools[0])
            lists, peers = layout.schedules.__getitem__, None
        else:
            placement = placed_on(self.world, self.division.turns, self._settings)
            layouts = self._layouts(placement, pools)
            for kind in (Kind.PREFILL, Kind.DECODE):
                prove(program_of(placement, _of_turn(layouts, kind), evaluating=True))
            layout = layouts[self._turn]
            lists = layout.schedules.__getitem__
            peers = session_peers(placement, self.world, self.device)
        self.pooled = PooledFiles(self.model, self.source, layout, self.device)
        self.session = Session(self.model, self.pooled, lists, peers)

    def _layouts(self, placement: Placement, pools: Sequence[int]) -> list[Layout]:
        """By stage of the pipeline, of the workers that share this one's other places."""
        found = list[Layout]()
        for turn, rank in enumerate(self.mesh.ranks("pipeline", self.world.rank)):
            own = turn == self._turn
            known = self.source if own else outline(self._found, self._dtype, self._mine(turn))
            there = placement.elsewhere(0, turn)
            found.append(layout_of(known, pools[rank], _steps_of(there)))
        return found

    def _release(self, faulty: bool = False) -> None:
        """Nothing of the model is a view of a pool any more."""
        if self.session is not None and not (faulty and self.mesh.size > 1):
            self.session.close()
        if self.pooled is not None:
            self.pooled.close()
        self.session = self.pooled = None

    def _outlook(self, found: Needs, pooled: PooledFiles, rate: float | None) -> Outlook:
        """rate None: the pool was full already, and rates are those found before."""
        past = self.outlook
        if rate is None and past is not None:
            made = replace(past, share=replace(past.share, needs=found))
        else:
            computing = self._computing(pooled.layout, 1)
            made = outlook(self.budget, found, pooled.layout, rate or float("inf"), computing)
        if self.mesh.size == 1:
            return made
        own = max(made.reading, made.computing)
        said = [_Told(*each) for each in told(self.world, (made.share.peak, own, own))]
        peaks = tuple(int(said[rank].peak) for rank in self.mesh.ranks("pipeline", 0))
        token, _ = self._of_all(said, 1)
        return replace(made, mesh=str(self.mesh), peaks=peaks, token=token)

    def _computing(self, layout: Layout, tokens: int) -> float:
        """Seconds that so many tokens take through what this worker has: of stages that are in the
        pools of all workers of the tensor axis, who all ask."""
        axis, filled = along(self.world, "tensor"), layout.filled
        here = torch.zeros(len(self.division.turns), dtype=torch.float64)
        here[filled] = 1.0
        common = (axis.all_reduce(here) == axis.size).nonzero().flatten().tolist()
        return pace(self.model, common, tokens).whole(self.model, self.division.stages(self._turn))

    def _of_all(self, said: Sequence[_Told], steps: int) -> Seconds:
        """By the slowest worker of each stage."""
        slowest = list[Seconds]()
        for first in self.mesh.ranks("pipeline", 0):
            here = [said[rank] for rank in self.mesh.ranks("tensor", first)]
            slowest.append(Seconds(max(x.token for x in here), max(x.prompt for x in here)))
        return over_stages(slowest, steps)


def _steps_of(placement: Placement) -> Callable[[Kind], Schedule]:
    """A worker's lists of computing and of what it says to others."""
    return lambda kind: placement.evaluation(1, kind)


def _of_turn(layouts: Sequence[Layout], kind: Kind) -> Callable[[Placement], Schedule]:
    return lambda here: layouts[here.chunks.turn].schedules[kind]
