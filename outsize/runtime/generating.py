"""Tokens from a model under training: steps of generation that the job's own engine plays.

The weights are those of the next training step, wherever they rest and on whatever workers. PREFILL
and DECODE have the fetches, gathers and sends that an evaluation has; SAMPLE tells every worker the
tokens.

T tokens of the step laid flat, N sequences, D hidden, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outsize import accelerator
from outsize.decode.generate import (
    GREEDY,
    PREFILL_TOKENS,
    Draw,
    Fed,
    Going,
    Request,
    check_request,
    play,
)
from outsize.decode.runs import Run, each_alone
from outsize.decode.samplers import Drawn, Sampler
from outsize.errors import OutsizeError
from outsize.kernels import rows
from outsize.models.decoder import Decoder
from outsize.models.layout import prompted
from outsize.models.seams import Context, Past
from outsize.plan import Stage
from outsize.runtime.engine import Engine, Loaded, Ran
from outsize.runtime.flow import Flow, Record, Walk
from outsize.runtime.handlers.sample import Sample
from outsize.runtime.microbatches import Carried
from outsize.runtime.native import ChainWalk, Edges, NativeFlow
from outsize.runtime.native import through as one_by_one
from outsize.runtime.points import Points
from outsize.runtime.rows import Rows
from outsize.runtime.spill import Spill
from outsize.schedule import Kind

if TYPE_CHECKING:
    from outsize.parallel.tensor.beside import Prompts, Through

STEPS = 8  # of generation that one list has, where sequences fall into microbatches
Begin = Callable[[Carried], None]
Playable = Callable[[Kind, int, int], Loaded]


@dataclass
class Generated:
    """What follows a prompt. logprobs: of each token, where they were asked for."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Last(Enum):
    """What steps end in: logits_NV of the last token of each sequence, to draw from; logits_TV of
    every token; h_TE of every token, what the head would multiply."""

    DRAWN = auto()
    LOGITS = auto()
    HIDDEN = auto()


def native(flow: Flow) -> NativeFlow:
    """The flow of a model whose tokens can be gone on with."""
    if isinstance(flow, NativeFlow):
        return flow
    raise OutsizeError(
        f"generate: {type(flow.model).__name__} is an adopted module, which keeps nothing for the"
        " next token; expected a native decoder: make it with outsize.load"
    )


def kind_of(bounds: tuple[int, ...]) -> Kind:
    """A step of one token of each sequence, or of prompts."""
    single = all(stop - start == 1 for start, stop in pairwise(bounds))
    return Kind.DECODE if single else Kind.PREFILL


