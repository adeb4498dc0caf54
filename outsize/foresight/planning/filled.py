"""Layouts of a cell with as much computed again, and as much resting below, as room asks for."""

from __future__ import annotations

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

    def fits(layout: Layout) -> bool:
        held = known.memory(graded(layout))
        return held.process <= room and resting.hold(cell.cluster, layout, held.below)

    for layout in map(graded, variants(known.shape, asked, cell)):
        if layout.recompute == "none":
            plain = fits(layout)
        elif allow("recompute", "part") and not plain and fits(layout):
            for each in _part(known.shape, replace(layout, recompute="none"), fits):
                found.append((graded(each), known.memory(graded(each))))
        held = known.memory(layout)
        if allow("recompute", layout.recompute) and resting.hold(cell.cluster, layout, held.below):
            found.append((layout, held))
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

    low, high = 1, shape.layers + 1
    while low < high:
        middle = (low + high) // 2
        if within(of(middle)):
            high = middle
        else:
            low = middle + 1
    return of(low) if low <= shape.layers else whole


def _part(shape: Shape, layout: Layout, fits: Callable[[Layout], bool]) -> list[Layout]:
    """With the fewest layers of a stage recomputed that let it fit; none where it takes all."""
    low, most = 1, int(layers_of(shape.layers, layout.pipeline)[0])
    high = most
    while low < high:
        middle = (low + high) // 2
        if fits(replace(layout, whole=middle)):
            high = middle
        else:
            low = middle + 1
    return [replace(layout, whole=low)] if low < most else []
