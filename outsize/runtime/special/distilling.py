"""Steps of a model beside the frozen one that it was made of: see outsize/techniques/pela.py.

The teacher's prologue and blocks lie in the student's segments: they are placed, cut, sharded and
streamed as those are, have no gradients and no states, and are not saved. In a step each block of
the teacher runs where the student's does, without a graph; its features are kept with the
microbatch. Their difference from the student's is one more gradient of the stream, and what differs
most of two weights has one in a column of A and a row of B.

T tokens, D hidden, M out, N in, K rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from outsize.checkpoint.adapters import model_directory
from outsize.checkpoint.hub import CONFIG, describe, read_config
from outsize.checkpoint.shards import fingerprint
from outsize.errors import OutsizeError
from outsize.kernels.entropy import IGNORE, Targets
from outsize.kernels.linear import GradSink
from outsize.models.build import segments
from outsize.models.config import DecoderConfig
from outsize.models.cuts import Cut
from outsize.models.decoder import Decoder
from outsize.models.linear import linears
from outsize.models.low_rank import LowRank
from outsize.models.seams import Context
from outsize.parallel.divide import divide
from outsize.parallel.execution import execution_of
from outsize.plan import Plan
from outsize.runtime.flow import Flow
from outsize.runtime.handlers.training import Training
from outsize.runtime.intercept import Undo, intercept
from outsize.runtime.making import NativeModel, Trainable
from outsize.runtime.native import NativeFlow, Part
from outsize.runtime.recipe import Here, Recipe
from outsize.runtime.special.groups import shelled
from outsize.runtime.storage.states import Fill, Stateful, States
from outsize.torch_private import FakeTensor

if TYPE_CHECKING:
    from outsize.runtime.job import Job
    from outsize.runtime.method import Notes

NAME, TEACHER = "pela", "teacher"
ENTERED = -1  # of Context.taken: what the teacher's blocks begin with
COUNTS = -2  # what each token counts in the loss
DIGITS = 12  # of a fingerprint, which a checkpoint keeps as a number
Late = tuple[Tensor, Callable[[Tensor], None]]  # a weight, and what adds to its gradient


class Teaching(Protocol):
    """The technique's settings."""

    @property
    def teacher(self) -> str: ...

    @property
    def features(self) -> float: ...

    @property
    def perturbation(self) -> float: ...

    @property
    def epsilon(self) -> float: ...


class Distilling(Training):
    """Steps beside a teacher: see outsize/runtime/method.py."""

    rehearsed = False

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        assert isinstance(job.flow, TaughtFlow), "adapted makes one"
        self._taught = job.flow
        self._undo = list(job.flow.listening())

    @staticmethod
    def adapted(model: Trainable, plan: Plan, recipe: Recipe) -> tuple[Trainable, Plan]:
        if not isinstance(model, NativeModel):
            raise OutsizeError(f"{NAME}: the model is adopted; expected a native decoder")
        named = {} if model.fill else {n: p.detach() for n, p in model.model.named_parameters()}
        return Taught(model, _teacher(model.model), recipe.of(NAME), named), plan

    @staticmethod
    def freeze(flow: Flow, plan: Plan, recipe: Recipe) -> None:
        """Nothing more is frozen. OutsizeError for a teacher that is not there, or is another."""
        assert isinstance(flow, TaughtFlow), "adapted makes one"
        found = _said(flow.own)
        if (found / CONFIG).is_file():
            _check_same(found, flow.teacher.config)

    def stated(self, states: States) -> Student:
        return Student(states, self._taught.aside)

    def notes(self) -> Notes:
        return {**super().notes(), NAME: {TEACHER: _number(self._taught.own)}}

    def recall(self, notes: Mapping[str, Any]) -> None:
        super().recall(notes)
        found, own = notes.get(NAME, {}).get(TEACHER), self._taught.own
        if found not in (None, _number(own)):
            raise OutsizeError(
                f"{NAME}.teacher: {own.teacher} holds other weights than those that the run began"
                " beside; bring these back, or start a new run in another directory"
            )

    def close(self) -> None:
        super().close()
        for undo in reversed(self._undo):
            undo()


