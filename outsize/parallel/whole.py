"""WholeTensors: parameters (and states of their shape) that lie in parts on axes of the mesh, put
together and taken apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from math import prod

import torch
from torch import Tensor

from outsize.collectives import Collective, World, along
from outsize.models.cuts import Cut, Span
from outsize.torch_private import unset_fake_temporarily

Fill = Callable[[str, Tensor], object]
Parts = Mapping[str, list[tuple[Span, ...]]]  # by name of what is cut, that of each worker
Lies = tuple[list[Cut], list[Span]]


class WholeTensors:
    """Knows which part of every parameter each worker of its axes has; the workers ask each other
    at the first call of `whole`, which all make for the same names in the same order."""

    def __init__(self, cuts: Mapping[str, Cut], world: World) -> None:
        self._cuts = cuts
        self._on: dict[str, dict[str, Cut]] = {}  # what is cut, by axis and by name
        for name, cut in cuts.items():
            for level in (one for one in cut.levels if one.dim is not None):
                self._on.setdefault(level.axis, {})[name] = level
        self._axes = {axis: along(world, axis) for axis in self._on}
        self._known: Mapping[str, Parts] | None = None
        self._lying: dict[tuple[str, str], Lies] = {}

    @property
    def _parts(self) -> Mapping[str, Parts]:
        """By axis. Not a cached_property: Python 3.11 locks those of all instances, and workers
        that are threads would wait for one another for ever."""
        if self._known is None:
            self._known = {n: self._asked(self._on[n], axis) for n, axis in self._axes.items()}
        return self._known

    @staticmethod
    def _asked(cuts: Mapping[str, Cut], axis: Collective) -> Parts:
        names = sorted(cuts)
        ends = [0]
        for name in names:
            ends.append(ends[-1] + len(cuts[name].spans))
        numbers = list(chain.from_iterable(cuts[n].spans for n in names))
        # A rehearsal has no numbers from others: there its own parts stand for theirs.
        with unset_fake_temporarily():
            mine = torch.tensor(numbers, dtype=torch.int64).flatten()
            every = mine.repeat(axis.size)
            each = 2 * ends[-1]
            places = [(r * each, (r + 1) * each) for r in range(axis.size)]
            axis.all_gather(mine, places, every)
            rows = every.view(axis.size, ends[-1], 2).tolist()
        return {
            name: [tuple((a, b) for a, b in row[first:last]) for row in rows]
            for name, (first, last) in zip(names, pairwise(ends), strict=True)
        }

    def whole(self, name: str, local: Tensor) -> Tensor:
        """The whole of a tensor that has a parameter's shape, of which `local` lies here. The
        tensor itself where it is whole."""
        levels = self._cuts[name].levels if name in self._cuts else ()
        for cut in (one for one in reversed(levels) if one.dim is not None):
            local = self._joined(name, cut, local)
        return local

    def _joined(self, name: str, cut: Cut, local: Tensor) -> Tensor:
        """What a cut of a parameter along one axis is of."""
        parts, places = self._lies(name, cut)
        if not parts:
            return local
        every = local.new_empty(places[-1][1])
        self._axes[cut.axis].all_gather(local.contiguous().flatten(), places, every)
        out = local.new_empty(cut.shape)
        for part, (first, last) in zip(parts, places, strict=True):
            part.put(out, every[first:last].view(part.local))
        return out

    def _lies(self, name: str, cut: Cut) -> Lies:
        """The workers' parts along an axis, and where they lie one behind another; nothing where
        every worker has all of it, as of one key-value head."""
        key = name, cut.axis
        if key not in self._lying:
            assert cut.dim is not None
            every_part, whole = self._parts[cut.axis][name], ((0, cut.shape[cut.dim]),)
            parts = [replace(cut, spans=spans) for spans in every_part]
            if all(spans == whole for spans in every_part):
                parts = []
            ends = accumulate((prod(part.local) for part in parts), initial=0)
            self._lying[key] = parts, list(pairwise(ends))
        return self._lying[key]

    def runs(self, name: str) -> Sequence[Span]:
        """The elements [first, last) of a whole parameter that lie here, in order; () for all."""
        return self._cuts[name].runs() if name in self._cuts else ()

    def local(self, name: str, whole: Tensor) -> Tensor:
        """What lies here of a whole tensor: a view of it or a copy."""
        return self._cuts[name].of(whole) if name in self._cuts else whole

    def shape(self, name: str, local: Tensor) -> tuple[int, ...]:
        """The shape of a whole parameter of which `local` lies here."""
        return self._cuts[name].whole if name in self._cuts else tuple(local.shape)

    def cutting(self, fill: Fill, suffix: str = "") -> Fill:
        """A fill that writes what lies here, from one that writes whole parameters. suffix: behind
        a parameter's name."""

        def filled(name: str, out: Tensor) -> None:
            cut = self._cuts.get(name.removesuffix(suffix))
            if cut is None or cut.whole == tuple(out.shape):
                fill(name, out)
                return
            whole = out.new_empty(cut.whole)
            fill(name, whole)
            out.copy_(cut.of(whole))

        return filled
