"""What `outsize serve` would hold and take, while no weight is read, for `outsize plan --serve`.

Bytes are those that a server is started with (room.py). Seconds are those of a few layers without
values of their own and, where weights stay in files, of reading as many; on several workers, of one
token and of some.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outsize.checkpoint.hub import Described
from outsize.collectives import Mesh, along
from outsize.collectives.pretend import PretendWorld
from outsize.decode.generate import Request
from outsize.decode.samplers import Sampling
from outsize.errors import OutsizeError
from outsize.hardware import host
from outsize.memory.sizes import format_bytes
from outsize.models.decoder import Decoder, typed
from outsize.parallel.tensor.decoder import split
from outsize.runtime.tokens.cycle import layout_of
from outsize.serve.below import settled
from outsize.serve.budget import over_stages
from outsize.serve.forecast import Spread, give, read_rate
from outsize.serve.lying import notes_on, refuse
from outsize.serve.price import Curve, Price
from outsize.serve.probed import probed
from outsize.serve.room import (
    PROMPT,
    Served,
    Sizes,
    Wanted,
    beside,
    context_of,
    fitting,
    notes_of,
    on_mesh,
    room_of,
    sizes_of,
)
from outsize.serve.shells import shells
from outsize.serve.slo import unkept
from outsize.simulate.tokens import LEAST_SLICE, Needs, Seconds, timed

ONE = Mesh()
_FILLED = 256 << 20  # bytes of layers that are timed, where they are so many


def planned(
    found: Described,
    wanted: Wanted,
    memory: int | None,
    mesh: Mesh = ONE,
    dtype: torch.dtype | None = None,
) -> Served:
    """Of a model on one worker, or on those of a mesh on this machine, each within `memory` bytes
    where they are given. dtype: None: that of the files. OutsizeError as of `outsize serve`."""
    spread = Spread.of(found, mesh, dtype)
    model = shells(found, spread.dtypes, torch.device("cpu"))
    split(model, along(PretendWorld(Mesh(tensor=mesh.tensor)), "tensor"))
    refuse(wanted.lies, torch.device("cpu"), mesh.size)
    context = context_of(found.model, wanted.context)
    tokens, width = min(wanted.budget, context), spread.dtypes["prologue.tokens.weight"]
    each = [block.mixer.states(width) for block in typed(model.blocks)]
    left = [one for some in each for one in some]
    sizes = [
        sizes_of(
            held,
            [one for layer, some in enumerate(each) if held.has(layer + 1) for one in some],
            wanted, context, tokens,
        )
        for held in spread.division.held
    ]  # fmt: skip
    staying: tuple[str, ...] = ()
    if memory is None:
        weights, pages = spread.division.weights, _pages(spread, sizes, context)
        price = _of_all(spread, tokens) if mesh.size > 1 else _price(
            model, range(len(model.blocks) + 2), tokens, context
        )  # fmt: skip
    else:
        weights, pages, price, staying = _from_files(
            spread, model, sizes, memory, tokens, context, dtype
        )
    room = room_of(wanted, sizes[0], pages, tokens, context, price)
    shares = tuple(
        (own, pages * one.page + one.slots, one.work)
        for own, one in zip(weights, sizes, strict=True)
    )
    room, below, why = settled(
        room, wanted.below, sizes[0].page, mesh.size, left, spread.division.held[0].device, str
    )
    if below is not None:
        below.close()
    notes = (
        *notes_of(model, left, wanted.form), *staying, *on_mesh(mesh, room, [0.0] * mesh.size),
        *unkept(wanted.slo, price, min(PROMPT, context), tokens), *notes_on(room, sizes[0].page),
        *why,
    )  # fmt: skip
    where = str(mesh) if mesh.size > 1 else ""
    return Served(room, None, *shares[0], notes, where, shares)


def _pages(spread: Spread, sizes: Sequence[Sizes], context: int) -> int:
    """As many as the worker with least room for them has, all in this machine's memory."""
    free, mesh = host.memory().available, spread.mesh
    weights = sum(spread.division.weights) * mesh.tensor
    if weights > free:
        raise OutsizeError(
            f"{format_bytes(weights)} of weights are more than the {format_bytes(free)} of"
            " memory that are free: give --memory SIZE, beyond which they stay in their files"
        )
    return min(fitting((free - weights) // mesh.size, one, context) for one in sizes)


def _from_files(
    spread: Spread,
    model: Decoder,
    sizes: Sequence[Sizes],
    memory: int,
    tokens: int,
    context: int,
    dtype: torch.dtype | None,
) -> tuple[list[int], int, Price, tuple[str, ...]]:
    """Bytes of weights by stage of the pipeline, pages, the price of steps, and what is read."""
    budgets = spread.budgets(memory, dtype)
    pages = min(beside(budget, one) for (_, budget), one in zip(budgets, sizes, strict=True))
    asked = [Needs(pages * one.page + one.slots, one.work, tokens - 1) for one in sizes]
    rooms = [budget.short(own) for (_, budget), own in zip(budgets, asked, strict=True)]
    if (worst := max(rooms, key=lambda room: room.missing)).missing:
        raise worst.refusal(pages * sizes[0].tokens)
    lies = [
        layout_of(known, budget.pool(own))
        for (known, budget), own in zip(budgets, asked, strict=True)
    ]
    weights = [
        budget.share(lie, own).weights + budget.buffers
        for (_, budget), lie, own in zip(budgets, lies, asked, strict=True)
    ]
    read = sum(lie.read for lie in lies)
    if spread.mesh.size == 1:
        (known, _), (lie,) = budgets[0], lies
        rate = read_rate(known, timed(spread.found.model, lie.filled))
        price = _price(model, lie.filled, tokens, context, lie.read / rate)
        said = f", at {format_bytes(rate)}/s"
    else:
        request = _first(tokens)
        each = [
            spread.from_files(turn, known, lie, request, len(request.ids) - 1)
            for turn, ((known, _), lie) in enumerate(zip(budgets, lies, strict=True))
        ]
        price, said = _curve(over_stages(each, 1), len(request.ids)), ""
    staying = f"{format_bytes(read)} of weights stay in their files and are read in each step{said}"
    return weights, pages, price, (staying,) if read else ()


def _of_all(spread: Spread, tokens: int) -> Price:
    """Of several workers: cached tokens take no time."""
    request = _first(tokens)
    return _curve(spread.in_memory(request, len(request.ids) - 1), len(request.ids))


def _first(tokens: int) -> Request:
    """A prompt that is timed for all, of steps of so many tokens."""
    return Request((0,) * min(LEAST_SLICE, tokens), 1, Sampling())


def _curve(spent: Seconds, some: int) -> Price:
    return Price(
        Curve(((1, spent.token), (some, spent.prompt)) if some > 1 else ((1, spent.token),))
    )


def _price(
    model: Decoder, here: Sequence[int], budget: int, context: int, reading: float = 0.0
) -> Price:
    """By some of the stages here, which are given values for as long."""
    last, some, size = len(model.blocks) + 1, list[int](), 0
    few = timed(model, here)
    for stage in [s for s in here if 0 < s < last]:
        size += sum(x.nbytes for x in model.blocks[stage - 1].parameters())
        if stage in few or (size <= _FILLED and not model.config.rewired):
            some.append(stage)
    some += [last] if last in here else []
    give(model, some, _value)
    return probed(model, some, budget, context, reading)


def _value(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype).fill_(0.01)
