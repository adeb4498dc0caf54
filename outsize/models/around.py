"""The seam around a branch: what an adapter makes of what attention or the MLP of a block gives.

A branch is a module that gives a change of the residual stream. What is around it sees what it
took and what it gave, and says what goes on in the place of that: before the branch's own norm, its
dropout and the sum. It lies in the stream, where a worker has all features of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from outsize.errors import OutsizeError
from outsize.models.adapter import Adapter
from outsize.models.decoder import BRANCHES, Block, Decoder, around_of, typed
from outsize.models.targets import freeze, some

BRANCH = "attention, mlp: branches of the blocks"


class Around(Protocol):
    """What an adapter puts around a branch, a module."""

    @property
    def sizes(self) -> tuple[int, int]:
        """d_in and d_out: features that the branch takes and gives."""

    def __call__(self, x: Tensor, y: Tensor, /) -> Tensor:
        """What goes on, (..., d_out), of what the branch took, (..., d_in), and gave."""


@dataclass(frozen=True)
class Place:
    """Some of the branches that an adapter changes. key: the setting that says which; make: gives
    what is around one, an Around, from its d_in and d_out."""

    key: str
    targets: tuple[str, ...]
    make: Callable[[int, int], nn.Module]


@runtime_checkable
class Surrounds(Adapter, Protocol):
    """An adapter that changes what branches give, whosever they are."""

    @property
    def places(self) -> tuple[Place, ...]: ...


def surround(model: nn.Module, places: tuple[Place, ...]) -> None:
    """Freeze a decoder and put around the branches of its blocks what an adapter says. OutsizeError
    as of `placed`, and for a model whose branches are wired otherwise."""
    assert isinstance(model, Decoder), "attached to one"
    blocks = [one for one in typed(model.blocks) if isinstance(one, Block)]
    if len(blocks) < len(model.blocks):
        raise OutsizeError(
            f"{places[0].key}: the model has {model.config.rewired}, whose branches are summed"
            " later than they give; adapt the plain model instead"
        )
    width = (model.config.hidden,) * 2
    found = [list(placed(places, dict.fromkeys(BRANCHES, width))) for _ in blocks]
    freeze(model)
    for block, own in zip(blocks, found, strict=True):
        for name, made in own:
            setattr(block, around_of(name), made)


def placed(
    places: Iterable[Place], every: Mapping[str, tuple[int, int]]
) -> Iterator[tuple[str, nn.Module]]:
    """(name of a branch, what is around it) of what an adapter changes. every: by name, d_in and
    d_out of what may be changed. OutsizeError for a target that names none, and for a branch that
    is named twice."""
    done = set[str]()
    for place in (places := tuple(places)):
        if not every:
            raise OutsizeError(f"{place.key}: the model has no branch with linear layers in it")
        for target in place.targets:
            if not any(_matches(name, target) for name in every):
                raise OutsizeError(
                    f"{place.key}: {target!r} names no branch of this model; expected some of"
                    f" {some(every)}"
                )
        for name, sizes in every.items():
            if not any(_matches(name, target) for target in place.targets):
                continue
            if name in done:
                raise OutsizeError(f"{place.key}: {name} is named twice; expected each once")
            done.add(name)
            yield name, place.make(*sizes)
    if places and not done:
        raise OutsizeError(
            f"{' and '.join(one.key for one in places)}: no branch is named; expected some of"
            f" {some(every)}"
        )


def _matches(path: str, target: str) -> bool:
    return f".{path}".endswith(f".{target}") or fnmatchcase(path, target)
