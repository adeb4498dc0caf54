"""Layouts of a cell with as much computed again, and as much resting below, as room asks for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from outsize.foresight import resting
from outsize.foresight.layout import Layout
from outsize.foresight.memory import Memory
from outsize.foresight.planning.asked import Asked
from outsize.foresight.planning.known import Known
from outsize.foresight.planning.layouts import Cell, variants
from outsize.foresight.shape import Shape
from outsize.foresight.step import layers_of


def filled(known: Known, asked: Asked, cell: Cell, room: int) -> list[tuple[Layout, Memory]]:
    """Variants with their bytes, whose tiers have room for what rests there; between nothing and
    everything recomputed, as few layers as fit: blocks are equal, so that which ones they are makes
    no difference."""
    found = []
    allow = asked.conditions.allow
    plain = True  # whether the variant before, with nothing recomputed, fits

    def within(layout: Layout) -> bool:
        return known.memory(layout).process <= room

    def graded(layout: Layout) -> Layout:
        return _graded(known.shape, layout, within)

    def held(layout: Layout) -> bool:
        return resting.hold(cell.cluster, layout, known.memory(layout).below)

    def fits(layout: Layout) -> bool:
        return within(layout) and held(layout)

    for layout in map(graded, variants(known.shape, asked, cell)):
        if layout.recompute == "none":
            plain = fits(layout)
        elif allow("recompute", "part") and not plain and fits(layout):
            whole = replace(layout, recompute="none")
            part = _part(known.shape, whole, lambda each: fits(graded(each)))
            found += [(each, known.memory(each)) for each in map(graded, part)]
        if allow("recompute", layout.recompute) and held(layout):
            found.append((layout, known.memory(layout)))
    return found


def _graded(shape: Shape, layout: Layout, within: Callable[[Layout], bool]) -> Layout:
    """With what rests below last of as few blocks as the device lacks room for: of all, where even
    that is too little. A module's may be unlike, so that they go together."""
    at = replace(layout.resting, layers=0)
    whole = replace(layout, resting=at)
    if shape.module is not None or not at.optimizer or not within(whole):
        return whole

    def of(layers: int) -> Layout:
        return replace(layout, resting=replace(at, layers=layers))

    least = _least(shape.layers, lambda layers: within(of(layers)))
    return of(least) if least <= shape.layers else whole


def _part(shape: Shape, layout: Layout, fits: Callable[[Layout], bool]) -> list[Layout]:
    """With the fewest layers of a stage recomputed that let it fit; none where it takes all."""
    most = int(layers_of(shape.layers, layout.pipeline)[0])
    least = _least(most - 1, lambda layers: fits(replace(layout, whole=layers)))
    return [replace(layout, whole=least)] if least < most else []


def _least(most: int, enough: Callable[[int], bool]) -> int:
    """The least number from 1 to `most` that is enough, where every larger one is; else one more
    than `most`."""
    return 1 + bisect_left(range(1, most + 1), True, key=enough)
