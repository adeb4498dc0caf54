"""What `prepare` refuses of what it is told, before anything is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outsize.collectives import Mesh
from outsize.errors import OutsizeError, nearest
from outsize.kernels.entropy import Loss as ByTarget
from outsize.models.decoder import Decoder
from outsize.plan.approximate import MICROBATCH
from outsize.plan.settings import PLAN_SETTINGS
from outsize.plan.spread import AUTO
from outsize.schedule.pipelined import order_of
from outsize.schedule.pipelines import check_name
from outsize.search.request import SCHEDULE
from outsize.train.prepared.batches import refuse_unseen
from outsize.train.prepared.bodies import check_body, check_rows, check_walls
from outsize.train.prepared.statistics import normalising

if TYPE_CHECKING:
    from outsize.train.prepared.options import Options, Settings

_OF_DECODERS = ("mlp_tile", "label_smoothing", "z_loss")


def check_sums(model: nn.Module, made: Settings) -> None:
    """Refuse a batch in parts where the loss is a mean, or statistics are those of the batch."""
    if max(made.microbatches, made.mesh.rows) == 1:
        return
    many = made.microbatches > 1
    what = f"microbatches is {made.microbatches}" if many else f"mesh is {made.mesh}"
    check_rows(model, what)
    if not isinstance(model, Decoder) and (made.count is None or made.loss is None):
        raise OutsizeError(
            f"{what} without loss and count: a mean of means is not the mean; pass"
            " loss=(output, batch) -> sum and count=batch -> number of targets"
        )
    if MICROBATCH in made.approximate:
        return
    for name, module in normalising(model):
        raise OutsizeError(
            f"module {name!r} is a {type(module).__name__}: its statistics are those of the"
            " whole batch, which microbatches would change; use microbatches=1, or name"
            f" {MICROBATCH} under approximate"
        )


def check_first(model: nn.Module, made: Settings, batch: Any) -> None:
    """Refuse what is known with the first batch: hooks that have come since `prepare`, and tensors
    of the batch that cannot be cut or foreseen."""
    check_sums(model, made)
    pipelined = made.mesh.pipeline > 1
    if pipelined:
        check_walls(model, made.blocks)
    if pipelined or made.microbatches > 1 or made.budget is not None:
        refuse_unseen(batch)


def check_approximate(model: nn.Module, made: Settings) -> None:
    """Refuse names that `prepare` does not know, or that would do nothing."""
    for name in () if made.plan is not None else made.approximate:
        if name != MICROBATCH:
            raise OutsizeError(f"prepare: approximate holds {name!r}{nearest(name, [MICROBATCH])}")
    if MICROBATCH not in made.approximate:
        return
    if max(made.microbatches, made.mesh.rows) == 1 or not any(normalising(model)):
        raise OutsizeError(
            f"prepare: approximate holds {MICROBATCH} and nothing would be done: it is for batch"
            " normalisation with several microbatches, or with rows on several workers; leave it"
            " out"
        )


def check_spread(model: nn.Module, made: Settings) -> None:
    """Refuse workers that cannot share somebody else's module."""
    if isinstance(model, Decoder):
        return
    name = type(model).__name__
    if made.sequence_parallel:
        raise OutsizeError(
            f"sequence_parallel is for decoders that outsize.load gives, and this is a {name};"
            " leave it out"
        )
    scripted = any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())
    if scripted and (made.budget is not None or made.mesh.size > 1):
        raise OutsizeError(
            "model has a module that torch.jit.script has made, which cannot be predicted or"
            " spread; pass it as it was before, or leave out memory and mesh"
        )
    if made.tiers and made.mesh.tensor > 1:
        raise OutsizeError(
            f"mesh is {made.mesh}, {made.tiers[0].name!r} is a tier and this is a {name}; states of"
            " what the automatic rules cut stay on the device: leave out the tiers"
        )


