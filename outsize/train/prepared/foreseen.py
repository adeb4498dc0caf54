"""A module of blocks as the planner for other hardware has it: rehearsed here on fake tensors.

The runtime's own job plays a microbatch of the module (outsize/simulate/rehearse.py), of as many
rows and workers of the tensor axis as a layout asks. Of blocks that are alike a few are rehearsed;
that they stand for the others is checked once, with all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from outsize.collectives.mesh import Mesh
from outsize.collectives.pretend import Pretend, PretendWorld
from outsize.errors import OutsizeError
from outsize.foresight.module import Module, Played
from outsize.foresight.planning.asked import EXPERTS, TOKENS
from outsize.foresight.rows import Lines
from outsize.foresight.shape import Shape
from outsize.memory import Meter
from outsize.optim import AdamW
from outsize.parallel.automatic.capture import Arguments, first_calls
from outsize.parallel.automatic.derive import Derived, derive_block, kind_of
from outsize.parallel.layouts import Sharded
from outsize.plan import Plan, Precision
from outsize.plan.file import digest_of
from outsize.plan.plan import per_segment
from outsize.runtime import AdoptedFlow, Job
from outsize.runtime.adopted.flow import arguments, reach_of
from outsize.runtime.adopted.reach import Reach
from outsize.runtime.making import AdoptedModel, make_job
from outsize.runtime.recipe import Here, Recipe
from outsize.schedule import Kind, State
from outsize.simulate.costs import ActionCost, Costs
from outsize.simulate.counter import Work
from outsize.simulate.nowhere import nowhere
from outsize.simulate.rehearse import rehearse
from outsize.torch_private import tree_map_only
from outsize.train.prepared.guessed import ROWS, Given, line_of
from outsize.train.prepared.making import twin_of
from outsize.train.prepared.module import check_derived, unpacked

T = TypeVar("T")
Blocks = Sequence[tuple[str, nn.Module]]
WHOLE = "the code of a module sees whole sequences"
# Axes that no module has whose code is not ours, and why.
NEVER = {TOKENS: WHOLE, "sequence-parallel": WHOLE, EXPERTS: "its experts are parts of blocks"}
PASSES = (Kind.FORWARD, Kind.LOSS, Kind.RECOMPUTE, Kind.BACKWARD)  # that are rehearsed
WIDEST = 16  # workers of a tensor axis, at most
WORTH = 0.7  # of the blocks: where more than that are unlike each other, all are rehearsed


@dataclass
class Rehearsal:
    """A module on the meta device, whole or with fewer blocks. stands: by block of the whole one
    that which stands for it here."""

    given: Given
    model: nn.Module
    blocks: Blocks
    stands: Sequence[int]
    precision: Precision
    cut: dict[int, dict[str, Derived]] = field(default_factory=dict)
    calls: dict[object, tuple[nn.Module, Arguments]] = field(default_factory=dict)

    @cached_property
    def lines(self) -> Lines:
        """Of the whole module."""
        return Lines(self._told)

    def _told(self, rows: int, tensor: int, again: bool) -> Played:
        with _one_line(self.model):
            return self._played(rows, tensor, again)

    def _played(self, rows: int, tensor: int, again: bool) -> Played:
        derived, last = self.derived(tensor), len(self.blocks) + 1
        costs = self._costs(rows, Mesh(tensor=tensor), again)
        groups = [len(derived[path].groups) if derived else 0 for path, _ in self.blocks]
        every = {(kind, segment): cost for (kind, _, segment), cost in costs.actions.items()}
        ahead = [every[Kind.FORWARD, i] for i in range(last)] + [every[Kind.LOSS, last]]
        passes = [
            [every.get((kind, i), NOTHING) for i in range(last + 1)]
            for kind in (Kind.RECOMPUTE, Kind.BACKWARD)
        ]
        made, more, back = (self._whole(each) for each in (ahead, *passes))
        return Played(made, more, back, self._whole([0, *groups, 0]), costs.data)

    def _costs(
        self, rows: int, mesh: Mesh, again: bool = False, reach: Reach | None = None
    ) -> Costs:
        """reach: of the code between blocks, where a pipeline cuts there."""
        stages = per_segment(len(self.blocks) + 2)
        if again:
            inner = (replace(stage, recompute=("block",)) for stage in stages[1:-1])
            stages = (stages[0], *inner, stages[-1])
        plan = Plan(len(stages), stages, rows, rows, 1, self.precision, mesh=mesh)
        derived = self.derived(mesh.tensor)
        line = Pretend(mesh.pipeline, mesh.pipeline - 1) if mesh.pipeline > 1 else None

        def job(plan: Plan, ledger: Meter) -> Job:
            twin, blocks = twin_of(self.model, self.blocks, torch.device("cpu"))
            made = AdoptedModel(twin, blocks, self.given.loss, reach=reach, derived=derived)
            world = PretendWorld(plan.mesh, plan.mesh.size - 1)
            return make_job(
                made, plan, Recipe(AdamW()), Here(world, ledger, nowhere(plan), line=line)
            )

        with unpacked(self.given.batch):
            return rehearse(plan, job, self.given.of, kinds=PASSES, apart=True)

    def _whole(self, each: Sequence[T]) -> list[T]:
        """By segment of the whole module."""
        return [each[0], *(each[place + 1] for place in self.stands), each[-1]]

    # -- the tensor axis ---------------------------------------------------------------------------

    def derived(self, tensor: int) -> dict[str, Derived]:
        """What so many workers cut of the blocks. OutsizeError where that is nothing."""
        if tensor == 1:
            return {}
        if tensor not in self.cut:
            kinds = {
                kind: derive_block(block, call, tensor)
                for kind, (block, call) in self._calls().items()
            }
            found = {path: kinds[kind_of(block)] for path, block in self.blocks}
            check_derived(self.model, found, tensor, arguments(self.given.batch, self.model)[1])
            self.cut[tensor] = found
        return self.cut[tensor]

    def _calls(self) -> dict[object, tuple[nn.Module, Arguments]]:
        """A block of each kind, and what it is called with, on the meta device."""
        from outsize.simulate.fake import FakeMode

        if not self.calls:
            firsts: dict[object, int] = {}
            for place, (_, block) in enumerate(self.blocks):
                firsts.setdefault(kind_of(block), place)
            with FakeMode(), unpacked(self.given.batch):
                twin, blocks = twin_of(self.model, self.blocks, torch.device("cpu"))
                wanted = [blocks[place][1] for place in firsts.values()]
                dtype = next(twin.parameters()).dtype
                batch = replace(self.given, dtype=dtype).of(ROWS)
                calls = first_calls(twin, wanted, *arguments(batch, twin))
            for (kind, place), call in zip(firsts.items(), calls, strict=True):
                self.calls[kind] = self.blocks[place][1], tree_map_only(Tensor, _meta, call)
        return self.calls

    # -- the pipeline axis -------------------------------------------------------------------------

    def reach(self) -> Reach:
        """OutsizeError where the module cannot be cut between its blocks."""
        own = replace(self.given, dtype=next(self.model.parameters()).dtype)
        with _one_line(self.model), unpacked(self.given.batch):
            batch = tree_map_only(Tensor, _meta, own.of(1))
            return reach_of(self.model, self.blocks, self.given.loss, batch)

    def crossing(self, reach: Reach) -> list[int]:
        """Bytes of a row that go on behind each segment."""
        with _one_line(self.model):
            costs = self._costs(1, Mesh(pipeline=2), reach=reach)
        last = len(self.blocks) + 1
        sent = [costs.actions.get((Kind.SEND, State.ACTIVATIONS, i)) for i in range(last)]
        return self._whole([*(0 if each is None else each.moves for each in sent), 0])

    def segments(self, reach: Reach | None, tensor: int) -> list[tuple[int, int]]:
        """Parameters of each segment that are trained, and frozen."""
        flow = self._flow(reach)
        found = []
        for _, named in flow.segments:
            sizes = [(self._size(name, p, tensor), p.requires_grad) for name, p in named]
            found.append((sum(n for n, own in sizes if own), sum(n for n, own in sizes if not own)))
        return self._whole(found)

    def uses(self, reach: Reach | None) -> list[tuple[int, ...]]:
        """Segments outside the blocks whose parameters each segment reads."""
        ends = {0: 0, len(self.blocks) + 1: len(self.stands) + 1}
        found = [tuple(ends[i] for i in mine if i in ends) for mine in self._flow(reach).uses]
        return self._whole(found)

    def _flow(self, reach: Reach | None) -> AdoptedFlow:
        stages = per_segment(len(self.blocks) + 2)
        plan = Plan(len(stages), stages, 1, 1, 0, self.precision)
        flow = AdoptedFlow(self.model, self.blocks, plan, self.given.loss, reach=reach)
        flow.attach(None)
        return flow

    def _size(self, name: str, parameter: nn.Parameter, tensor: int) -> int:
        for path, derived in self.derived(tensor).items():
            layout = derived.parameters.get(name.removeprefix(f"{path}."))
            if name.startswith(f"{path}.") and isinstance(layout, Sharded):
                return parameter.numel() // tensor
        return parameter.numel()


NOTHING = ActionCost({}, 0, Work())


@contextmanager
def _one_line(model: nn.Module) -> Iterator[None]:
    """What somebody's code raises, in one line."""
    try:
        yield
    except OutsizeError:
        raise
    except Exception as error:
        raise OutsizeError(
            f"{type(model).__name__} cannot be rehearsed: {line_of(error)}; expected a forward and"
            " a backward pass that depend on shapes alone"
        ) from error


