"""The adapter seam: a model stays as it is, and small modules beside its Linears are trained.

An adapter is part of a DecoderConfig, so that whoever makes a decoder (a forecast, a worker, a
plain twin) makes it with the same modules. The frozen rest is there once: it has no gradients and
no optimizer states, and its values stay in the files that they came from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from outsize.models.declared import INSIDE, Lies, Unit
from outsize.registry import Registry

if TYPE_CHECKING:
    from outsize.models.config import LayerFacts


@runtime_checkable
class Adapter(Protocol):
    """What is put beside a model's Linears: the settings of a technique, or read from a file."""

    def attach(self, model: nn.Module) -> None:
        """Freeze the parameters of a whole decoder, and give its Linears what is beside them.
        Raises OutsizeError for a model that it cannot adapt."""

    def to_json(self, adapted: Adapted) -> dict[str, Any]:
        """What its adapter_config.json says, as peft reads it."""


@dataclass(frozen=True)
class Adapted:
    """What an adapter has changed: by the names in files of Linears (behind a block's, where those
    of all blocks are alike), what is beside them. targets: by these, the adapter's that name them.
    transposed: files hold such weights (in, out). paths: a name is whole, and may end another."""

    beside: Mapping[str, Beside]
    targets: Mapping[str, str]
    transposed: bool = False
    paths: bool = False


@dataclass(frozen=True)
class Part:
    """Some of the Linears that an adapter changes. key: the setting that says which; make: gives
    what is beside one of them, from its name and itself; together: the same, where that depends on
    all of them."""

    key: str
    targets: tuple[str, ...]
    make: Callable[[str, Weighed], Beside]
    together: Callable[[Sequence[Weighed]], Callable[[str, Weighed], Beside]] | None = None


@runtime_checkable
class Appends(Adapter, Protocol):
    """An adapter that is one more block behind the others, which are frozen and stay as they are:
    it sees what each of them took (`Context.taken`), and no gradient passes through them."""

    @property
    def appended(self) -> LayerFacts:
        """What that block is; of the kind SIDE."""


@runtime_checkable
class Gathers(Adapter, Protocol):
    """An adapter that looks at all tokens of a document at once."""

    @property
    def whole_documents(self) -> bool:
        """Whether it does so by its settings."""


@runtime_checkable
class Changes(Adapter, Protocol):
    """An adapter that changes Linears alone, whosever they are."""

    @property
    def parts(self) -> tuple[Part, ...]: ...


@runtime_checkable
class Wraps(Adapter, Protocol):
    """An adapter that changes how blocks of a module that nobody here wrote compute."""

    def wrapping(self, model: nn.Module) -> Mapping[str, nn.Module]:
        """By path of each block, what is called with it and what it is called with, in the place of
        its own forward. OutsizeError for a module that has no such blocks."""


@runtime_checkable
class Plainer(Adapter, Protocol):
    """An adapter whose values, once trained, are those of a simpler one."""

    def plainer(self, model: nn.Module) -> tuple[Adapter, Mapping[str, Tensor]]:
        """That one, and its values by the names of parameters, of a model that has this one."""


class Weighed(Protocol):
    """A linear layer, as what is beside it sees it: a weight (d_out, d_in), and how that is cut."""

    @property
    def sizes(self) -> tuple[int, int]:
        """d_out and d_in, of what is here."""

    @property
    def use(self) -> str: ...

    @property
    def unit(self) -> Unit | None: ...

    @property
    def bias(self) -> Tensor | None: ...

    def matrix(self) -> Tensor:
        """The weight as it is multiplied by."""

    def plain(self, x: Tensor) -> Tensor:
        """x (..., d_in) -> (..., d_out): the product by the weight alone, without the bias."""


class Beside(Protocol):
    """What an adapter puts beside a Linear, a module: a change of its product that is one of its
    weight. Of a row weight that is cut it makes of a summand a summand."""

    @property
    def enters(self) -> bool:
        """Whether it reads x before the product is made: until then tokens of it may be on their
        way from other workers."""

    def __call__(self, one: Weighed, x: Tensor, /) -> Tensor:
        """x (..., d_in) -> (..., d_out), in the place of one.plain(x)."""

    def merged(self, weight: Tensor) -> Tensor:
        """The weight (d_out, d_in), float32 at least, that alone gives the same products."""

    def shift(self, bias: Tensor) -> Tensor:
        """What the layer adds in the place of its bias (d_out)."""


class Nested(nn.Module):
    """What is beside a Linear whose first components are an update of a lower rank by themselves.
    rank: how many it has; used: of so many it makes its update, None: of all."""

    rank: int
    used: int | None = None


@runtime_checkable
class Narrows(Adapter, Protocol):
    """An adapter of such modules."""

    @property
    def rank(self) -> int: ...

    def narrowed(self, rank: int) -> Adapter:
        """The one whose parameters are the first components of this one's, for a lower rank."""


@runtime_checkable
class Begins(Protocol):
    """What is beside a Linear, where its first values depend on the weight."""

    @property
    def begins(self) -> tuple[str, ...]:
        """The names of those of its parameters, in it."""

    @property
    def room(self) -> int:
        """How many tensors of the weight's size are there at once while they are made."""

    def begin(self, weight: Tensor) -> Mapping[str, Tensor]:
        """Their values by those names, in their shapes; any float dtype."""


class Squares(nn.Module):
    """Sums of squares of the rows of weight + b a, (d_out), float32 at least; that matrix is not
    made. weight (d_out, d_in), a (rank, d_in), b (d_out, rank).

    cut: d_in is cut over workers; `total` sums over them.
    """

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.cut = cut
        self.total: Callable[[Tensor], Tensor] = lambda x: x

    @torch.no_grad()
    def forward(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        weight, wide = weight.to(a.dtype), torch.promote_types(a.dtype, torch.float32)
        own = torch.linalg.vector_norm(weight, dim=1, dtype=wide).square()
        both, b = (weight @ a.t()).to(wide), b.to(wide)
        gram = (a @ a.t()).to(wide)
        return self.total(own + ((2 * both + b @ gram) * b).sum(1))


def along_output(one: Weighed, dim: int) -> Lies:
    """How a parameter lies whose `dim` is the output of a linear layer."""
    return Lies(dim, one.unit) if one.use == "column" else INSIDE


def along_input(one: Weighed, dim: int) -> Lies:
    """The same of its input."""
    return Lies(dim, one.unit) if one.use == "row" else INSIDE


class Naming(Protocol):
    """How a model's Linears are called in files."""

    def __call__(self, said: Mapping[str, Any], /) -> tuple[str, ...]:
        """The targets that name what an adapter_config.json names. OutsizeError where that is
        nothing."""

    def chosen(self, said: Mapping[str, Any], key: str, /) -> Sequence[str]:
        """The own names of the Linears that the field `key` of it names, in order."""

    def targets(self, names: Collection[str], /) -> tuple[str, ...]:
        """The targets that name these and no others, by their own names."""

    def called(self, name: str, /) -> str:
        """The full name in files of one."""


OWN = "OUTSIZE_"  # begins a peft_type that peft does not have

# By what adapter_config.json calls its peft_type: makes the adapter of such a file for a model.
FORMATS: Registry[Callable[[Mapping[str, Any], Naming], Adapter]] = Registry("adapter")
