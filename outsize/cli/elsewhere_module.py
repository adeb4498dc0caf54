"""`outsize plan import.path:factory --hardware`: a module of blocks, planned for elsewhere."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from outsize.errors import OutsizeError

if TYPE_CHECKING:
    from torch import nn

    from outsize.foresight.planning.asked import Asked
    from outsize.foresight.shape import Shape
    from outsize.hardware import Cluster
    from outsize.train.prepared.guessed import Given

ROWS = 1024  # of a step, where nothing is said and rows have no tokens


def module_of(
    name: str, cluster: Cluster, asked: Asked, tokens: int, said: Collection[str]
) -> tuple[Asked, Shape]:
    """A factory's module as it is planned, and what is asked of it. tokens: of a step; said: keys
    that were given."""
    from outsize.models.adopt import find_blocks
    from outsize.train.prepared.factory import made
    from outsize.train.prepared.foreseen import foreseen
    from outsize.train.prepared.module import without_caches
    from outsize.verify.case import Adopted

    found = made(name)
    model = _checked(name, found.model if isinstance(found, Adopted) else found, cluster)
    blocks = find_blocks(model, found.blocks if isinstance(found, Adopted) else None)
    without_caches(model)
    given = _given(found, model, asked.sequence)
    node = cluster.groups[0].node
    shape = foreseen(model, given, node, blocks, asked.precision)
    return _terms(asked, given, tokens, said, shape), shape


def _checked(name: str, model: object, cluster: Cluster) -> nn.Module:
    """OutsizeError for what is no module that is planned here."""
    from torch import nn

    from outsize.models.decoder import Decoder

    if not isinstance(model, nn.Module):
        raise OutsizeError(
            f"{name} gives a {type(model).__name__}; expected an nn.Module, or an"
            " outsize.verify.Adopted(model, batch, loss, count)"
        )
    if isinstance(model, Decoder):
        raise OutsizeError(f"{name} gives a native decoder; expected its preset or config.json")
    if not any(p.requires_grad for p in model.parameters()):
        raise OutsizeError(f"{name}: no parameter of {type(model).__name__} is trained")
    if not cluster.alike:
        raise OutsizeError(
            "unlike devices are planned for decoders yet: expected hardware of one kind for a"
            " factory's module"
        )
    return model


def _given(found: object, model: nn.Module, sequence: int) -> Given:
    """What the module is called with, as the factory says or as it is found."""
    from torch import Tensor

    from outsize.torch_private import tree_leaves
    from outsize.train.prepared.guessed import ROWS as FEW
    from outsize.train.prepared.guessed import Given, fails, guessed, line_of
    from outsize.verify.case import Adopted

    if not isinstance(found, Adopted):
        return guessed(model, sequence)
    try:
        batch = found.batch(0, FEW)
    except Exception as error:
        raise OutsizeError(f"batch of the factory raises {line_of(error)}") from error
    first = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), None)
    if first is None:
        raise OutsizeError(f"batch of the factory is a {type(batch).__name__} without tensors")
    ids = first.ndim == 2 and not first.is_floating_point()
    made = Given(batch, found.loss, first.shape[1] if ids else 1)
    reason = fails(model, made)
    if reason:
        raise OutsizeError(f"{type(model).__name__} cannot be rehearsed with its batch: {reason}")
    return made


def _terms(asked: Asked, given: Given, tokens: int, said: Collection[str], shape: Shape) -> Asked:
    """What is asked, in rows of this module and of axes that it can have."""
    from outsize.foresight.planning.asked import TOKENS, named

    assert shape.module is not None
    for one in asked.conditions.required:
        why = shape.module.left.get(one.name)
        none = 0 if one.name == "sequence-parallel" else 1
        if why and not one.holds(none):
            raise OutsizeError(f"{one} of {shape.module.name}: {why}")
    if given.tokens != asked.sequence and "train.sequence" in said:
        raise OutsizeError(
            f"train.sequence is {asked.sequence}, and a row of {shape.module.name} has"
            f" {given.tokens}; leave it out"
        )
    if asked.lengths.seen:
        raise OutsizeError(f"--lengths of {shape.module.name}: a factory's rows are one length")
    if tokens < given.tokens:
        raise OutsizeError(
            f"train.batch_tokens is {tokens}; expected {given.tokens} or more, a row"
        )
    batch = tokens // given.tokens
    if given.tokens == 1 and "train.batch_tokens" not in said:
        batch = ROWS
    values = {TOKENS: 1, "sequence-parallel": 0}
    if "pipeline" in shape.module.left:
        values["pipeline"] = 1
    conditions = asked.conditions.with_required(*named(values))
    return replace(asked, sequence=given.tokens, batch=batch, conditions=conditions)
