"""The price of serving's steps, by timing some through a few stages of a model whose weights are in
memory, as the engine plays them: over pages, each token alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace

import torch

from outsize import accelerator
from outsize.decode.generate import GREEDY
from outsize.decode.paged import PagedCache, PagedPast, Part
from outsize.decode.runs import Run, each_alone, runs_of
from outsize.hardware.host import gather_huge
from outsize.kernels import native, rows
from outsize.models.decoder import Decoder
from outsize.models.seams import Context
from outsize.serve.price import Curve, Price
from outsize.simulate.kept import kept
from outsize.simulate.tokens import HOST, Pace, resident, timed

_COUNTS = (1, 4, 16, 64, 256, 1024)  # tokens of a step that are timed
_WIDE = 256  # tokens from which on what is computed tells, not what is read: a few blocks say all
_LONG = 0.1  # seconds of one timing, beyond which no larger one follows
_DEEP = 1024  # cached tokens that are visited, at most
_VISITING = 8  # tokens that visit them
_DRAWN = (1, 8, 64)  # tokens whose logits are timed, as long as that takes less than _LONG
_PAGE = 16
_LOOKED = (1, 16)  # tokens of a step that are timed again at a later start
_BUSY = 2.0  # times this thread's processor time, beyond which others have it
_SAME = 0.25  # of its seconds, within which a step takes what it took
_RUN = 64 << 20  # bytes that come to lie in huge pages at once
_SCATTERED = 1.2  # of its seconds, what a step takes more at most before weights lie in huge pages


@torch.no_grad()
def priced(model: Decoder, budget: int, context: int) -> Price:
    """Of a model that is in memory as a whole: what an earlier start has found, where steps of few
    tokens take now what they took then, or else as `probed` finds it.

    A later start does not wait for huge pages, which take 3 s a GiB in a guest: the engine has
    weights lie there while nobody asks.
    """
    stages = range(len(model.blocks) + 2)

    def holds(known: Price) -> bool:
        native.ready(model.prologue.tokens.weight, not model.config.rounded)
        run = runs_of(model) or each_alone
        few = timed(model, stages[1:-1])
        for count, then in known.blocks.points:
            blocks = few if model.config.rewired or then > _LONG else stages[1:-1]
            if count in _LOOKED:
                now = _through(model, blocks, 0, count, run).whole(model, stages[1:-1])
                if not (1 - _SAME) * then <= now <= (1 + _SAME) * _SCATTERED * then:
                    return False
        return True

    with rows.alone():
        key = (resident(model), budget, context)
        return kept(Price, key, lambda: probed(model, stages, budget, context), holds)


@torch.no_grad()
def probed(
    model: Decoder, here: Collection[int], budget: int, context: int, reading: float = 0.0
) -> Price:
    """here: stages whose weights are in memory; reading: seconds of the files in every step."""
    from outsize.serve.around import around  # which takes steps, and times these too

    weight = model.prologue.tokens.weight
    native.ready(weight, not model.config.rounded)
    for spans in scattered(model):
        gather_huge(spans)  # where steps read them a sixth faster
    found = computing(model, here, budget, context, reading)
    with rows.alone():
        own = around(weight.dtype, weight.device, model.config.rounded and weight.is_cpu)
    draw = drawing(model)
    each = own.each + draw
    head = Curve(tuple((n, seconds + n * each) for n, seconds in found.head.points))
    return replace(found, head=head, host=own.step, draw=draw)


def computing(
    model: Decoder, here: Collection[int], budget: int, context: int, reading: float = 0.0
) -> Price:
    """As `probed`, of what the model itself takes."""
    last = len(model.blocks) + 1
    every = set(here) & set(range(1, last))
    few = timed(model, every)
    # Few blocks may stay in the processor's caches, which all of them would not.
    blocks = few if model.config.rewired else sorted(every)
    # As the engine takes them: together where weights stay.
    run = (None if reading else runs_of(model)) or each_alone
    windows = [min(one.window or context, context) for one in model.config.layers]
    with rows.alone():
        fed = list[tuple[int, float]]()
        for count in [n for n in _COUNTS if n <= budget]:
            blocks = few if count >= _WIDE else blocks
            spent = _through(model, blocks, 0, count, run)
            fed.append((count, spent.whole(model, range(1, last))))
            if spent.seconds > _LONG:
                if blocks == few:
                    break
                blocks = few
        depth = max(0, min(_DEEP, context - _VISITING))
        ones, some = (_behind(model, few, depth, count, run) for count in (1, _VISITING))
        head = list[tuple[int, float]]()
        for count in _DRAWN:
            if not head or count * head[-1][1] < _LONG * head[-1][0]:
                head.append((count, _head(model, last in here, count, fed[0][1])))
    reach = round(sum(windows) / max(len(windows), 1))
    seen = max(1, min(depth, reach))
    visit = max(0.0, some - ones) / (_VISITING - 1) / seen
    load = max(0.0, ones / seen - visit)
    return Price(Curve(tuple(fed)), Curve(tuple(head)), visit, load, reach, reading)


def drawing(model: Decoder) -> float:
    """Seconds of drawing the likeliest token from its logits."""
    logits_V = model.prologue.tokens.weight.new_zeros(model.config.vocab, device=HOST)
    return quickest(lambda: GREEDY(logits_V, 0), HOST)


def scattered(model: Decoder) -> list[list[tuple[int, int]]]:
    """The address and bytes of each weight that is here, in runs that are gathered at once."""
    # Of a weight that is elsewhere there is one element here, which stands for all.
    here = (x for x in model.parameters() if x.device == HOST and x.is_contiguous())
    runs, held = list[list[tuple[int, int]]](), _RUN
    for address, nbytes in sorted((x.data_ptr(), x.nbytes) for x in here):
        if held >= _RUN:
            runs.append([])
            held = 0
        runs[-1].append((address, nbytes))
        held += nbytes
    return runs


def _through(model: Decoder, blocks: Collection[int], start: int, tokens: int, run: Run) -> Pace:
    """Of a prompt's tokens behind `start` ones. run: how blocks are taken."""
    device = model.prologue.tokens.weight.device
    pages = -(-(start + tokens) // _PAGE)
    past = PagedPast(PagedCache(pages, _PAGE, 1), (Part(range(pages), start, tokens, 0, 0),))
    x_TD = model.prologue.tokens.weight.new_zeros(tokens, model.config.hidden)
    context = model.context(past.positions(device), past.bounds, past=past)

    def call(stage: int) -> Callable[[], object]:
        (block,) = run((model.blocks[stage - 1],), context)
        return lambda: block(x_TD)

    spent = sum(quickest(call(stage), device) for stage in blocks)
    return Pace(spent, sum(x.nbytes for s in blocks for x in model.blocks[s - 1].parameters()))


def _behind(model: Decoder, blocks: Collection[int], depth: int, count: int, run: Run) -> float:
    """Seconds more, through all blocks, of so many tokens behind `depth` ones than behind none."""
    near, far = (_through(model, blocks, start, count, run) for start in (0, depth))
    more = Pace(max(0.0, far.seconds - near.seconds), near.bytes)
    return more.whole(model, range(1, len(model.blocks) + 1))


def _head(model: Decoder, here: bool, drawn: int, block: float) -> float:
    """Seconds of the logits of so many tokens; where the head is not here, as of so many bytes of
    blocks, which take `block` seconds in all."""
    parameters = [*model.epilogue.parameters()]
    if not here or model.config.rewired:  # what it is given has another width
        whole = sum(x.nbytes for one in model.blocks for x in one.parameters())
        return block * sum(x.nbytes for x in parameters) / whole if whole else 0.0
    weight = model.prologue.tokens.weight
    x_TD = weight.new_zeros(drawn, model.config.hidden)
    positions_T = torch.arange(drawn, device=weight.device)
    context: Context = model.context(positions_T, (0, drawn))
    return quickest(lambda: model.epilogue.logits(model.epilogue(x_TD, context)), weight.device)


def quickest(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the quickest of a few; where others have the processor meanwhile, by what this
    thread had of it: how long steps take beside them the engine sees while it serves."""
    tries = 3 if accelerator.records(device) else 2  # the second may be recorded
    wall, own = _least(call, device, tries)
    if device.type != HOST.type or wall <= _BUSY * own:
        return wall
    # One of several threads spins while another waits for its turn: alone it does not.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return min(own, _least(call, device, tries)[1])
    finally:
        torch.set_num_threads(threads)


def _least(call: Callable[[], object], device: torch.device, tries: int) -> tuple[float, float]:
    """Seconds on the clock and of this thread's processor time, the least of each."""
    walls, owns = list[float](), list[float]()
    for _ in range(tries):
        begin, spent = time.perf_counter(), time.thread_time()
        call()
        accelerator.settle(device)
        walls.append(time.perf_counter() - begin)
        owns.append(time.thread_time() - spent)
    return min(walls), min(owns)
