"""WholeTensors: parameters (and states of their shape) that lie in parts on an axis of the mesh,
put together and taken apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain, pairwise
from math import prod

import torch
from torch import Tensor

from outsize.collectives import Collective, World, along
from outsize.models.cuts import Cut, Span
from outsize.torch_private import unset_fake_temporarily

Fill = Callable[[str, Tensor], None]


class WholeTensors:
    """Knows which part of every parameter each worker of its axis has; the workers ask each other
    at the first call of `whole`, which all make for the same names in the same order."""

    def __init__(self, cuts: Mapping[str, Cut], world: World) -> None:
        self._cuts = cuts
        names = sorted({cut.axis for cut in cuts.values()}, reverse=True)
        self._axes = {name: along(world, name) for name in names}
        self._known: Mapping[str, list[tuple[Span, ...]]] | None = None

    @property
    def _parts(self) -> Mapping[str, list[tuple[Span, ...]]]:
        """By name of what is cut, the part of each worker. Not a cached_property: Python 3.11 locks
        those of all instances, and workers that are threads would wait for one another for ever."""
        if self._known is None:
            self._known = self._asked()
        return self._known

    def _asked(self) -> Mapping[str, list[tuple[Span, ...]]]:
        found: dict[str, list[tuple[Span, ...]]] = {}
        for name, axis in self._axes.items():
            parts = {n: c for n, c in self._cuts.items() if c.dim is not None and c.axis == name}
            if parts:
                found |= self._asked_of(parts, axis)
        return found

    @staticmethod
    def _asked_of(
        cuts: Mapping[str, Cut], axis: Collective
    ) -> Mapping[str, list[tuple[Span, ...]]]:
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
        cut = self._cuts.get(name)
        if cut is None or cut.dim is None:
            return local
        if all(spans == ((0, cut.shape[cut.dim]),) for spans in self._parts[name]):
            return local  # one key-value head, which every worker has
        parts = [replace(cut, spans=spans) for spans in self._parts[name]]
        offsets = [0]
        for part in parts:
            offsets.append(offsets[-1] + prod(part.local))
        places = list(pairwise(offsets))
        every = local.new_empty(offsets[-1])
        self._axes[cut.axis].all_gather(local.contiguous().flatten(), places, every)
        out = local.new_empty(cut.shape)
        for part, (first, last) in zip(parts, places, strict=True):
            part.put(out, every[first:last].view(part.local))
        return out

    def local(self, name: str, whole: Tensor) -> Tensor:
        """What lies here of a whole tensor: a view of it or a copy."""
        return self._cuts[name].of(whole) if name in self._cuts else whole

    def shape(self, name: str, local: Tensor) -> tuple[int, ...]:
        """The shape of a whole parameter of which `local` lies here."""
        return self._cuts[name].shape if name in self._cuts else tuple(local.shape)

    def cutting(self, fill: Fill, suffix: str = "") -> Fill:
        """A fill that writes what lies here, from one that writes whole parameters. suffix: behind
        a parameter's name."""

        def filled(name: str, out: Tensor) -> None:
            cut = self._cuts.get(name.removesuffix(suffix))
            if cut is None or cut.dim is None:
                fill(name, out)
                return
            whole = out.new_empty(cut.shape)
            fill(name, whole)
            out.copy_(cut.of(whole))

        return filled
