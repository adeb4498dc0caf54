"""The groups of local learning: runs of a decoder's blocks, each with a loss of its own.

Between two groups there is an auxiliary network with a norm and a head of its own. It is one more
segment, which gives a loss in training and hands on what it is given (outsize/runtime/native.py).

The auxiliary network of "momentum" adds what two copies of the next group's first block make of the
group's output: one follows that block as a moving average, the other learns (Su et al., "Momentum
Auxiliary Network for Supervised Local Learning", 2024, where the second is called learnable bias).

T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from outsize.errors import OutsizeError, counted
from outsize.models.cuts import Cut
from outsize.models.decoder import Block, Decoder, Epilogue
from outsize.models.seams import Context
from outsize.parallel.divide import divide
from outsize.parallel.execution import execution_of
from outsize.plan import Plan, Stage
from outsize.runtime.flow import Flow
from outsize.runtime.making import NativeModel, Trainable
from outsize.runtime.native import AUXILIARY, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.runtime.storage.states import Fill

LEARNED, AVERAGE = "learned", "average"
BRANCHES = {"head": (), "block": (LEARNED,), "momentum": (LEARNED, AVERAGE)}


def firsts(plan: Plan, blocks: int) -> list[int]:
    """The first block of each group but the first: runs of equal length, the first ones longer
    where they do not divide."""
    count = plan.local.groups
    if blocks < count:
        raise OutsizeError(
            f"plan: local.groups is {count}, but the model has {counted(blocks, 'block')};"
            f" expected at most {blocks}"
        )
    each, more = divmod(blocks, count)
    return [i * each + min(i, more) for i in range(1, count)]


def plan_with(plan: Plan, cuts: Sequence[int]) -> Plan:
    """The plan with a stage for each auxiliary network. cuts: as `firsts` gives them."""
    stages = list[Stage]()
    for stage in plan.stages:
        inside = [cut + 1 for cut in cuts if stage.first < cut + 1 < stage.last]
        if inside:
            raise OutsizeError(
                f"plan: a stage holds segments [{stage.first}, {stage.last}), but local learning"
                f" cuts the model at {inside[0]}; expected stages that end there"
            )
        before = sum(cut + 1 <= stage.first for cut in cuts)
        stages.append(replace(stage, first=stage.first + before, last=stage.last + before))
        if stage.last - 1 in cuts:
            stages.append(Stage(stage.last + before, stage.last + before + 1))
    return replace(plan, segments=plan.segments + len(cuts), stages=tuple(stages))


class Auxiliary(nn.Module):
    """x_TD -> h_TD, what the group's own head multiplies.

    y = the branches of x, summed, or x where there are none; h = norm(y).
    """

    def __init__(self, decoder: Decoder, first: int, branches: Sequence[str]) -> None:
        super().__init__()
        config, like = decoder.config, next(decoder.parameters())
        with torch.device("meta"):
            end = Epilogue(config)
            blocks = {name: Block(config, first) for name in branches}
        self.learned, self.average = blocks.get(LEARNED), blocks.get(AVERAGE)
        self.norm, self.project, self.head = end.norm, end.project, end.head
        # A decoder of the same modules, in which they are cut as those of any other.
        with torch.device("meta"):
            layers = (decoder.config.layers[first],) * len(branches)
            like_it = Decoder(replace(config, layers=layers))
        like_it.blocks, like_it.epilogue = nn.ModuleList(blocks.values()), end
        self.first, self._as_decoder = first, (like_it,)  # in a tuple: no module of this one
        shelled(self, like.dtype, like.device)
        if self.average is not None:
            self.average.requires_grad_(False)

    def forward(self, x_TD: Tensor, ctx: Context) -> Tensor:
        branches = [b(x_TD, ctx) for b in (self.learned, self.average) if b is not None]
        y_TD = sum(branches[1:], branches[0]) if branches else x_TD
        h_TD: Tensor = self._as_decoder[0].epilogue(y_TD, ctx)
        return h_TD

    def divide(self, plan: Plan, here: Here) -> Iterator[tuple[str, Cut]]:
        """Leave a worker's part; gives how each parameter was cut, by its name."""
        names = [name for name in (LEARNED, AVERAGE) if getattr(self, name) is not None]
        for name, cut in divide(self._as_decoder[0], here.world, plan, here.line).items():
            part, _, inner = name.partition(".")
            if part == "blocks":
                number, _, inner = inner.partition(".")
                yield f"{names[int(number)]}.{inner}", cut
            elif part == "epilogue":
                yield inner, cut

    def origin(self, local: str) -> str:
        """The parameter of the decoder that one of its own begins as."""
        branch, _, inner = local.partition(".")
        copied = branch in (LEARNED, AVERAGE)
        return f"blocks.{self.first}.{inner}" if copied else f"epilogue.{local}"


