"""A model that generates on the workers of a mesh: each reads its own part of the files.

The pipeline axis has runs of segments (prologue, blocks, epilogue), cut so that the worker with
most bytes has least of them; the tensor axis shares every one of them. Keys and values lie where
the blocks are. Every other parameter has its shape and no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from outsize import accelerator
from outsize.checkpoint.hub import Described
from outsize.collectives import Mesh, World, along, everyone
from outsize.decode.generate import PREFILL_TOKENS, Request
from outsize.errors import OutsizeError, counted
from outsize.memory.chunk import Dtypes
from outsize.memory.sizes import format_bytes
from outsize.models.build import segments
from outsize.models.config import DecoderConfig
from outsize.models.cuts import Cut
from outsize.models.decoder import Decoder
from outsize.parallel.tensor.beside import Prompts, beside_of, prompts_of
from outsize.parallel.tensor.decoder import split
from outsize.parallel.tensor.rewired import check_wiring
from outsize.parallel.tensor.units import check, cuts_of
from outsize.plan import Pipelined, Plan
from outsize.plan.plan import per_segment
from outsize.plan.settings import NONE, Settings
from outsize.runtime.session import Peers, Session
from outsize.runtime.stage_links import StageLinks
from outsize.runtime.watch import Watch
from outsize.schedule.chunks import Chunks
from outsize.schedule.items import Items
from outsize.schedule.kept import Kept
from outsize.schedule.layout import Placement
from outsize.schedule.place import looped, one_way
from outsize.schedule.programs import drawer, generating
from outsize.search.branch_and_bound import Cost
from outsize.search.partition import partition
from outsize.serve.prompts import Weighed, weighed
from outsize.serve.shells import TOKENS, fill, held, shells
from outsize.simulate.tokens import (
    HOST,
    Held,
    Needs,
    Pace,
    Seconds,
    Share,
    needs,
    pace,
    probed,
    seconds,
)


@dataclass(frozen=True)
class Division:
    """What the workers of a mesh hold of a model, those that share a stage of the pipeline with
    `rank` on the other axes. sizes: bytes by segment; turns: the stage that has each; held: by
    stage."""

    sizes: Sequence[int]
    turns: Sequence[int]
    held: Sequence[Held]

    @classmethod
    def of(
        cls,
        model: Decoder,
        dtypes: Mapping[str, torch.dtype],
        mesh: Mesh,
        rank: int = 0,
        settings: Settings = NONE,
        device: torch.device = HOST,
    ) -> Division:
        """OutsizeError for a mesh that the model does not fit on, and for settings of a plan that
        do not go with it. device: where each worker's tensors are."""
        check_mesh(model.config, mesh)
        check_settings(settings, mesh)
        sizes = segment_bytes(model, dtypes, mesh)
        turns = turns_of(sizes, mesh.pipeline)
        held = [
            Held(
                model.config, dtypes, mesh, one, tuple(t == turn for t in turns), device=device,
                settings=settings,
            )
            for turn, one in enumerate(mesh.ranks("pipeline", rank))
        ]  # fmt: skip
        return cls(sizes, turns, held)

    def stages(self, turn: int) -> list[int]:
        """The segments that a stage of the pipeline has."""
        return [segment for segment, one in enumerate(self.turns) if one == turn]

    @property
    def weights(self) -> list[int]:
        """Bytes by stage."""
        return [sum(self.sizes[s] for s in self.stages(turn)) for turn in range(len(self.held))]

    @property
    def slowest(self) -> float:
        """The part of a step that the stage with most weights has."""
        return max(self.weights) / sum(self.weights)

    @cached_property
    def halved(self) -> Sequence[Held]:
        """The same, where sums of prompts are taken beside what is computed."""
        return [replace(one, beside=True) for one in self.held]

    def share(self, request: Request, turn: int, beside: bool = False) -> Share:
        """What a worker of a stage will hold. beside: sums of prompts are taken beside what is
        computed."""
        held = self.halved if beside else self.held
        return Share(self.weights[turn], needs(held[turn], request, PREFILL_TOKENS))


