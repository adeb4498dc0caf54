"""What a module says of its parameters: initial value, layout by axis, name in files.

Who fills a model, cuts it over workers or saves it asks the modules. A module that comes with a
technique is known to all of them by what it declares; nothing else names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol, cast, runtime_checkable

from torch import nn

from outsize.errors import OutsizeError

# What is never cut apart, and how many there are of it: a field of DecoderConfig or ExpertFacts,
# or the wiring's.
Unit = Literal["heads", "kv_heads", "inner", "expert_inner", "shared_inner", "vocab", "ways"]
Stack = Literal["experts"]  # things of one shape that lie in a parameter one behind another


@dataclass(frozen=True)
class Initial:
    """Normal with deviation `std`, uniform within `bound` of 0, or else the number `value`.

    std: "model" is the deviation that the model's config names; "residual" the same, or a smaller
    one where the family has less for projections into the residual stream. alike: a name by which
    it is drawn in the place of its own, and the columns of the whole: parameters that say the same
    are the first rows and columns of one; uniform ones alone.
    """

    std: float | Literal["model", "residual"] = 0.0
    bound: float = 0.0
    value: float = 0.0
    alike: tuple[str, int] | None = None


@dataclass(frozen=True)
class Lies:
    """How a parameter lies on the tensor axis. dim, unit: cut along dim between units; None: whole
    on every worker. gradient: "whole" where every worker that holds an element has all of its
    gradient, "partial" where each has a summand, "stream" partial where the activations that it
    meets are cut by tokens, else whole. groups: so many elements of the unit's dim lie in so many
    of the parameter's, and are never cut apart."""

    dim: int | None = None
    unit: Unit | None = None
    gradient: Literal["whole", "partial", "stream"] = "whole"
    groups: tuple[int, int] = (1, 1)


STREAM = Lies(gradient="stream")  # meets the residual stream
INSIDE = Lies(gradient="partial")  # is inside a branch, before or behind what is cut there


@dataclass(frozen=True)
class Declared:
    """A parameter. file: its name in files, behind that of the Linear that its module is beside, or
    all of it behind a "/"; such a parameter is an adapter's, and rests in files of its own. None:
    the family's table has its name, or it is called there as it is here. stack: what lies in it
    along dim 0 one behind another, for axes that deal that out. rate: factor on its learning rate.
    joined: along which dim those lie one behind another that have one name in files; nested: they
    are the first rows and columns of one."""

    initial: Initial
    lies: Lies
    file: str | None = None
    stack: Stack | None = None
    rate: float = 1.0
    joined: int = 0
    nested: bool = False


@runtime_checkable
class Declares(Protocol):
    """A module with parameters of its own."""

    def declare(self, leaf: str) -> Declared:
        """Of its own parameter of this name."""


@cache  # a class's methods do not change; Python takes 50 us each time that it is asked
def _declares(kind: type[nn.Module]) -> bool:
    return issubclass(kind, Declares)


def declarations(model: nn.Module) -> Iterator[tuple[str, Declared]]:
    """Of each parameter, by name; of a tied one for each name that it has. OutsizeError for a
    module that says nothing of its parameters."""
    for prefix, module in model.named_modules():
        names = [leaf for leaf, _ in module.named_parameters(recurse=False)]
        if not names:
            continue
        if not _declares(module.__class__):
            raise OutsizeError(
                f"model: {prefix}.{names[0]} is a parameter of a {type(module).__name__}, which"
                " declares none; expected a method `declare` (outsize/models/declared.py)"
            )
        for leaf in names:
            yield f"{prefix}.{leaf}", cast(Declares, module).declare(leaf)


def declared_rates(model: nn.Module) -> dict[str, float]:
    """By name, the factors on the learning rate that modules declare; of those that declare
    nothing, none."""
    found = dict[str, float]()
    for prefix, module in model.named_modules():
        names = [leaf for leaf, _ in module.named_parameters(recurse=False)]
        if names and _declares(module.__class__):
            for leaf in names:
                rate = cast(Declares, module).declare(leaf).rate
                found[f"{prefix}.{leaf}" if prefix else leaf] = rate
    return found
