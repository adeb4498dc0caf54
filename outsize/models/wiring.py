"""Wirings: blocks whose branches are not one after the other. The joint for techniques.

A wiring is a file of outsize/techniques/wirings that is called as its key of config.json, so that a
plain model imports none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from outsize.errors import OutsizeError
from outsize.models.seams import Context, Mixer
from outsize.registry import Registry

if TYPE_CHECKING:
    from outsize.models.config import DecoderConfig
    from outsize.models.decoder import Decoder

Launch = Callable[[Tensor], Callable[[], Tensor]]  # begins to add up; what that gives has the sum


def at_once(x: Tensor) -> Callable[[], Tensor]:
    """Nothing is left to add: one worker, or a sum that was taken before."""
    return lambda: x


def as_it_is(x: Tensor, ctx: Context) -> Tensor:
    """All tokens lie here."""
    return x


class AnyBlock(nn.Module):
    """A block of a decoder, however it is wired: called with (x, Context).

    entering: what the mixer's input goes through before it, where tokens are cut between branches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entering: Callable[[Tensor, Context], Tensor] = as_it_is

    @property
    def mixer(self) -> Mixer:
        """What of the block lets tokens have an effect on others."""
        raise NotImplementedError

    def leave(self, x: Tensor, ctx: Context) -> None:
        """Keep what the block's input leaves for later tokens, and compute nothing else."""
        raise NotImplementedError


class Launching(AnyBlock):
    """A block that begins sums and takes them later."""

    launch: Launch


class Join(Protocol):
    """Makes x_TD, (T, D), of what a model's last block gives."""

    launch: Launch

    def __call__(self, x: Tensor, ctx: Context | None) -> Tensor: ...


class Wiring(Protocol):
    """How the branches of a model's blocks are wired; a value that can be compared and hashed."""

    @property
    def key(self) -> str:
        """Of config.json."""

    def block(self, config: DecoderConfig, layer: int) -> AnyBlock | None:
        """The block of a layer, None for a plain one."""

    def join(self, config: DecoderConfig) -> Join:
        """What the epilogue begins with."""

    def width(self, layer: int, size: int) -> float:
        """Features that a block gives of a token on each of `size` workers of a tensor axis, in
        units of the model's."""


class Instead(Protocol):
    """What the Linears of a model's blocks hold in the place of weights that may be multiplied as
    they are; a value that can be compared and hashed."""

    @property
    def key(self) -> str:
        """Of config.json."""

    def attach(self, model: nn.Module) -> None:
        """Have them hold it. OutsizeError for a model whose weights are multiplied otherwise."""

    def detach(self, model: nn.Module) -> None:
        """Have them hold the weights that it stands for."""

    def left(self, config: DecoderConfig) -> DecoderConfig:
        """The config of the model with weights."""


@dataclass(frozen=True)
class Wire:
    """A wiring as config.json says it. read: the config of the same model wired like that; draw: a
    random config.json wired like that, for `outsize verify --random`, as it was where it cannot
    be; share: of random models that are; made: a plain model wired like that config says, None:
    its weights are the same."""

    read: Callable[[DecoderConfig, Mapping[str, Any]], DecoderConfig]
    draw: Callable[[Random, dict[str, Any]], dict[str, Any]]
    share: float
    made: Callable[[Decoder, DecoderConfig], Decoder] | None = None


WIRES: Registry[Wire] = Registry("wiring")


def sequential(config: DecoderConfig, key: str) -> None:
    """OutsizeError unless branches are x + f(norm(x)), one after the other, of a plain model."""
    if config.placement != "before" or config.parallel:
        how = "side by side" if config.parallel else f"with norms {config.placement}"
        raise OutsizeError(
            f"config.json: {key} is set, but {config.family} has its branches {how}; only models"
            " with x + f(norm(x)), one branch after the other, can be wired like this"
        )
    if config.rewired:
        raise OutsizeError(f"config.json: {config.rewired} and {key} exclude each other; drop one")
