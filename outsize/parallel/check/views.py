"""Layout rules of operators that move elements about: views, slices, joins.

A cut of a dim goes along when the cut of what it becomes has the same elements on each worker;
where it has not, the rule refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod

from outsize.parallel.check.refusal import Call, Refusal, common
from outsize.parallel.layouts import PARTIAL, REPLICATED, Layout, Sharded, sharded
from outsize.parallel.shards import even

Shape = tuple[int, ...]


def viewed(layout: Sharded, old: Shape, new: Shape, n: int) -> Sharded:
    """The cut of a tensor seen in another shape. Dims that become others stand in groups of equal
    products; the sharded one must be outermost in its group."""
    before, after = next((a, b) for a, b in groups(old, new) if layout.dim in range(a[0], a[1]))
    outer = [d for d in range(before[0], layout.dim) if old[d] != 1]
    if outer:
        raise Refusal(
            f"dim {layout.dim} of {old} is sharded and becomes part of dim {after[0]} of {new}"
            " behind others",
            "all_gather",
        )
    total = prod(old[slice(*before)])
    target = next((d for d in range(*after) if new[d] != 1), after[0])
    old_unit, new_unit = total // old[layout.dim], total // new[target]
    lengths = []
    for size in layout.lengths(old[layout.dim]):
        whole, rest = divmod(size * old_unit, new_unit)
        if rest or not _same_cuts(size, old_unit, whole, new_unit, n // layout.copies):
            raise Refusal(
                f"the cuts of dim {layout.dim} of {old} over {n} workers are no cuts of dim"
                f" {target} of {new}",
                "all_gather",
            )
        lengths.append(whole)
    return sharded(target, lengths, layout.copies)


def _same_cuts(old: int, old_unit: int, new: int, new_unit: int, n: int) -> bool:
    cuts = zip(even(0, old, n), even(0, new, n), strict=True)
    return all(a * old_unit == b * new_unit for a, b in cuts)


def groups(old: Shape, new: Shape) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Runs of dims [first, last) of the old shape and of the new one that hold the same elements,
    as short as they can be; trailing ones belong to the last run."""
    groups = []
    i = j = 0
    while i < len(old) or j < len(new):
        start, a, b = (i, j), 1, 1
        while True:
            if a <= b and i < len(old):
                a, i = a * old[i], i + 1
            elif j < len(new):
                b, j = b * new[j], j + 1
            else:
                break
            if a == b and i > start[0] and j > start[1]:
                break
        groups.append(((start[0], i), (start[1], j)))
    return groups


def view(call: Call) -> Layout:
    """view, reshape, unflatten, flatten."""
    (layout,) = call.layouts[:1]
    if isinstance(layout, Sharded):
        return viewed(layout, call.shapes[0], call.out[0], call.n)
    return layout


def moved(call: Call, order: Sequence[int]) -> Layout:
    """Dims in another order: order[i] is the old place of dim i."""
    layout = call.layouts[0]
    return layout.at(list(order).index(layout.dim)) if isinstance(layout, Sharded) else layout


def transpose(call: Call) -> Layout:
    rank = len(call.shapes[0])
    if rank < 2:
        return call.layouts[0]
    a, b = (d % rank for d in (call.numbers[:2] if len(call.numbers) >= 2 else (0, 1)))
    order = list(range(rank))
    order[a], order[b] = order[b], order[a]
    return moved(call, order)


def permute(call: Call) -> Layout:
    rank = len(call.shapes[0])
    return moved(call, [d % rank for d in call.args[1]])


def unsqueeze(call: Call) -> Layout:
    layout, dim = call.layouts[0], call.args[1] % len(call.out[0])
    return layout.at(layout.dim + (layout.dim >= dim)) if isinstance(layout, Sharded) else layout


def squeeze(call: Call) -> Layout:
    layout, shape = call.layouts[0], call.shapes[0]
    if not isinstance(layout, Sharded):
        return layout
    gone = call.args[1:] or [[d for d, size in enumerate(shape) if size == 1]]
    dims = gone[0] if isinstance(gone[0], (list, tuple)) else [gone[0]]
    gone = [d % len(shape) for d in dims if shape[d] == 1]
    if layout.dim in gone:
        raise Refusal(f"dim {layout.dim} is sharded and squeezed away", "all_gather")
    return layout.at(layout.dim - sum(d < layout.dim for d in gone))


def expand(call: Call) -> Layout:
    layout, grown = call.layouts[0], len(call.out[0]) - len(call.shapes[0])
    return layout.at(layout.dim + grown) if isinstance(layout, Sharded) else layout


