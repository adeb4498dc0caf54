"""The groups of local learning: runs of a decoder's blocks, each a small decoder of its own.

A group has an entry (the decoder's prologue, or what the group before has handed over), blocks and
an end (the decoder's epilogue, or an auxiliary network with a norm and a head of its own), so that
the flow, the plan and the job of any decoder serve it as they are.

The auxiliary network of "momentum" adds what two copies of the next group's first block make of the
group's output: one follows that block as a moving average, the other learns (Su et al., "Momentum
Auxiliary Network for Supervised Local Learning", 2024, where the second is called learnable bias).

T tokens, D hidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from outsize.errors import OutsizeError, counted
from outsize.kernels.entropy import LossOptions
from outsize.memory import Meter
from outsize.models.decoder import Block, Decoder, Epilogue
from outsize.models.seams import Context
from outsize.plan import Plan, Stage
from outsize.runtime.engine import Ran
from outsize.runtime.job import Fill, Job
from outsize.runtime.making import NativeModel, make_job
from outsize.runtime.recipe import Here, Recipe
from outsize.trace.trace import Event, Trace

LEARNED, AVERAGE = "learned", "average"
BRANCHES = {"head": (), "block": (LEARNED,), "momentum": (LEARNED, AVERAGE)}
Handed = deque[Tensor]  # hidden states of microbatches, in their order


@dataclass(frozen=True)
class Group:
    """Blocks [first, last) of a decoder. final: no group comes after."""

    index: int
    first: int
    last: int
    final: bool

    def name(self, local: str) -> str:
        """What a parameter of the group's own decoder is called in the whole."""
        head, _, rest = local.partition(".")
        if head == "blocks":
            number, _, rest = rest.partition(".")
            return f"blocks.{int(number) + self.first}.{rest}"
        return local if head == "prologue" or self.final else f"auxiliary.{self.index}.{rest}"

    def origin(self, local: str) -> str:
        """The parameter of the decoder that one of the group's begins as."""
        head, _, rest = local.partition(".")
        branch, _, inner = rest.partition(".")
        if head == "epilogue" and branch in (LEARNED, AVERAGE):
            return f"blocks.{self.last}.{inner}"
        return self.name(local) if head == "blocks" else local

    def segment(self, local: str) -> str:
        """What a segment of the group's own decoder is called in the whole."""
        if local.startswith("block "):
            return f"block {int(local.removeprefix('block ')) + self.first}"
        return local if local == "prologue" or self.final else f"auxiliary {self.index}"


def groups_of(plan: Plan, blocks: int) -> tuple[Group, ...]:
    """The decoder's blocks in equal runs, the first ones longer where they do not divide."""
    count = plan.local.groups
    if blocks < count:
        raise OutsizeError(
            f"plan: local.groups is {count}, but the model has {counted(blocks, 'block')};"
            " expected at most"
            f" {blocks}"
        )
    each, more = divmod(blocks, count)
    cuts = [i * each + min(i, more) for i in range(count + 1)]
    return tuple(Group(i, cuts[i], cuts[i + 1], i == count - 1) for i in range(count))


def plan_of(plan: Plan, group: Group) -> Plan:
    """The part of a plan that is a group's: stages of its blocks, an entry and an end."""
    first, last = group.first + 1, group.last + 1  # segments
    whole = group.index == 0 and plan.stages[0].first == 0
    low, high = (0 if whole else first), (plan.segments if group.final else last)
    mine = [s for s in plan.stages if s.first < high and s.last > low]
    for stage in mine:
        if stage.first < low or stage.last > high:
            raise OutsizeError(
                f"plan: a stage holds segments [{stage.first}, {stage.last}), but local learning"
                f" cuts the model at {last if stage.last > high else first}; expected stages that"
                " end there"
            )
    shift = group.first
    stages = [replace(s, first=s.first - shift, last=s.last - shift) for s in mine]
    count = group.last - group.first
    stages = stages if whole else [Stage(0, 1), *stages]
    stages = stages if group.final else [*stages, Stage(count + 1, count + 2)]
    names = tuple(name for name in plan.approximate if name != "local-learning")
    return replace(plan, segments=count + 2, stages=tuple(stages), approximate=names, budget=None)


