"""Case: one thing to verify: a model, what it learns from, and the plan that trains it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from outsize.data import Batch
from outsize.errors import OutsizeError
from outsize.kernels.entropy import PLAIN, LossOptions
from outsize.models.adopt import find_blocks
from outsize.models.build import build, rest, shells
from outsize.models.config import DecoderConfig
from outsize.models.declared import declared_rates
from outsize.models.decoder import Decoder
from outsize.models.patterns import rate_of
from outsize.optim import Optimizer
from outsize.optim.optimizer import precision_for
from outsize.plan import Plan, Precision
from outsize.plan.approximate import PARTIAL
from outsize.runtime.job import Fill
from outsize.runtime.making import AdoptedModel, NativeModel, Trainable
from outsize.torch_private import tree_map
from outsize.train.prepared.batches import cut
from outsize.verify.naive import NativeLoss, Walk, simple, walks_of
from outsize.verify.narrow import narrow_modules
from outsize.verify.plain import Plain, Recipe, masters_of


@dataclass(frozen=True)
class Case:
    """batch: of a step, counted from 0, with all of the plan's rows. resume_at: the step before
    which the job is made anew from its saved states; 0: never. rate: the learning rate, or what
    gives that of a step; None: the optimizer's own. device: of the plan's run, by name; the plain
    run is on the CPU. factors: on the rate, by patterns of parameters."""

    subject: Subject
    plan: Plan
    optimizer: Optimizer
    batch: Callable[[int], Any]
    steps: int = 3
    clip: float | None = None
    rate: float | Callable[[int], float] | None = None
    resume_at: int = 0
    device: str = "cpu"
    factors: Mapping[str, float] = field(default_factory=dict)

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rate of each step."""
        rate = self.optimizer.lr if self.rate is None else self.rate
        return tuple(rate(i) if callable(rate) else rate for i in range(self.steps))

    @cached_property
    def recipe(self) -> Recipe:
        """How both train."""
        matrices = frozenset[str]()
        if self.optimizer.rest is not None:
            matrices = self.subject.matrices()
        factors = self.subject.factors(self.factors)
        return Recipe(self.optimizer, self.rates, self.clip, matrices, factors=factors)

    def plain(self, precision: Precision) -> Plain:
        """The plain model, its rows on the ways that the plan sends them."""
        return self.subject.plain(precision_for(self.optimizer, precision), walks_of(self.plan))

    def within(self, precision: Precision) -> Case:
        """The same in another precision, with the master copy that the optimizer needs."""
        own = precision_for(self.optimizer, precision)
        return replace(self, plan=replace(self.plan, precision=own))


def _master(precision: Precision) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, precision.master or precision.compute)
    return dtype


