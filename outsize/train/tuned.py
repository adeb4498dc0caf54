"""A decoder of which parts are frozen, as the planner for other hardware has it: the runtime's own
rehearsal of a sample of its blocks, with the adapter, the codes and the patterns that a run says.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from outsize.collectives.mesh import Mesh
from outsize.errors import OutsizeError
from outsize.foresight.module import Module, Played
from outsize.foresight.planning.asked import EXPERTS, TOKENS
from outsize.foresight.rows import Lines
from outsize.foresight.shape import Shape
from outsize.hardware import Cluster
from outsize.memory import ChunkTable
from outsize.models.config import DecoderConfig
from outsize.optim import AdamW
from outsize.plan import Plan, Precision
from outsize.plan.plan import per_segment
from outsize.schedule import Kind, State
from outsize.search.request import PlanRequest, facts_of_model, layouts, native_makers
from outsize.simulate.costs import ActionCost, Costs, Facts
from outsize.simulate.counter import Work
from outsize.simulate.kept import kept
from outsize.simulate.rehearse import rehearse
from outsize.simulate.sample import Sample, expand, sample

FROZEN = "beside frozen parts it is not planned yet"
IDLE = "blocks before all that are trained have no backward pass, as turns of chunks need"
NEVER = {TOKENS: FROZEN, "sequence-parallel": FROZEN, EXPERTS: FROZEN}
PASSES = (Kind.FORWARD, Kind.LOSS, Kind.RECOMPUTE, Kind.BACKWARD)  # that are rehearsed
SUMS = 2  # collectives of a block over the tensor axis in a forward pass
NOTHING = ActionCost({}, 0, Work())


@dataclass(eq=False)
class Tuned:
    """Rehearsals of a decoder, by rows and workers of a tensor axis. apart: its devices are none of
    this processor's kind, which multiplies in a way of its own."""

    config: DecoderConfig
    sequence: int
    precision: Precision
    apart: bool = True
    documents: tuple[tuple[int, ...], ...] = ()  # of a row that are rehearsed
    known: dict[int, Facts] = field(default_factory=dict)  # by workers of the tensor axis
    sizes: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # parameters, likewise

    @cached_property
    def lines(self) -> Lines:
        return Lines(self._played)

    def _request(self, rows: int, tensor: int) -> PlanRequest:
        return PlanRequest(
            rows, self.sequence, self.precision, AdamW(), mesh=Mesh(tensor=tensor),
            whole=self.config.whole_documents,
        )  # fmt: skip

    @cached_property
    def segments(self) -> int:
        return len(self.config.layers) + 2

    def facts(self, tensor: int) -> Facts:
        if tensor not in self.known:
            self.known[tensor] = facts_of_model(self.config, self._request(1, tensor))
        return self.known[tensor]

    def _played(self, rows: int, tensor: int, again: bool) -> Played:
        stages = per_segment(self.segments)
        if again:
            inner = (replace(stage, recompute=("block",)) for stage in stages[1:-1])
            stages = (stages[0], *inner, stages[-1])
        plan = Plan(
            self.segments, stages, rows, rows, self.sequence, self.precision,
            mesh=Mesh(tensor=tensor),
        )  # fmt: skip
        request = self._request(rows, tensor)
        chosen = sample(self.config, plan)
        costs = expand(self._rehearsed(chosen, request), chosen, plan, self.facts(tensor))
        last = self.segments - 1
        every = {
            (kind, segment): cost
            for (kind, state, segment), cost in costs.actions.items()
            if state is State.NONE
        }
        ahead = [every[Kind.FORWARD, i] for i in range(last)] + [every[Kind.LOSS, last]]
        more, back = (
            [every.get((kind, i), NOTHING) for i in range(last + 1)]
            for kind in (Kind.RECOMPUTE, Kind.BACKWARD)
        )
        sums = [SUMS * (0 < i < last) for i in range(last + 1)]
        return Played(ahead, more, back, sums, costs.data)

    def _rehearsed(self, chosen: Sample, request: PlanRequest) -> Costs:
        """With the costliest layout of documents; which one that is, is asked once."""
        each = self.documents or layouts(request)
        made = {bounds: self._of(chosen, request, bounds) for bounds in each}
        self.documents = (max(made, key=lambda bounds: _bytes(made[bounds])),)
        return made[self.documents[0]]

    def _of(self, chosen: Sample, request: PlanRequest, bounds: tuple[int, ...]) -> Costs:
        makers = native_makers(chosen.config, request, bounds)
        find = partial(rehearse, chosen.plan, *makers, (), request.ledger, PASSES, self.apart)
        about = chosen.config, request.rehearsed, chosen.plan, bounds, PASSES, self.apart
        return kept(Costs, about, find)

    def parameters(self, tensor: int) -> list[tuple[int, int]]:
        """As Module has them: codes and what is held in float32 are as many as their bytes are."""
        if tensor not in self.sizes:
            found = [[0, 0] for _ in range(self.segments)]
            for table in self.facts(tensor).tables:
                found[table.segment][not table.trainable] += _counted(table, self.precision)
            self.sizes[tensor] = [(own, frozen) for own, frozen in found]
        return self.sizes[tensor]


def _counted(table: ChunkTable, precision: Precision) -> int:
    if table.trainable:
        return table.numel
    stored = 4 if precision.compute == "float32" else 2
    each = 1 if table.codes else 4 if table.wide else stored
    return -(-table.numel * each // stored)


def _bytes(costs: Costs) -> int:
    return sum(sum(c.allocates.values()) + c.workspace for c in costs.actions.values())


def tuned(
    name: str, config: DecoderConfig, sequence: int, precision: str, cluster: Cluster
) -> Shape:
    """The shape of a decoder whose config says what is frozen, for the planner. precision: as
    catalogues call it. OutsizeError where it cannot be rehearsed."""
    kind = "float32" if precision == "fp32" else "bfloat16"
    own = Tuned(config, sequence, Precision.named(kind), cluster.groups[0].device.apart)
    left = dict(NEVER)
    widest = _widest(own, cluster.groups[0].node, left)
    if not own.parameters(1)[1][0]:
        left["chunks"] = IDLE
    tables = own.facts(1).tables
    passed = sequence * config.hidden * (4 if precision == "fp32" else 2)
    module = Module(
        name, len(config.layers), own.lines.played, own.parameters, own.facts(1).uses,
        [*[passed] * (own.segments - 1), 0], left,
        tensors=sum(len(table.slots) for table in tables), native=True,
        buffers=max(Counter(table.segment for table in tables).values()),
    )  # fmt: skip
    return Shape(len(config.layers), 1, widest, 1, module=module)


def _widest(own: Tuned, node: int, left: dict[str, str]) -> int:
    """The most workers of a tensor axis whose divisors can all share the blocks."""
    found = 1
    for size in range(2, node + 1):
        if node % size == 0:
            try:
                own.parameters(size)
            except OutsizeError as error:
                left.setdefault("tensor", str(error))
                break
            found = size
    return found
