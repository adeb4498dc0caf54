"""Precisions that end in +invariant: where training's forward pass is serving's, bit for bit.

The engine plays computing actions inside `rows.alone`, so that products, attention and losses sum
in the order in which serving sums them; backward passes use the usual kernels. What is not known to
hold is refused by its name.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from outsize.errors import OutsizeError
from outsize.kernels import attention, native
from outsize.models.decoder import BRANCHES, Decoder, around_of, typed
from outsize.models.linear import Linear
from outsize.models.low_rank import LowRank
from outsize.plan import Plan
from outsize.runtime.flow import Flow
from outsize.runtime.native import NativeFlow
from outsize.runtime.runners import runner_of

_AXES = ("data", "pipeline")  # along which no product and no attention is cut
_ROPES = ("dynamic", "longrope")  # keys turn by the length of their text
_APPROXIMATE = ("bfloat16-weights",)  # changes no forward pass of the weights that are saved


def check_invariant(flow: Flow, plan: Plan) -> None:
    """OutsizeError for a run whose forward pass is not that of serving."""
    plain = plan.precision.compute
    why = next(_reasons(flow, plan), None)
    if why is not None:
        raise OutsizeError(
            f"precision is '{plan.precision.name}', whose log-probabilities are those of serving,"
            f" and {why}; leave that out, or set precision to {plain}"
        )


def _reasons(flow: Flow, plan: Plan) -> Iterator[str]:
    """What does not hold."""
    if native.library() is None:
        yield "this machine has no C++ compiler that builds its kernels"
    if not isinstance(flow, NativeFlow):
        yield "this model is an adopted module, which multiplies by itself"
        return
    if flow.device.type not in ("cpu", "meta"):
        yield f"the device is {flow.device.type}, which has no such kernels"
    cut = (axis.name for axis in plan.mesh.axes if plan.mesh[axis.name] > 1)
    yield from (f"mesh.{name} is {plan.mesh[name]}" for name in cut if name not in _AXES)
    if plan.pipeline.ends is not None:
        yield f"pipeline.{plan.pipeline.ends[0]} cuts the vocabulary"
    for name in plan.approximate:
        if name not in _APPROXIMATE:
            yield f"plan.approximate holds {name}"
    yield from _of_model(flow, plan)


def _of_low_rank(model: Decoder) -> bool:
    """Whether all that an adapter adds is products of its own beside the Linears'."""
    blocks = typed(model.blocks)
    around = any(
        getattr(block, name, None) for block in blocks for name in map(around_of, BRANCHES)
    )
    mixed = any(getattr(one, "mixture", None) is not None for one in model.modules())
    besides = [one.beside for one in model.modules() if isinstance(one, Linear)]
    alike = all(one is None or type(one) is LowRank for one in besides)
    return alike and not (around or mixed or model.config.virtual or model.config.sided)


def _of_model(flow: Flow, plan: Plan) -> Iterator[str]:
    assert isinstance(flow.model, Decoder)
    config = flow.model.config
    if config.wiring is not None:
        yield f"the model is wired by {config.rewired}"
    if config.adapter is not None and not _of_low_rank(flow.model):
        yield f"the model has an adapter ({type(config.adapter).__name__})"
    if config.coding is not None:
        yield f"the model's weights are held as {config.coding.name}"
    widest, latent = max(config.head_size, config.value_size), config.latent
    if latent is not None:
        widest = latent.rank + latent.rotary
    if widest > attention.WIDTH and (config.softcap is not None or runner_of(plan) is not None):
        also = "the sequence runs in chunks" if config.softcap is None else "its scores are capped"
        yield f"the model has heads of {widest} numbers, more than {attention.WIDTH}, and {also}"
    for rope in config.ropes.values():
        if rope.kind in _ROPES and plan.sequence > rope.trained:
            yield f"the model has a {rope.kind} rope and train.sequence is {plan.sequence}"
    for layer, block in enumerate(typed(flow.model.blocks)):
        if any(one.per == "sequence" for one in block.mixer.states(torch.float32)):
            yield f"layer {layer} is {config.layers[layer].kind}, whose states have another order"