@dataclass(frozen=True)
class Native:
    """A decoder: in plain PyTorch, whole, and for a job under a plan, with the same first values.

    values: makes what writes the first value of each whole parameter, once for every run and
    worker; frozen: which parameters need no gradient, by name.
    """

    config: DecoderConfig
    values: Callable[[], Fill]
    options: LossOptions = PLAIN
    frozen: Callable[[str], bool] = lambda name: False

    def _shell(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Decoder:
        return self._frozen(shells(self.config, dtype, device))

    def _frozen(self, model: Decoder) -> Decoder:
        for name, parameter in model.named_parameters():
            if self.frozen(name):
                parameter.requires_grad_(False)
        return model

    @cached_property
    def _shapes(self) -> Decoder:
        """The model without any memory: what its parameters are."""
        return self._frozen(build(self.config))

    def plain(self, precision: Precision, walks: Sequence[Walk] = ()) -> Plain:
        """walks: the segments that rows go through, where some leave some out."""
        model, fill = simple(self._shell(getattr(torch, precision.compute))), self.values()

        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

        def value(name: str) -> Tensor:
            out = torch.empty(shapes[name], dtype=rest(name, _master(precision)))
            fill(name, out)
            return out

        masters = masters_of(model, precision, value)
        return Plain(model, NativeLoss(model, self.options, tuple(walks)), masters)

    def trainable(self, plan: Plan, device: torch.device | str = "cpu") -> Trainable:
        model = self._shell(_master(plan.precision), device)
        return NativeModel(model, self.options, fill=self.values())

    def rows(self, batch: Batch, start: int, stop: int) -> Batch:
        return batch.rows(start, stop)

    def matrices(self) -> frozenset[str]:
        """Names of the parameters of blocks that are matrices, or stacks of matrices."""
        named = self._shapes.named_parameters()
        return frozenset(n for n, p in named if n.startswith("blocks.") and _is_matrix(p))

    def factors(self, patterns: Mapping[str, float]) -> dict[str, float]:
        """By name, the factors on the learning rate that patterns and the modules say."""
        return _factors(self._shapes, patterns)

    def narrow(self, batch: Batch) -> tuple[str, ...]:
        """Modules that compute in fewer bits than float64, whatever they are given: none, since a
        decoder that does is at fault."""
        return ()


@dataclass(frozen=True)
class Adopted:
    """Somebody's own module; what a factory for `outsize verify` gives.

    batch: (step, rows) -> what the module's forward takes, with so many rows, the same at each
    call. loss: (output, batch) -> the sum of the losses, a scalar. count: batch -> what the sum is
    divided by. blocks: path patterns of the blocks; None finds them.
    """

    model: nn.Module
    batch: Callable[[int, int], Any]
    loss: Callable[[Any, Any], Tensor]
    count: Callable[[Any], float]
    blocks: str | tuple[str, ...] | None = None

    def named_blocks(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """The blocks of the model, or of a copy of it."""
        return find_blocks(model, self.blocks)

    def _copy(self, dtype: torch.dtype) -> nn.Module:
        return copy.deepcopy(self.model).to(dtype)

    def plain(self, precision: Precision, walks: Sequence[Walk] = ()) -> Plain:
        if walks:
            raise OutsizeError(
                f"plan: approximate holds {PARTIAL}, and {type(self.model).__name__} is an adopted"
                " module, whose own forward calls every block; verify a native decoder"
            )
        model = self._copy(getattr(torch, precision.compute))
        first = dict(self.model.named_parameters())

        def value(name: str) -> Tensor:
            return first[name].detach().to(_master(precision), copy=True)

        def loss(batch: Any) -> tuple[Tensor, float]:
            whole = _typed(batch, getattr(torch, precision.compute))
            return self.loss(_called(model, whole), whole), float(self.count(whole))

        return Plain(model, loss, masters_of(model, precision, value))

    def trainable(self, plan: Plan, device: torch.device | str = "cpu") -> Trainable:
        if plan.mesh.tensor > 1:
            raise OutsizeError(
                f"mesh: tensor is {plan.mesh.tensor}, but {type(self.model).__name__} is an adopted"
                " module, for which verify runs the data axis alone; set tensor to 1"
            )
        compute = getattr(torch, plan.precision.compute)
        model = self._copy(_master(plan.precision)).to(device)
        return AdoptedModel(
            model, self.named_blocks(model), self.loss,
            lambda batch, *rows: _typed(cut(batch, *rows), compute),
            lambda batch: torch.tensor(float(self.count(batch)), dtype=torch.float64),
        )  # fmt: skip

    def rows(self, batch: Any, start: int, stop: int) -> Any:
        return cut(batch, start, stop)

    def matrices(self) -> frozenset[str]:
        inside = tuple(f"{path}." for path, _ in self.named_blocks(self.model))
        named = self.model.named_parameters()
        return frozenset(n for n, p in named if n.startswith(inside) and _is_matrix(p))

    def factors(self, patterns: Mapping[str, float]) -> dict[str, float]:
        return _factors(self.model, patterns)

    def narrow(self, batch: Any) -> tuple[str, ...]:
        model = self._copy(torch.float64)
        whole = _typed(batch, torch.float64)
        return narrow_modules(model, lambda: _called(model, whole))


Subject = Native | Adopted  # what is trained, in both ways


def _factors(model: nn.Module, patterns: Mapping[str, float]) -> dict[str, float]:
    """Those that are not 1."""
    own = declared_rates(model)
    names = (name for name, _ in model.named_parameters())
    found = {name: own.get(name, 1.0) * rate_of(name, patterns) for name in names}
    return {name: factor for name, factor in found.items() if factor != 1}


def _is_matrix(parameter: Tensor) -> bool:
    shape = parameter.shape
    return parameter.requires_grad and len(shape) in (2, 3) and min(shape[-2:]) > 1


def _typed(batch: Any, dtype: torch.dtype) -> Any:
    """A batch whose numbers have the precision of the model."""

    def typed(item: Any) -> Any:
        own = isinstance(item, Tensor) and item.is_floating_point()
        return item.to(dtype) if own else item

    return tree_map(typed, batch)


def _called(model: nn.Module, batch: Any) -> Any:
    """The module's output: a mapping by keyword, a tuple by place, anything else alone."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)