@dataclass(frozen=True)
class Taught:
    """A student, and shells of its teacher's parameters. values: of the student's, before it is
    cut, where nothing else writes them."""

    whole: NativeModel
    teacher: Decoder
    own: Teaching
    values: Mapping[str, Tensor]

    @property
    def fill(self) -> Fill:
        config, read = self.teacher.config, list[Callable[[str, Tensor], Tensor]]()

        def fill(name: str, out: Tensor) -> None:
            if not name.startswith(f"{TEACHER}."):
                if self.whole.fill is None:
                    out.copy_(self.values[name])
                else:
                    self.whole.fill(name, out)
            elif not isinstance(out, FakeTensor):  # a forecast reads no files
                if not read:
                    found = model_directory(_said(self.own))
                    _check_same(found, config)
                    read.append(describe(found, config).fill(None))
                out.copy_(read[0](name.partition(".")[2], out))

        return fill

    def part(self, plan: Plan, here: Here) -> tuple[Flow, Mapping[str, Cut]]:
        if plan.mesh.tensor > 1 and self.own.perturbation:
            raise OutsizeError(
                f"mesh: tensor is {plan.mesh.tensor}, and {NAME}.perturbation is"
                f" {self.own.perturbation:g}: the largest difference is of whole weights, which"
                " that cuts; set tensor to 1, or perturbation to 0"
            )
        made = self.whole
        cuts = dict(divide(made.model, here.world, plan, here.line))
        theirs = divide(self.teacher, here.world, plan, here.line)
        execution = replace(execution_of(plan.mesh, here.world), loss=made.loss)
        flow = TaughtFlow(made, plan, execution, self.teacher, self.own)
        named = ((f"{TEACHER}.{name}", cut) for name, cut in theirs.items())
        return flow, cuts | {name: cut for name, cut in named if name in flow.aside}


class TaughtFlow(NativeFlow):
    """A student as the runtime sees it, with whom its teacher runs in training."""

    def __init__(
        self, made: NativeModel, plan: Plan, execution: Any, teacher: Decoder, own: Teaching
    ) -> None:
        super().__init__(made.model, plan, made.options, execution)
        self.teacher, self.own = teacher, own
        named = dict(teacher.named_parameters())
        both = list(zip(self.segments, segments(teacher), strict=True))
        theirs = [tuple((f"{TEACHER}.{n}", named[n]) for n in names) for _, (_, names) in both[:-1]]
        self.aside = frozenset(name for params in theirs for name, _ in params)
        every = zip(both, (*theirs, ()), strict=True)
        self.segments = tuple((name, (*params, *more)) for ((name, params), _), more in every)
        factors = _factors(made.model)
        blocks, full = range(len(self.blocks)), dict(linears(teacher))
        self._pairs = [
            [(one, full[n]) for n, one in factors if n.startswith(f"blocks.{i}.")] for i in blocks
        ]

    def listening(self) -> Iterator[Undo]:
        """Have the teacher run where the student does; gives what ends that, for each."""
        for place, part in enumerate((self.model.prologue, *self.blocks), ENTERED):
            run = self._entering if place == ENTERED else self._learning
            yield intercept(part, run(place, part.forward))

    def _entering(self, _: int, own: Callable[[Tensor, Context], Tensor]) -> Any:
        def forward(ids_T: Tensor, ctx: Context) -> Tensor:
            if COUNTS in ctx.taken and ENTERED not in ctx.taken:
                with torch.no_grad():
                    ctx.taken[ENTERED] = self.teacher.prologue(ids_T, _still(ctx))
            return own(ids_T, ctx)

        return forward

    def _learning(self, place: int, own: Callable[[Tensor, Context], Tensor]) -> Any:
        def forward(x_TD: Tensor, ctx: Context) -> Tensor:
            y_TD = own(x_TD, ctx)
            if COUNTS not in ctx.taken:
                return y_TD
            if place not in ctx.taken:
                with torch.no_grad():
                    block = self.teacher.blocks[place]
                    ctx.taken[place] = block(ctx.taken[place - 1], _still(ctx))
            return self._compared(place, y_TD, ctx) if torch.is_grad_enabled() else y_TD

        return forward

    def _compared(self, place: int, y_TD: Tensor, ctx: Context) -> Tensor:
        """A block's output as it is, with what is added to gradients."""
        count_T = ctx.taken[COUNTS]
        late = self._drawn(place, count_T.sum()) if self.own.perturbation else []
        first, last = ctx.between(len(count_T))
        slope_T = count_T[first:last] * (2 * self.own.features / len(self.blocks) / y_TD.shape[1])
        sink = self._sink
        assert sink is not None, "a job is there"
        y: Tensor = _Compared.apply(y_TD, ctx.taken[place], slope_T, late, sink)  # type: ignore[no-untyped-call]
        return y

    @torch.no_grad()
    def _drawn(self, place: int, share: Tensor) -> list[Late]:
        """What a block's factors have of their differences from the weights. share: of the step's
        targets, those of this microbatch."""
        made = ((own, own.change() - full.matrix()) for own, full in self._pairs[place])
        each = share / sum(map(len, self._pairs))
        return [late for own, change in made for late in _towards(own, change, self.own, each)]

    def _context(self, part: Part, factor: float) -> Context:
        made = super()._context(part, factor)
        if not torch.is_grad_enabled():  # an evaluation
            return made
        dtype = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        made.taken[COUNTS] = _counts(part.targets, dtype) * factor
        return made


