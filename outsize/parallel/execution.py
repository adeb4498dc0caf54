"""Execution: what a plan hands to a model of flat tokens: which of them are here, how they attend,
how they reach their experts, what is made of their losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from outsize.collectives import Collective, Mesh, World, along
from outsize.errors import OutsizeError
from outsize.kernels.entropy import Loss
from outsize.models.attention import LocalAttend
from outsize.models.branches import mixer, typed_mixer
from outsize.models.config import DecoderConfig
from outsize.models.experts import LocalDispatch
from outsize.models.seams import Attend, Dispatch
from outsize.registry import Registry

Span = tuple[int, int]  # tokens [first, last) of a row


class TokenCut(Protocol):
    """How an axis cuts the tokens of each row, from the place of one worker."""

    def spans(self, tokens: int) -> tuple[Span, ...]:
        """Of a row of so many tokens, those that lie here, in order."""

    def attend(self, rows: int, tokens: int, bounds: tuple[int, ...]) -> Attend:
        """What lets the tokens that are here attend to all: of rows of so many tokens each, laid
        flat, whose documents have these bounds. It is called with keys, values and bounds of the
        tokens that are here."""


class AllTokens:
    """Rows are whole."""

    def spans(self, tokens: int) -> tuple[Span, ...]:
        return ((0, tokens),)

    def attend(self, rows: int, tokens: int, bounds: tuple[int, ...]) -> Attend:
        return LocalAttend()


# By axis that cuts tokens, how: made of the workers of the axis.
TOKEN_CUTS: Registry[Callable[[Collective], TokenCut]] = Registry("cut of tokens")
# By axis that deals out the experts of each layer, how tokens reach them: the same.
DISPATCHES: Registry[Callable[[Collective], Dispatch]] = Registry("dispatch")


@dataclass(frozen=True)
class Execution:
    """tokens: which of each row are here, and how those attend. dispatch: tokens to experts. axis:
    that cuts tokens, if one does. loss: what is made of each target's cross-entropy in training,
    None for itself."""

    tokens: TokenCut = field(default_factory=AllTokens)
    dispatch: Dispatch = field(default_factory=LocalDispatch)
    axis: str | None = None
    loss: Loss | None = None

    def check(self, config: DecoderConfig) -> None:
        """Refuse layers where a token has an effect on later ones by more than keys and values,
        which are all that is gathered."""
        kinds = {facts.kind: layer for layer, facts in enumerate(config.layers)}
        for kind, layer in kinds.items() if self.axis else ():
            with torch.device("meta"):
                states = typed_mixer(mixer(config, layer)).states(torch.float32)
            if any(state.per == "sequence" for state in states):
                raise OutsizeError(
                    f"mesh: {self.axis} cuts the tokens of rows, and layer {layer} is {kind}, whose"
                    f" state goes from token to token; set {self.axis} to 1"
                )


LOCAL = Execution()


def check_adopted(mesh: Mesh, name: str) -> None:
    """Refuse axes that cut tokens, or deal out what lies in weights, for a module of which only its
    own code knows what these are."""
    for axis in (axis.name for axis in mesh.axes if axis.parts):
        raise OutsizeError(
            f"mesh: {axis} is {mesh[axis]}, but {name} is an adopted module, of which only its own"
            f" code knows what its weights are; set {axis} to 1"
        )
    for axis in mesh.cutting("tokens"):
        raise OutsizeError(
            f"mesh: {axis} is {mesh[axis]}, but {name} is an adopted module, of which only its own"
            f" code knows what a token is; set {axis} to 1"
        )


def execution_of(mesh: Mesh, world: World) -> Execution:
    """What a mesh asks for, on this worker. OutsizeError for two axes that cut the same."""
    cutting = mesh.cutting("tokens")
    if len(cutting) > 1:
        raise OutsizeError(
            f"mesh: {cutting[0]} and {cutting[1]} both cut the tokens of rows; set one of them to 1"
        )
    made = LOCAL
    for name in cutting:
        made = replace(made, tokens=TOKEN_CUTS.get(name)(along(world, name)), axis=name)
    for name in (axis.name for axis in mesh.axes if axis.parts):
        made = replace(made, dispatch=DISPATCHES.get(name)(along(world, name)))
    return made