class OnMesh:
    """The Home (outsize/serve/model.py) of a described model of which this worker of `world` reads
    and holds a part. All workers make one, and ask it for the same in the same order.

    dtype None keeps that of the files. leave: called in the end. settings: of the plan. Peak memory
    is the part and two stored tensors. OutsizeError as of `load`, and for a mesh that the model
    does not fit on.
    """

    what = "mesh"
    buffers = 0

    def __init__(
        self,
        found: Described,
        world: World,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        leave: Callable[[], None] | None = None,
        settings: Settings = NONE,
    ) -> None:
        dtypes = found.dtypes(dtype)
        self.device = accelerator.named(device)
        self.division = Division.of(
            found.model, dtypes, world.mesh, world.rank, settings, self.device
        )
        self.mesh, self.world, self._leave = world.mesh, world, leave
        self._request: Request | None = None
        self._pace: float | None = None
        self._known = dict[int, Weighed]()
        self.bytes = sum(segment_bytes(found.model, dtypes, Mesh()))
        self.model = shells(found, dtypes, self.device)
        self.prompts = prompts_of(world, found.model.config, settings)
        cuts = split_on(self.model, world, settings, self.prompts)
        self._turn = world.mesh.index("pipeline", world.rank)
        names = held(found.model, self.division.held[self._turn].here)
        fill(self.model, found, names, cuts, dtype)
        self.session = session_on(self.model, world, self.division.turns, settings)
        turns = self.division.turns
        self.session.steps.leaving = [
            segment - 1 for segment, two in enumerate(pairwise(turns)) if two[0] != two[1]
        ]

    def ready(self, request: Request) -> tuple[Session, int]:
        self._request = request
        if self._pace is None:
            self._pace = self._seconds(1)
        self.session.forget()
        gains = self.weigh(request) is not None
        self.session.steps.prompts = self.prompts if gains else None
        return self.session, PREFILL_TOKENS

    @property
    def held(self) -> Held:
        """What this worker has."""
        return self.division.held[self._turn]

    @property
    def weights(self) -> int:
        """Bytes of it."""
        return self.division.weights[self._turn]

    def ready_for(self, found: Needs, tokens: int) -> Session:
        """What plays any steps, of whose needs somebody else knows."""
        self.session.forget()
        self.session.steps.prompts = None
        return self.session

    def foretold(self, request: Request, length: int) -> Seconds:
        """Of a request whose prompt is fed `length` tokens at once after the first, where nobody
        else asks. All workers ask."""
        one, some = self._seconds(1), self._seconds(probed(request, length))
        return seconds(request, length, one, some, slowest=self.division.slowest)

    def peak(self, request: Request) -> int:
        return self._share(request, self._turn).peak

    def _share(self, request: Request, turn: int) -> Share:
        return self.division.share(request, turn, self.weigh(request) is not None)

    def weigh(self, request: Request) -> Weighed | None:
        """How long the prompt will take with its sums beside what is computed; None where they are
        taken at once. All workers ask."""
        tokens, way = min(len(request.ids), 1 + PREFILL_TOKENS), self.prompts
        if way is None or not way.fits_step(tokens):
            return None
        if tokens not in self._known:
            count = probed(request, PREFILL_TOKENS)
            with way.silent():
                computing = self._seconds(count) * tokens / count
            x_TD = self.model.prologue.tokens.weight.new_zeros(tokens, self.model.config.hidden)
            self._known[tokens] = weighed(way, self.world, x_TD, computing)
        found = self._known[tokens].times(self._steps(request))
        return found if found.gains else None

    def _steps(self, request: Request) -> float:
        """In which a prompt goes through, those beside the first as long as the slowest stage."""
        return 1 + (-(-len(request.ids) // (1 + PREFILL_TOKENS)) - 1) * self.division.slowest

    def timing(self) -> str:
        request = self._request
        assert request is not None and self._pace is not None, "asked for after a request"
        some = self._seconds(probed(request, PREFILL_TOKENS))
        token, prompt = seconds(
            request, PREFILL_TOKENS, self._pace, some, slowest=self.division.slowest
        )
        found = self.weigh(request)
        prompt = prompt if found is None else found.beside
        return self.session.timing(self.peak(request), prompt, token)

    def _seconds(self, tokens: int) -> float:
        """Of tokens in all stages, which take turns. All workers ask."""
        mine = torch.tensor(pace(self.model, self.division.stages(self._turn), tokens))
        spent, weights = along(self.world, "pipeline").all_reduce(mine.double()).tolist()
        return Pace(spent, int(weights)).whole(self.model)

    def ready_for_rows(self, rows: int, length: int) -> Session:
        return self.session

    def __str__(self) -> str:
        weights, request = self.division.weights, self._request
        each = " of each stage" if len(weights) > 1 else ""
        said = (
            f"weights {format_bytes(self.bytes)} on {self.mesh}; a worker{each} holds"
            f" {', '.join(map(format_bytes, weights))}"
        )
        if request is None:
            return said
        shares = (self._share(request, turn) for turn in range(self.mesh.pipeline))
        peaks = ", ".join(format_bytes(share.peak) for share in shares)
        said = f"{said} of weights, predicted {peaks} at most, {self._pace:.3g} s a token"
        found = self.weigh(request)
        return said if found is None else f"{said}; {found}"

    def close(self, faulty: bool = False) -> None:
        """Leave the other workers; without a fault once everything has gone to them."""
        try:
            if not faulty:
                self.session.close()
        finally:
            if self._leave is not None:
                self._leave()


def session_on(
    model: Decoder, world: World, turns: Sequence[int], settings: Settings = NONE
) -> Session:
    """The steps of one of the workers of `world`, which all make such a session of it. turns: by
    segment (prologue, blocks, epilogue) the place on the pipeline axis that has it, from the first
    to the last."""
    assert len(turns) == len(model.blocks) + 2, f"{len(turns)} turns"
    placement = placed_on(world, turns, settings)
    peers = session_peers(placement, world, next(model.parameters()).device)
    return Session(model, lists=partial(generating, placement), peers=peers)


def split_on(
    model: Decoder, world: World, settings: Settings, prompts: Prompts | None = None
) -> dict[str, Cut]:
    """Leave of a decoder this worker's part, its sums taken as a plan's settings say, or those of
    prompts as is said when they come."""
    return split(model, along(world, "tensor"), beside=beside_of(world, settings) or prompts)


def placed_on(world: World, turns: Sequence[int], settings: Settings = NONE) -> Placement:
    """Where weights lie that stay where they are and are no job's: in no chunk."""
    count, mesh = len(turns), world.mesh
    cuts = tuple(s + 1 for s, (here, after) in enumerate(pairwise(turns)) if here != after)
    pipeline = Pipelined("gpipe", cuts)  # whose stages lie one behind the other
    plan = Plan(
        count, per_segment(count), mesh.pipeline, mesh=mesh, pipeline=pipeline, settings=settings
    )
    place, turn = (mesh.index(axis, world.rank) for axis in ("data", "pipeline"))
    uses = tuple((s,) for s in range(count))
    kept = Kept(Dtypes(torch.float32, torch.float32, None, torch.float32), ())
    return Placement(Items(Chunks(plan, (), uses, kept, place, turn)))


def session_peers(placement: Placement, world: World, device: torch.device) -> Peers:
    """The other workers, as a session of one of them meets them."""
    passing: StageLinks | None = None
    if world.mesh.pipeline > 1:
        passing = StageLinks(world, placement.chunks, device, Watch().kind)
    root, everybody = drawer(placement), everyone(world, "agreement")

    def tell(numbers: Tensor) -> Tensor:
        return everybody.broadcast(numbers.cpu(), root)

    return Peers(placement.plan, world.rank == root, tell, passing)


def check_settings(settings: Settings, mesh: Mesh) -> None:
    """OutsizeError for settings that do nothing on a mesh."""
    settings.changed.check(Plan(1, per_segment(1), 1, mesh=Mesh(tensor=mesh.tensor)))


def check_mesh(config: DecoderConfig, mesh: Mesh) -> None:
    """OutsizeError for a mesh that cannot generate with a model, with the nearest that can."""
    for axis in (axis.name for axis in mesh.axes if axis.batch):
        raise OutsizeError(
            f"mesh: {axis} is {mesh[axis]}, but a prompt has nothing to split over that axis;"
            f" expected pipeline and tensor, for instance pipeline={mesh[axis]}"
        )
    most = len(config.layers) + 2
    if mesh.pipeline > most:
        raise OutsizeError(
            f"mesh: pipeline is {mesh.pipeline}, but the model has {most} segments (prologue,"
            f" {counted(most - 2, 'block')}, epilogue) and a worker needs one at least; the"
            " nearest that works"
            f" is pipeline={most}"
        )
    check(config, mesh.tensor)
    check_wiring(config, mesh.tensor, sequence_parallel=False)


def segment_bytes(model: Decoder, dtypes: Mapping[str, torch.dtype], mesh: Mesh) -> list[int]:
    """Bytes of each segment's weights on the first worker of the tensor axis. Of a pipeline both
    ends have the table of a tied head."""
    cuts = cuts_of(model, mesh.tensor, 0, sequence_parallel=False)
    sizes = {name: prod(cut.local) * dtypes[name].itemsize for name, cut in cuts.items()}
    found = [sum(sizes[name] for name in names) for _, names in segments(model)]
    if model.config.tied and mesh.pipeline > 1:
        found[-1] += sizes[TOKENS]
    return found


def turns_of(sizes: Sequence[int], workers: int) -> list[int]:
    """By segment, which of the workers of a pipeline has it: that with most bytes has least."""
    costs = [Cost(float(size)) for size in sizes]
    cuts = partition(costs, one_way(workers, looped(workers, 1), 1))
    return [sum(cut <= segment for cut in cuts) for segment in range(len(sizes))]