def shelled(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give parameters on the meta device a shape, dtype and device, and one element of memory."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            shell = torch.empty((), dtype=dtype, device=device).expand(parameter.shape)
            setattr(part, name, nn.Parameter(shell))


@dataclass(frozen=True)
class Grouped:
    """A decoder with its auxiliary networks, by their segments. values: of the decoder's parameters
    by name, where it will be cut."""

    whole: NativeModel
    heads: Mapping[int, Auxiliary]
    values: Mapping[str, Tensor]

    def part(self, plan: Plan, here: Here) -> tuple[Flow, Mapping[str, Cut]]:
        made = self.whole
        cuts = divide(made.model, here.world, plan, here.line)
        for i, head in enumerate(self.heads.values()):
            cuts |= {f"{AUXILIARY}.{i}.{name}": cut for name, cut in head.divide(plan, here)}
        execution = replace(execution_of(plan.mesh, here.world), loss=made.loss)
        return NativeFlow(made.model, plan, made.options, execution, self.heads), cuts

    @property
    def fill(self) -> Fill:
        """Auxiliary networks begin as copies of the model's own blocks and head."""
        heads, named = list(self.heads.values()), dict(self.whole.model.named_parameters())

        def fill(name: str, out: Tensor) -> None:
            if name.startswith(f"{AUXILIARY}."):
                _, number, local = name.split(".", 2)
                name = heads[int(number)].origin(local)
            if self.whole.fill is None:
                out.copy_(self.values[name] if self.values else named[name])
            else:
                self.whole.fill(name, out)

        return fill


def grouped(model: Trainable, plan: Plan, recipe: Recipe) -> tuple[Grouped, Plan]:
    """A decoder and its plan in groups. OutsizeError for a model that has none."""
    if not isinstance(model, NativeModel):
        raise OutsizeError("local-learning: the model is adopted; expected a native decoder")
    for reason in _refusals(model.model):
        raise OutsizeError(f"local-learning: {reason}")
    cuts = firsts(plan, len(model.model.blocks))
    branches = BRANCHES[plan.local.auxiliary]
    heads = {first + 1 + i: Auxiliary(model.model, first, branches) for i, first in enumerate(cuts)}
    here = model.fill is not None or plan.mesh.size == 1
    values = {} if here else {n: p.detach() for n, p in model.model.named_parameters()}
    return Grouped(model, heads, values), plan_with(plan, cuts)


def _refusals(model: Decoder) -> Iterator[str]:
    config = model.config
    if config.rewired:
        yield (
            f"groups end in plain blocks, but the model is wired as {config.rewired} says; leave"
            " that out, or the approximation"
        )
    if config.adapter is not None or not all(p.requires_grad for p in model.parameters()):
        yield (
            "each group learns with a head of its own, and beside an adapter (or train.only) other"
            " parameters are frozen; leave that out, or the approximation"
        )
    if config.tied:
        yield (
            "the head is tied to the token embedding, and so would belong to the first group and"
            " the last; set tie_word_embeddings to false, or leave local-learning out"
        )