class _Compared(torch.autograd.Function):
    """y as it is. To its gradient slope (y - f) is added, and to weights' what `late` computes."""

    @staticmethod
    def forward(
        ctx: Any, y_TD: Tensor, f_TD: Tensor, slope_T: Tensor, late: Sequence[Late], sink: GradSink
    ) -> Tensor:
        ctx.save_for_backward(y_TD, f_TD, slope_T)
        ctx.late, ctx.sink = late, sink
        return y_TD.view_as(y_TD)

    @staticmethod
    def backward(ctx: Any, g_TD: Tensor) -> tuple[Tensor, None, None, None, None]:
        y_TD, f_TD, slope_T = ctx.saved_tensors
        for weight, compute in ctx.late:
            ctx.sink(weight, compute)
        added_TD = (y_TD - f_TD).to(slope_T.dtype) * slope_T[:, None]
        return g_TD + added_TD.to(g_TD.dtype), None, None, None, None


def _towards(own: LowRank, change_MN: Tensor, said: Teaching, share: Tensor) -> Iterator[Late]:
    """What two factors have of share * perturbation * (max |change| - epsilon)^2: the gradient of
    the product has one element, that of A one column and that of B one row."""
    flat = change_MN.flatten()
    place_1 = flat.abs().argmax(0, keepdim=True)
    m_1, n_1 = place_1 // change_MN.shape[1], place_1 % change_MN.shape[1]
    most_1 = flat.gather(0, place_1)
    slope_1 = (most_1.abs() - said.epsilon) * most_1.sign() * share
    slope_1 *= 2 * said.perturbation * own.scale
    a, b = own.a.weight, own.b.weight
    a_K1, b_1K = a.index_select(1, n_1) * slope_1, b.index_select(0, m_1) * slope_1
    yield a, partial(_added, 1, n_1, b_1K.t())
    yield b, partial(_added, 0, m_1, a_K1.t())


def _added(dim: int, place_1: Tensor, more: Tensor, grad: Tensor) -> None:
    """A row or column of a gradient has more."""
    grad.index_add_(dim, place_1, more.to(grad.dtype))


def _counts(targets: Targets, dtype: torch.dtype) -> Tensor:
    """What each token's target is times, (T,)."""
    there_T = (targets.ids_T != IGNORE).to(dtype)
    return there_T if targets.weights_T is None else there_T * targets.weights_T.to(dtype)


def _still(ctx: Context) -> Context:
    return replace(ctx, noise=None)


def _factors(model: Decoder) -> list[tuple[str, LowRank]]:
    """What Linears have in the place of weights, by name."""
    besides = ((name, one.beside) for name, one in linears(model))
    return [(name, one) for name, one in besides if isinstance(one, LowRank)]


def _teacher(student: Decoder) -> Decoder:
    """Shells of the model whose weights the student's factors stand for. OutsizeError for one that
    has none, or that does not train all of them."""
    config = student.config
    if config.weights is None or config.adapter is not None:
        raise OutsizeError(
            f"{NAME}: the model has {'an adapter' if config.adapter else 'no factors'}; expected"
            " one of low rank: outsize convert DIR --factored 2 --into STUDENT"
        )
    like = next(student.parameters())
    with torch.device("meta"):
        made = Decoder(config.weights.left(config))
    shelled(made, like.dtype, like.device)
    return made.requires_grad_(False)


def _said(own: Teaching) -> Path:
    """Where the teacher is: a model, or a run. OutsizeError where it is not said or not there."""
    found = Path(own.teacher).expanduser()
    if not own.teacher or not found.is_dir():
        raise OutsizeError(
            f"{NAME}.teacher is {own.teacher!r}; expected the directory of the model that the"
            " student was made of"
        )
    return found


def _check_same(directory: Path, config: DecoderConfig) -> None:
    """OutsizeError for a directory of another model than this one."""
    if replace(read_config(directory), source={}) != replace(config, source={}):
        raise OutsizeError(
            f"{NAME}.teacher: {directory} holds another model than the student stands for; expected"
            " the directory that it was made of"
        )


def _number(own: Teaching) -> int:
    """Of the teacher's weights, that a checkpoint can keep."""
    return int(fingerprint(model_directory(_said(own)))[:DIGITS], 16)


@dataclass(frozen=True)
class Student(Stateful):
    """States of a job of whose parameters some stay and are read anew from elsewhere."""

    own: States
    aside: frozenset[str]

    @property
    def states(self) -> States:
        return self.own

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, weight) for name, weight in self.own.weights() if name not in self.aside)

    def load(self, value: Fill | None, state: Fill) -> None:
        kept = self.own.weight_reader()

        def weight(name: str, out: Tensor) -> None:
            if value is None or name in self.aside:
                out.copy_(kept(name))
            else:
                value(name, out)

        self.own.load(None if value is None else weight, state)
