"""What `outsize serve` would hold and take, while no weight is read, for `outsize plan --serve`.

Bytes are those that a server is started with (room.py). Seconds are those of a few layers without
values of their own and, where weights stay in files, of reading as many.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from outsize.checkpoint.hub import Described
from outsize.collectives import Mesh
from outsize.decode.paged import PAGE
from outsize.errors import OutsizeError
from outsize.hardware import host
from outsize.memory.sizes import format_bytes
from outsize.models.decoder import Decoder, typed
from outsize.parallel.tensor.units import cuts_of
from outsize.runtime.tokens.cycle import layout_of
from outsize.runtime.tokens.parts import Mine
from outsize.runtime.tokens.source import outline
from outsize.serve.asks import Room
from outsize.serve.budget import Budget
from outsize.serve.forecast import give, read_rate
from outsize.serve.meshed import Division
from outsize.serve.price import Price
from outsize.serve.probed import probed
from outsize.serve.room import Served, Wanted, beside, context_of, fitting, notes_of, sizes_of
from outsize.serve.shells import shells
from outsize.simulate.tokens import Needs, timed

_FILLED = 256 << 20  # bytes of layers that are timed, where they are so many


def planned(found: Described, wanted: Wanted, memory: int | None) -> Served:
    """Of a model on one worker, within `memory` bytes where they are given. OutsizeError as of
    `outsize serve`."""
    dtypes = found.dtypes(None)
    model = shells(found, dtypes, torch.device("cpu"))
    division = Division.of(found.model, dtypes, Mesh())
    held, context = division.held[0], context_of(found.model, wanted.context)
    tokens, dtype = min(wanted.budget, context), held.dtypes["prologue.tokens.weight"]
    left = [one for block in typed(model.blocks) for one in block.mixer.states(dtype)]
    sizes = sizes_of(held, left, wanted, context, tokens)
    every, weights = range(len(model.blocks) + 2), sum(division.weights)
    staying: tuple[str, ...] = ()
    if memory is None:
        free = host.memory().available
        if weights > free:
            raise OutsizeError(
                f"{format_bytes(weights)} of weights are more than the {format_bytes(free)} of"
                " memory that are free: give --memory SIZE, beyond which they stay in their files"
            )
        pages = fitting(free - weights, sizes, context)
        price = _price(model, list(every), tokens, context)
    else:
        known = outline(found, None, Mine(cuts_of(found.model, 1, 0, False), held.here))
        budget = Budget(memory, replace(held, stored=known.table.dtype), known)
        pages = beside(budget, sizes)
        asked = Needs(pages * sizes.page + sizes.slots, sizes.work, tokens - 1)
        if budget.missing(asked):
            raise budget.short(asked).refusal(pages * PAGE)
        layout = layout_of(known, budget.pool(asked))
        rate = read_rate(known, timed(found.model, layout.filled))
        price = _price(model, layout.filled, tokens, context, layout.read / rate)
        weights = budget.share(layout, asked).weights + budget.buffers
        if layout.read:
            staying = (
                f"{format_bytes(layout.read)} of weights stay in their files and are read in each"
                f" step, at {format_bytes(rate)}/s",
            )
    cache = pages * sizes.page + sizes.slots
    queue = wanted.queue if wanted.queue is not None else 4 * pages * PAGE
    room = Room(
        pages, PAGE, wanted.requests, tokens, queue, context, price, wanted.slo, wanted.cache
    )
    notes = (*notes_of(model, left, wanted.cache), *staying)
    share = weights, cache, sizes.work
    return Served(room, None, *share, notes, "", (share,))


def _price(
    model: Decoder, here: list[int], budget: int, context: int, reading: float = 0.0
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