def foreseen(model: nn.Module, given: Given, node: int, blocks: Blocks, precision: str) -> Shape:
    """The shape of a module for the planner. node: devices that a tensor axis may lie on. blocks:
    (path, module). OutsizeError where it cannot be rehearsed."""
    kind = "float32" if precision == "fp32" else "bfloat16"
    given = replace(given, dtype=getattr(torch, kind))
    shell, blocks = twin_of(model, blocks, torch.device("meta"))
    whole = Rehearsal(given, shell, blocks, range(len(blocks)), Precision.named(kind))
    used = _shorter(whole) or whole
    left = dict(NEVER)
    widest = _widest(used, node, left)
    reach, crossing = None, [0] * (len(blocks) + 2)
    try:
        reach = used.reach()
        crossing = used.crossing(reach)
    except OutsizeError as error:
        reach, left["pipeline"] = None, str(error)
    sizes = cache(partial(used.segments, reach))  # which hundreds of layouts ask
    module = Module(
        type(model).__name__, len(blocks), used.lines.played, sizes, used.uses(reach), crossing,
        left, given.note,
        digest_of((name, tuple(p.shape)) for name, p in model.named_parameters()),
        sum(1 for _ in model.parameters()),
    )  # fmt: skip
    return Shape(len(blocks), 1, widest, 1, module=module)