def without_blocks_that_tell(model: nn.Module, made: Settings) -> Settings:
    """Compute a mixture of experts of transformers whole where its loss reads what the routers
    within its blocks give: the code between blocks has what blocks return alone."""
    telling = (getattr(m, "config", None) for m in model.modules())
    if not made.blocks or not any(getattr(c, "output_router_logits", False) for c in telling):
        return made
    if made.whole and not made.said["recompute"]:
        return replace(made, blocks=())
    raise OutsizeError(
        f"config.output_router_logits is True, and the loss of {type(model).__name__} reads routers"
        " inside its blocks, which are computed apart; set it to False, or leave out mesh, tiers,"
        " plan, blocks and recompute"
    )


def check_decoders(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Refuse of an adopted module what only native decoders have."""
    if isinstance(model, Decoder):
        return
    for name, value in options.items():
        one = PLAN_SETTINGS.find(name)
        if value and (name in _OF_DECODERS or (one is not None and one.native)):
            raise OutsizeError(
                f"{name} is {value}, which decoders that outsize.load gives have, and this is a"
                f" {type(model).__name__}; leave it out"
            )


def check_numbers(microbatches: int, clip: float | None) -> None:
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise OutsizeError(f"microbatches is {microbatches!r}; expected a whole number from 1 on")
    number = isinstance(clip, int | float) and not isinstance(clip, bool)
    if clip is not None and not (number and clip > 0):
        raise OutsizeError(
            f"clip is {clip}; expected the largest norm that a gradient may have, more than 0, or"
            " None to leave gradients as they are"
        )


def check_kinds(model: object, given: Mapping[str, object], said: Options) -> None:
    """Refuse a model without parameters, and arguments of another kind; a name alone becomes a list
    of it."""
    if not isinstance(model, nn.Module):
        raise OutsizeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if not any(True for _ in model.parameters()):
        raise OutsizeError(f"model: {type(model).__name__} has no parameters; nothing to train")
    check_body(model)
    values: Any = said
    for name in ("recompute", "approximate", "tiers"):
        if isinstance(values[name], str):
            values[name] = (values[name],)
    functions = {"loss": "(output, batch) -> scalar", "count": "batch -> number of targets"}
    for name, form in functions.items():
        own = given[name]
        if not (own is None or callable(own) or isinstance(own, ByTarget)):
            raise OutsizeError(f"{name} is {own!r}; expected a function, {form}")
    words = {"blocks": "'encoder.layers.*'", "recompute": "('block',)"}
    for name, form in words.items():
        own = {**given, **said}[name]
        parts = own if isinstance(own, Sequence) else (own,)
        if not (own is None or all(isinstance(one, str) for one in parts)):
            raise OutsizeError(f"{name} is {own!r}; expected names, as {form}")
    mesh: object = said["mesh"]
    if not (mesh is None or isinstance(mesh, str | Mesh)):
        raise OutsizeError(f"mesh is {mesh!r}; expected workers by axis, as 'data=2,tensor=2'")


def check_pipeline(made: Settings) -> None:
    """Refuse a pipeline that cannot be."""
    mesh, order = made.mesh, made.pipeline
    if mesh.pipeline == 1:
        if order.schedule != AUTO:
            check_name(order.schedule)
        return
    if order.schedule == AUTO and not order.orders:  # orders are found at the first step
        order = replace(order, schedule=SCHEDULE)
    order_of(order, mesh.pipeline, made.microbatches)


def check_vocabulary(model: nn.Module, made: Settings) -> None:
    """Refuse a vocabulary that nobody can cut."""
    order = made.pipeline
    if not order.vocabulary:
        return
    if made.mesh.pipeline == 1:
        raise OutsizeError(
            f"pipeline is {order.said!r} and mesh.pipeline is 1: a vocabulary is cut over the"
            f" workers of a pipeline; pass pipeline={order.schedule!r}, or a mesh with a pipeline"
        )
    if not isinstance(model, Decoder):
        raise OutsizeError(
            f"pipeline is {order.said!r} and this is a {type(model).__name__}, whose vocabulary is"
            " not known; cut it of decoders that outsize.load gives, or pass"
            f" pipeline={order.schedule!r}"
        )