class TokenSteps:
    """Steps of generation through a job. playable: the list of a kind, of so many groups of
    sequences and steps, ready for its engine. begin: sets out on walks. groups: at most. lists:
    those made so far. ran: the actions of the last ones. prompts: how their sums are taken, if not
    at once; leaving: as of `Prompts.through`; run: how blocks are taken."""

    def __init__(
        self,
        flow: NativeFlow,
        engine: Engine,
        sample: Sample,
        playable: Playable,
        begin: Begin,
        groups: int = 1,
    ) -> None:
        self.flow, self.model = flow, flow.model
        self._engine, self._sample = engine, sample
        self._playable, self._begin, self.groups = playable, begin, groups
        self.lists = dict[tuple[Kind, int, int], Loaded]()
        self.ran: Sequence[Ran] = ()
        self.prompts: Prompts | None = None
        self.leaving: Collection[int] = ()
        self.run: Run = each_alone

    def __call__(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        bounds: tuple[int, ...],
        past: Past,
        draws: Sequence[Draw],
    ) -> list[Drawn]:
        loaded = self.begin(ids_T, positions_T, bounds, past)
        self._sample.ready(draws)
        self.ran = self._engine.play(loaded, time.perf_counter())
        return self._sample.taken()

    def logits(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        bounds: tuple[int, ...],
        past: Past | None = None,
    ) -> Tensor:
        """logits_TV of every token, on all workers. past None: with nothing kept of what they
        leave."""
        return self._every(ids_T, positions_T, bounds, past, Last.LOGITS)

    def hidden(
        self, ids_T: Tensor, positions_T: Tensor, bounds: tuple[int, ...], past: Past | None = None
    ) -> Tensor:
        """h_TE of every token, what the head would multiply; else as `logits`."""
        return self._every(ids_T, positions_T, bounds, past, Last.HIDDEN)

    @torch.no_grad()
    def _every(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        bounds: tuple[int, ...],
        past: Past | None,
        last: Last,
    ) -> Tensor:
        loaded = self._list(Kind.PREFILL)
        walk = self._walk(loaded, 0, ids_T, positions_T, bounds, past, last)
        self._begin(lambda m: walk)
        config, kept = self.model.config, self.model.prologue.tokens.weight.dtype
        size = config.vocab if last is Last.LOGITS else config.embed_size or config.hidden
        form = torch.empty(len(ids_T), size, dtype=kept, device="meta")
        self._sample.ready((), form)
        self._engine.play(loaded, time.perf_counter())
        given, self._sample.given = self._sample.given, None
        assert given is not None
        return given.to(positions_T.device)

    def begin(
        self, ids_T: Tensor, positions_T: Tensor, bounds: tuple[int, ...], past: Past | None
    ) -> Loaded:
        """Set out on a step; gives its list. past None: nothing came before, nothing is kept, and
        the logits of every token are asked for."""
        loaded = self._list(Kind.PREFILL if past is None else kind_of(bounds))
        last = Last.DRAWN if past is not None else Last.LOGITS
        walk = self._walk(loaded, 0, ids_T, positions_T, bounds, past, last)
        self._begin(lambda m: walk)
        return loaded

    def _list(self, kind: Kind, groups: int = 1, steps: int = 1) -> Loaded:
        key = (kind, groups, steps)
        if key not in self.lists:
            self.lists[key] = self._playable(*key)
        return self.lists[key]

    def _walk(
        self,
        loaded: Loaded,
        m: int,
        ids_T: Tensor,
        positions_T: Tensor,
        bounds: tuple[int, ...],
        past: Past | None,
        last: Last = Last.DRAWN,
    ) -> tuple[ChainWalk, Hashable]:
        """Of a microbatch, with what tells messages of other shapes apart."""
        dispatch = self.flow.execution.dispatch
        if not self.model.prologue.tokens.on_host:
            ids_T = accelerator.sent(ids_T, positions_T.device)
        context = self.model.context(positions_T, bounds, dispatch=dispatch, past=past)
        way, count, through = self.prompts, len(ids_T), None
        if way is not None and past is not None and way.fits_step(count):
            through = way.through(context, past, self.leaving)
        walk = tokens_walk(self.flow, ids_T, context, loaded.points, m, last, through, self.run)
        return walk, (count, len(bounds) - 1, last)

    def several(self, going: Going) -> list[tuple[int, Drawn]]:
        """Steps whose sequences fall into groups, so that stages of a pipeline work at once: one of
        the group after another is on its way. Those that end are fed until all steps have."""
        asked = list(going.waiting)
        groups = min(self.groups, len(asked))
        single = all(len(ids) == 1 for ids in going.waiting.values())
        kind, steps = (Kind.DECODE, min(STEPS, going.left)) if single else (Kind.PREFILL, 1)
        loaded = self._list(kind, groups, steps)
        fed, found = dict[int, Fed](), list[tuple[int, Drawn]]()

        def begun(m: int) -> tuple[ChainWalk, Hashable]:
            here = m % groups
            part = asked[here * len(asked) // groups : (here + 1) * len(asked) // groups]
            one = fed[m] = going.feed(part, PREFILL_TOKENS // groups)
            return self._walk(loaded, m, one.ids_T, one.positions_T, one.past.bounds, one.past)

        def take(m: int, drawn: list[Drawn]) -> None:
            found.extend(going.take(fed.pop(m), drawn))

        self._begin(begun)
        self._sample.ready_by(lambda m: fed[m].draws, take)
        with torch.no_grad(), rows.alone():
            self.ran = self._engine.play(loaded, time.perf_counter())
        self._begin(_over)  # what earlier tokens left is let go with the requests
        self._sample.ready(())
        going.leave()
        return found

    def generate(
        self,
        prompts: Iterable[Sequence[int]],
        max_tokens: int,
        sampling: Sampler | Sequence[Sampler] = GREEDY,
        stop: Collection[int] = (),
        logprobs: bool = False,
    ) -> list[Generated]:
        """See Job.generate."""
        asked = [tuple(ids) for ids in prompts]
        samplers = [sampling] * len(asked) if callable(sampling) else list(sampling)
        if len(samplers) != len(asked):
            raise OutsizeError(
                f"generate: {len(samplers)} samplings for {len(asked)} prompts; expected one for"
                " all, or one each"
            )
        for ids in asked:
            check_request(self.model, ids, max_tokens)
        before = self.model.config.virtual
        requests = [
            Request(prompted(ids, before), max_tokens, sampler, frozenset(stop), logprobs)
            for ids, sampler in zip(asked, samplers, strict=True)
        ]
        found = [Generated() for _ in requests]
        for index, one in self._drawn(requests):
            found[index].tokens.append(one.token)
            if logprobs:
                found[index].logprobs.append(one.logprob)
        return found

    def _drawn(self, requests: Sequence[Request]) -> Iterator[tuple[int, Drawn]]:
        if min(self.groups, len(requests)) < 2:
            yield from play(requests, self, self.flow.device)
            return
        going = Going(requests, self.flow.device)
        while going.waiting:
            yield from self.several(going)


def _over(m: int) -> tuple[Walk, Hashable]:
    raise AssertionError(f"microbatch {m} of steps that are over")


def tokens_walk(
    flow: NativeFlow,
    ids_T: Tensor,
    context: Context,
    points: Points,
    m: int = 0,
    last: Last = Last.DRAWN,
    through: Through | None = None,
    run: Run = each_alone,
) -> ChainWalk:
    """A microbatch's way through the stages, through blocks as `run` takes those of a stage,
    or as is said. Of ends that all share its end is h_ND, of which every worker makes a part of the
    logits."""
    model, rows, ends = flow.model, flow.rows, None
    if rows is not None:
        way, held = points.way(m), points.held(m)
        rows.ask(way.microbatch, ids_T, held is None or way.first in held)
        ends = Edges(rows, way)
    first = partial(_first, model, rows, context)
    end = partial(_end, model, rows, context, last)
    count = len(flow.blocks) + 2

    def record(here: Stage, x: Tensor, spill: Spill | None) -> Record:
        some = flow.blocks[max(here.first - 1, 0) : max(here.last - 1, 0)]
        chain: list[Callable[[Tensor], Tensor]] = [first] if here.first == 0 else []
        if through is None:
            chain += run(some, context)
        else:
            chain += (partial(through.block, block) for block in some)
        if here.last == count:
            chain += (end,) if through is None else (through.land, end)
        return Record(partial(one_by_one, chain), [x], spill)

    return ChainWalk(record, flow.plan, count, ids_T, ends=ends, heads=flow.heads)


def _first(model: Decoder, rows: Rows | None, context: Context, x: Tensor) -> Tensor:
    if rows is not None:
        return model.prologue.enter(x, context)
    return model.prologue(x, context)  # type: ignore[no-any-return]


def _end(model: Decoder, rows: Rows | None, context: Context, last: Last, x_TD: Tensor) -> Tensor:
    h_TD: Tensor = model.epilogue(x_TD, context)
    if last is Last.HIDDEN:
        return h_TD
    if last is Last.DRAWN and len(context.bounds) - 1 < len(h_TD):  # behind the norm: x may be cut
        h_TD = h_TD[accelerator.sent(torch.tensor(context.bounds[1:]) - 1, h_TD.device)]
    return h_TD if rows is not None else model.epilogue.logits(h_TD)
