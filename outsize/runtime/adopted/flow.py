"""The flow of an adopted module: its own forward, entered and left at the blocks.

The module's forward runs as a coroutine (a greenlet). When it calls a block it gives the call over
and sleeps; the runtime runs the block when the schedule says so and hands the outputs back. What
the module computes between blocks ("glue") stays in its own code, of any shape: masks, skip
connections, an encoder's output that every decoder block reads.

On a pipeline every worker runs the glue from the batch, as far as its own blocks need it. Blocks of
other workers give absent values (outsize/runtime/adopted/absent.py), except for those outputs that
something later still needs (outsize/runtime/adopted/reach.py): they come from the worker before,
and their gradients go back to it. Random numbers that glue draws are each worker's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from outsize.errors import OutsizeError
from outsize.parallel.execution import check_adopted
from outsize.plan import DEVICE, Plan, Precision, Rest
from outsize.plan.plan import per_segment
from outsize.runtime.adopted.absent import Place, Source, absent_like, instead, parameters_instead
from outsize.runtime.adopted.aside import Around, called_late, through_blocks
from outsize.runtime.adopted.reach import DRAW, Outlines, Reach, Tracer, find_reach
from outsize.runtime.adopted.walk import AdoptedWalk, Share
from outsize.runtime.casts import Casts
from outsize.runtime.flow import SpillOf, Way, no_spill
from outsize.runtime.intercept import intercept
from outsize.runtime.runners import runner_of
from outsize.runtime.storage.gradients import Gradients
from outsize.torch_private import tree_leaves, within


def _scalar(loss: Any) -> Tensor:
    """A loss that can be differentiated. OutsizeError for anything else."""
    said = f"a {type(loss).__name__}"
    if isinstance(loss, Tensor):
        if not loss.ndim and loss.is_floating_point():
            return loss
        said = f"a tensor of {loss.dtype} of shape {tuple(loss.shape)}"
    raise OutsizeError(
        f"loss is {said}; expected a scalar tensor of floats: pass loss=function(output, batch)"
    )


Segments = list[tuple[str, list[tuple[str, nn.Parameter]]]]


class AdoptedFlow:
    """Any module made of a sequence of blocks, as the runtime sees it.

    blocks: (path, module) in the order in which they are called. loss: from the module's output and
    the batch, the sum of the losses and what to divide it by; None: the output is the loss itself.
    reach: what the code between the blocks reads (`reach_of`). With it, parameters outside the
    blocks are where they are read; without it, all of them are needed wherever a block is.
    """

    replay = True
    wide: frozenset[str] = frozenset()
    aside: frozenset[str] = frozenset()
    rows = None

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[tuple[str, nn.Module]],
        plan: Plan,
        loss: Callable[[Any, Any], Tensor],
        split: Callable[[Any, int, int], Any] | None = None,
        counter: Callable[[Any], Tensor] | None = None,
        reach: Reach | None = None,
    ) -> None:
        check_adopted(plan.mesh, type(model).__name__)
        for one, value in plan.settings.every():
            if one.native:
                raise OutsizeError(
                    f"plan: {one.name} is {value}, but {type(model).__name__} is an adopted module,"
                    f" {one.native}: set it to 0, or load the model as a native decoder"
                )
        if plan.pipeline.ends is not None:
            name, variant = plan.pipeline.ends
            raise OutsizeError(
                f"plan: pipeline.{name} is {variant}, but"
                f" {type(model).__name__} is an adopted module, whose embedding and head stay"
                " whole, since its own code makes the loss of all logits: set it to 0, or load the"
                " model as a native decoder"
            )
        self.model, self.plan, self.runner = model, plan, runner_of(plan)
        self.paths = [path for path, _ in blocks]
        self.blocks = [block for _, block in blocks]
        self.outlines = Outlines(blocks)
        self._loss, self._split, self._counter = loss, split, counter
        self.splits = split is not None
        self._current: AdoptedWalk | Tracer | None = None
        self._reach = reach
        self._shares: dict[frozenset[int], Share] = {}
        self.looking = True  # at what the code around the blocks differentiates
        self._going_back: int | None = None  # the segment that is differentiated
        self._entered = [
            intercept(block, self._entry(index, block.forward))
            for index, block in enumerate(self.blocks)
        ]
        self.segments = _segments(model, blocks, self._reach)
        self.uses = _uses(self.blocks, self.segments, self._reach)
        self._below = any(stage.rest != Rest() for stage in plan.stages)
        self._away = self._elsewhere()

    def _entry(self, index: int, plain: Callable[..., Any]) -> Callable[..., Any]:
        """A forward that gives the call over to the walk that is under way, if any."""
        import greenlet  # here, since a machine without it still runs decoders

        def forward(*args: Any, **kwargs: Any) -> Any:
            walk = self._current
            if walk is None or greenlet.getcurrent() is not walk.glue:
                late = self._going_back not in (None, index + 1)
                if late and (self._below or self._reach is not None or self.plan.mesh.size > 1):
                    raise called_late(self.paths[index])
                return plain(*args, **kwargs)
            self._current = None  # what a block does inside is its own matter
            try:
                return walk.enter(index, plain, args, kwargs)
            finally:
                self._current = walk

        return forward

    def attach(self, sink: Gradients | None) -> None:
        """Weights of adopted modules reach the buffers through autograd alone."""
        if sink is None:
            for undo in self._entered:
                undo()

    def count(self, batch: Any) -> Tensor:
        if self._counter is None:
            return torch.ones(2, dtype=torch.float64)
        return self._counter(batch).double().expand(2)

    def part(self, batch: Any, start: int, stop: int) -> Any:
        return batch if self._split is None else self._split(batch, start, stop)

    def begin(
        self,
        part: Any,
        factor: float,
        spill_of: SpillOf = no_spill,
        held: Collection[int] | None = None,
        way: Way | None = None,
    ) -> AdoptedWalk:
        """held: the stages that are run here, where other workers run the others."""
        share = None
        if any(isinstance(one, Tensor) and one.requires_grad for one in tree_leaves(part)):
            self.looking = True
        if held is not None and len(held) < len(self.plan.stages):
            share = self._share(frozenset(held), part)
        return AdoptedWalk(self, lambda: _scalar(self._whole(part)) * factor, spill_of, share)

    def _whole(self, part: Any) -> Tensor:
        args, kwargs = arguments(part, self.model)
        return self._loss(self.model(*args, **kwargs), part)

    def run_glue(
        self, walk: AdoptedWalk, switch: Callable[[], Any], places: Sequence[Place]
    ) -> Any:
        """Let the module's code run until it calls a block or ends. places: what stands where
        parameters are meanwhile."""
        before, self._current = self._current, walk
        grad, casts = torch.is_grad_enabled(), Casts()
        try:
            with instead(places), through_blocks(), self._watched(walk):
                return switch()
        finally:
            torch.set_grad_enabled(grad)
            casts.enter()
            self._current = before

    def _watched(self, walk: AdoptedWalk) -> AbstractContextManager[object]:
        """What looks at each operation of the code around the blocks: until one walk has come to
        its backward pass, and always where it could read what is elsewhere."""
        if self._away or (self.looking and self.blocks):
            return Around(self._away, lambda: walk.called)
        return nullcontext()

    @contextmanager
    def going_back(self, segment: int) -> Iterator[None]:
        """While a segment, and code before it, is differentiated."""
        before, self._going_back = self._going_back, segment
        try:
            yield
        finally:
            self._going_back = before

    def _elsewhere(self) -> Mapping[int, str]:
        """Parameters of blocks that are on the device with their block alone, where it is not
        known which of them the code around the blocks reads."""
        if self._reach is not None:
            return {}
        below = {
            i
            for stage in self.plan.stages
            if (stage.rest.parameters, stage.rest.gradients) != (DEVICE, DEVICE)
            for i in range(max(1, stage.first), min(stage.last, len(self.blocks) + 1))
        }
        return {id(p): name for i in below for name, p in self.segments[i][1]}

    # -- one worker of a pipeline ----------------------------------------------------------------

    def reach(self, part: Any) -> Reach:
        """What the code between the blocks reads, found with the first batch."""
        if self._reach is None:

            def run(tracer: Tracer) -> Any:
                self._current = tracer
                try:
                    return self._whole(part)
                finally:
                    self._current = None

            blocks = list(zip(self.paths, self.blocks, strict=True))
            self._reach = find_reach(self.model, blocks, self.outlines, run)
        return self._reach

    def crossing(self, stage: int) -> tuple[Source, ...]:
        """What is needed behind a stage; once it is known what the code between blocks reads."""
        assert self._reach is not None
        return self._reach.crossing(self.plan.stages[stage].last - 1)

    def _share(self, held: frozenset[int], part: Any) -> Share:
        if held not in self._shares:
            reach, stages = self.reach(part), self.plan.stages
            segments = frozenset(i for s in held for i in range(stages[s].first, stages[s].last))
            self._refuse_draws(reach, segments)
            crossing = {s: self.crossing(s) for s in range(len(stages) - 1)}
            sends = tuple(s for s in crossing if s in held and s + 1 not in held)
            self._shares[held] = Share(segments, crossing, sends, self._standing(segments))
        return self._shares[held]

    def _refuse_draws(self, reach: Reach, segments: frozenset[int]) -> None:
        draws = {s for sources in reach.inputs for s in sources if s.segment == DRAW}
        for draw in sorted(draws):
            users = reach.users(draw)
            if segments.intersection(users) and not segments.issuperset(users):
                names = [*self.paths, "the loss"]
                first, last = names[users[0] - 1], names[users[-1] - 1]
                raise OutsizeError(
                    f"{draw} are used by {first} and by {last}, on different workers of the"
                    " pipeline, of which each would draw its own; set dropout to 0, or put all"
                    " workers on the data axis"
                )

    def _standing(self, segments: frozenset[int]) -> tuple[Place, ...]:
        """Stand-ins for the parameters that nothing here reads."""
        near = {u for i in segments for u in self.uses[i]}
        far = {
            id(p): absent_like(p, [Source(0, 0, name)])
            for i, (_, named) in enumerate(self.segments)
            for name, p in named
            if i not in near
        }
        return tuple(parameters_instead(self.model, lambda p: far.get(id(p))))


def reach_of(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    loss: Callable[[Any, Any], Tensor],
    part: Any,
) -> Reach:
    """What the code between the blocks reads, for a batch of the kind that steps will have. The
    module runs on shapes alone: nothing of it changes, no random number is used up."""
    segments = len(blocks) + 2
    plan = Plan(segments, per_segment(segments), 1, 1, 0, Precision.named("float32"))
    flow = AdoptedFlow(model, blocks, plan, loss)
    try:
        return flow.reach(part)
    finally:
        flow.attach(None)


def arguments(batch: Any, model: nn.Module) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """A batch as call arguments: a mapping by keyword, a tuple by place, anything else alone. The
    last of a tuple is for the loss where the model's forward takes all others but not that one."""
    if isinstance(batch, Mapping):
        return (), {str(key): value for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        given = tuple(batch)
        takes = inspect.signature(within(model).forward)
        less = len(given) > 1 and not _binds(takes, given) and _binds(takes, given[:-1])
        return (given[:-1] if less else given), {}
    return (batch,), {}


def _binds(takes: inspect.Signature, given: tuple[Any, ...]) -> bool:
    try:
        takes.bind(*given)
    except TypeError:
        return False
    return True


def _segments(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], reach: Reach | None
) -> Segments:
    """Whatever belongs to no block, one segment a block, epilogue: what the loss alone reads, where
    that is known."""
    named = list(model.named_parameters())
    of_block = [
        (path, [(n, p) for n, p in named if n.startswith(path + ".")]) for path, _ in blocks
    ]
    inside = {name for _, parameters in of_block for name, _ in parameters}
    end = set() if reach is None else _read_last(reach)
    outside = [(n, p) for n, p in named if n not in inside]
    return [
        ("outside the blocks", [(n, p) for n, p in outside if n not in end]),
        *of_block,
        ("epilogue", [(n, p) for n, p in outside if n in end]),
    ]


def _read_last(reach: Reach) -> frozenset[str]:
    """Names of parameters that only the last segment reads."""
    last = len(reach.read) - 1
    earlier = (reach.parameters(i) for i in range(last))
    return reach.parameters(last) - frozenset[str]().union(*earlier)


def _uses(
    blocks: Sequence[nn.Module], segments: Segments, reach: Reach | None
) -> tuple[tuple[int, ...], ...]:
    """By segment: itself, owners of what its block shares with others, and of what the code before
    it reads: whatever is outside the blocks, where more is not known."""
    owner = {id(p): i for i, (_, named) in enumerate(segments) for _, p in named}
    names = {name: i for i, (_, named) in enumerate(segments) for name, _ in named}
    last = len(blocks) + 1
    found: list[tuple[int, ...]] = []
    for i in range(last + 1):
        mine = blocks[i - 1].parameters() if 0 < i < last else ()
        others = {owner[id(p)] for p in mine}
        if reach is None:
            others.add(0)
        else:  # the code before the first block runs in the prologue's turn
            around = reach.read[1] if i == 0 else reach.parameters(i)
            others |= {names[name] for name in around}
        found.append((i, *sorted(others - {i})))
    return tuple(found)