def window(layout: Sharded, size: int, first: int, last: int) -> Sharded:
    """The cut of rows [first, last) of a sharded dim: those of whole segments."""
    if (first, last) == (0, size):
        return layout
    ends = list(accumulate(layout.lengths(size), initial=0))
    if first not in ends or last not in ends:
        raise Refusal(
            f"rows {first} to {last} of dim {layout.dim} are taken, which is sharded and has"
            f" segments that end at {ends[1:]}",
            "all_gather",
        )
    return sharded(
        layout.dim, layout.lengths(size)[ends.index(first) : ends.index(last)], layout.copies
    )


def _window(call: Call) -> tuple[int, int, int | None, int]:
    """(dim, first, last, step), with their defaults."""
    given = (*call.args[1:], *(0, 0, None, 1)[len(call.args) - 1 :])
    dim, first, last, step = list(given)
    return dim, first, last, step


def slice_(call: Call) -> Layout:
    layout, shape = call.layouts[0], call.shapes[0]
    dim, first, last, step = _window(call)
    dim %= len(shape)
    if not isinstance(layout, Sharded) or dim != layout.dim:
        return layout
    if step != 1:
        raise Refusal(f"every {step}. row of dim {dim} is taken, which is sharded", "all_gather")
    size = shape[dim]
    first, last, _ = slice(first, last).indices(size)
    return window(layout, size, first, last)


def split(call: Call) -> list[Layout]:
    """split, chunk: one layout for each piece."""
    layout, count = call.layouts[0], len(call.out)
    dim = (call.args[2] if len(call.args) > 2 else call.kwargs.get("dim", 0)) % len(call.shapes[0])
    if not isinstance(layout, Sharded) or dim != layout.dim:
        return [layout] * count
    ends = list(accumulate((shape[dim] for shape in call.out), initial=0))
    size = call.shapes[0][dim]
    return [window(layout, size, a, b) for a, b in pairwise(ends)]


def without(call: Call) -> list[Layout]:
    """select, unbind: a dim goes."""
    layout = call.layouts[0]
    dim = (call.args[1] if len(call.args) > 1 else 0) % len(call.shapes[0])
    if not isinstance(layout, Sharded):
        return [layout] * len(call.out)
    if layout.dim == dim:
        raise Refusal(f"one row of dim {dim} is taken, which is sharded", "all_gather")
    return [layout.at(layout.dim - (dim < layout.dim))] * len(call.out)


def cat(call: Call) -> Layout:
    """cat: parts of parts that follow one another are segments."""
    dim = (call.args[1] if len(call.args) > 1 else 0) % len(call.out[0])
    layouts = call.layouts
    if any(x == PARTIAL for x in layouts):
        return common(layouts, "joined")
    cuts = [x for x in layouts if isinstance(x, Sharded)]
    if len(cuts) < len(layouts) or len({(x.dim, x.copies) for x in cuts}) > 1:
        return common(layouts, "joined")
    if cuts[0].dim != dim:
        return common(layouts, "joined")
    lengths = [s for x, shape in zip(cuts, call.shapes, strict=True) for s in x.lengths(shape[dim])]
    return sharded(dim, lengths, cuts[0].copies)


def stack(call: Call) -> Layout:
    layout = common(call.layouts, "stacked")
    dim = (call.args[1] if len(call.args) > 1 else 0) % len(call.out[0])
    return layout.at(layout.dim + (layout.dim >= dim)) if isinstance(layout, Sharded) else layout


def index(call: Call) -> Layout:
    """Rows by number: x[numbers], of a dim that is not sharded."""
    layout, *numbers = call.layouts
    if any(x != REPLICATED for x in numbers):
        raise Refusal(
            "rows are chosen by numbers that are not the same on all workers", "all_gather"
        )
    if not isinstance(layout, Sharded):
        return layout
    places = [i for i, x in enumerate(call.args[1]) if x is not None]
    if len(places) != 1 or places[0] == layout.dim:
        raise Refusal(f"rows of dim {layout.dim} are chosen, which is sharded", "all_gather")
    more = len(call.out[0]) - len(call.shapes[0])
    return layout.at(layout.dim + (more if places[0] < layout.dim else 0))


VIEWS: Mapping[str, Callable[[Call], Layout | list[Layout]]] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias"), view),
    "transpose": transpose,
    "t": transpose,
    "permute": permute,
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    "expand": expand,
    "slice": slice_,
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), split),
    **dict.fromkeys(("select", "unbind"), without),
    "cat": cat,
    "stack": stack,
    **dict.fromkeys(("index", "_unsafe_index"), index),
}