class Entry(nn.Module):
    """What a group begins with where it is not the first: hidden states, each taken once."""

    def __init__(self, handed: Handed) -> None:
        super().__init__()
        self.handed = handed

    def forward(self, ids_T: Tensor, ctx: Context) -> Tensor:
        return self.handed.popleft()


class Auxiliary(nn.Module):
    """x_TD -> h_TD, what the group's own head multiplies. Hands x on, cut from its gradient.

    y = the branches of x, summed, or x where there are none; h = norm(y).
    """

    def __init__(self, decoder: Decoder, group: Group, branches: Sequence[str]) -> None:
        super().__init__()
        config, like = decoder.config, next(decoder.parameters())
        with torch.device("meta"):
            end = Epilogue(config)
            blocks = {name: Block(config, group.last) for name in branches}
        self.learned, self.average = blocks.get(LEARNED), blocks.get(AVERAGE)
        self.norm, self.project, self.head = end.norm, end.project, end.head
        self.softcap, self.logit_scale = end.softcap, end.logit_scale
        self.vocabulary = end.vocabulary
        shelled(self, like.dtype, like.device)
        if self.average is not None:
            self.average.requires_grad_(False)
        self.handed: Handed = deque()
        self.handing = False  # a step is under way

    def forward(self, x_TD: Tensor, ctx: Context) -> Tensor:
        if self.handing:
            self.handed.append(x_TD.detach())
        branches = [b(x_TD, ctx) for b in (self.learned, self.average) if b is not None]
        h_TD: Tensor = self.norm(sum(branches[1:], branches[0]) if branches else x_TD)
        return h_TD if self.project is None else self.project(h_TD)


def shelled(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give parameters on the meta device a shape, dtype and device, and one element of memory."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            shell = torch.empty((), dtype=dtype, device=device).expand(parameter.shape)
            setattr(part, name, nn.Parameter(shell))


class GroupDecoder(nn.Module):
    """A group as a decoder: what NativeFlow asks of one."""

    def __init__(self, decoder: Decoder, group: Group, handed: Handed, kind: str) -> None:
        super().__init__()
        self.prologue = Entry(handed) if group.index else decoder.prologue
        self.blocks = nn.ModuleList(list(decoder.blocks)[group.first : group.last])
        own = BRANCHES[kind]
        self.epilogue = decoder.epilogue if group.final else Auxiliary(decoder, group, own)
        self.config, self.context = decoder.config, decoder.context


def decoders(decoder: Decoder, plan: Plan) -> Iterator[tuple[Group, GroupDecoder]]:
    """The groups of a decoder, each handing on to the next."""
    if decoder.config.tied:
        raise OutsizeError(
            "local learning: the head is tied to the token embedding, and so would belong to the"
            " first group and the last; set tie_word_embeddings to false, or leave local-learning"
            " out"
        )
    handed: Handed = deque()
    for group in groups_of(plan, len(decoder.blocks)):
        made = GroupDecoder(decoder, group, handed, plan.local.auxiliary)
        yield group, made
        if isinstance(made.epilogue, Auxiliary):
            handed = made.epilogue.handed


def job_of(
    group: Group,
    decoder: GroupDecoder,
    plan: Plan,
    recipe: Recipe,
    ledger: Meter | None,
    values: Fill,
    options: LossOptions,
) -> Job:
    """The job of a group. values: writes a parameter of the whole model into a tensor."""

    def fill(name: str, out: Tensor) -> None:
        values(group.origin(name), out)

    model = NativeModel(cast(Decoder, decoder), options, fill=fill)
    return make_job(model, plan_of(plan, group), recipe, Here(ledger=ledger))


def later(trace: Trace, seconds: float, stages: int) -> Iterator[Event]:
    """A group's events, within the step of all."""
    for event in trace.events:
        stage = event.stage + stages if event.stage >= 0 else event.stage
        start, end = event.start + seconds, event.end + seconds
        yield replace(event, start=start, end=end, stage=stage)


def shifted(ran: Sequence[Ran], seconds: float, stages: int) -> Iterator[Ran]:
    """What a group ran, within the step of all."""
    for one in ran:
        stage = one.action.stage
        action = replace(one.action, stage=stage + stages) if stage >= 0 else one.action
        start, end = one.start + seconds, one.end + seconds
        yield one._replace(action=action, start=start, end=end)