def _said(error: Exception) -> str:
    """As a user reads it."""
    return str(error) if isinstance(error, OutsizeError) else line_of(error)


def _widest(rehearsal: Rehearsal, node: int, left: dict[str, str]) -> int:
    """The most workers of a tensor axis whose divisors can all share the blocks."""
    sizes = [n for n in range(2, min(node, WIDEST) + 1) if node % n == 0]
    works = {1}
    for size in sizes:
        try:
            rehearsal.derived(size)
        except (OutsizeError, RuntimeError, TypeError, ValueError) as error:
            left.setdefault("tensor", _said(error))
        else:
            works.add(size)
    return max(n for n in works if all(d in works for d in range(1, n + 1) if n % d == 0))


def _shorter(whole: Rehearsal) -> Rehearsal | None:
    """A module with fewer blocks, whose costs are those of the whole one; None where there is
    none."""
    shell, blocks = twin_of(whole.model, whole.blocks, torch.device("meta"))
    kept, stands = _sample([kind_of(block) for _, block in blocks])
    if len(kept) > WORTH * len(blocks) or not _drop(shell, [path for path, _ in blocks], kept):
        return None
    names = {id(module): path for path, module in shell.named_modules()}
    left = [(names[id(blocks[place][1])], blocks[place][1]) for place in kept]
    short = Rehearsal(whole.given, shell, left, stands, whole.precision)
    try:
        one = short.lines.played(1, 1, False)
    except OutsizeError:
        return None
    return short if one == whole.lines.played(1, 1, False) else None


def _sample(kinds: Sequence[object]) -> tuple[list[int], list[int]]:
    """Blocks that are kept: the first and the last, and one of each kind between; by block the
    place among them of the one that stands for it."""
    last = len(kinds) - 1
    sorts = [(kind, i == 0, i == last) for i, kind in enumerate(kinds)]
    firsts: dict[object, int] = {}
    for i, sort in enumerate(sorts):
        firsts.setdefault(sort, i)
    kept = sorted(firsts.values())
    return kept, [kept.index(firsts[sort]) for sort in sorts]


def _drop(model: nn.Module, paths: Sequence[str], kept: Sequence[int]) -> bool:
    """Take the other blocks out of their lists; False where one is in none."""
    for place in reversed(range(len(paths))):
        parent, _, name = paths[place].rpartition(".")
        home = model.get_submodule(parent)
        if not isinstance(home, (nn.ModuleList, nn.Sequential)) or not name.isdigit():
            return False
        if place not in kept:
            del home[int(name)]
    return True


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
