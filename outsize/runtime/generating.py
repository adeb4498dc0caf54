"""Tokens from a model under training: steps of generation that the job's own engine plays.

The weights are those of the next training step, wherever they rest and on whatever workers. PREFILL
and DECODE have the fetches, gathers and sends that an evaluation has; SAMPLE tells every worker the
tokens.

T tokens of the step laid flat, N sequences, D hidden, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from outsize.decode.generate import GREEDY, Draw, Request, check_request, play
from outsize.decode.samplers import Drawn, Sampler
from outsize.errors import OutsizeError
from outsize.models.decoder import Decoder
from outsize.models.seams import Context, Past
from outsize.plan import Stage
from outsize.runtime.engine import Engine, Loaded, Ran
from outsize.runtime.flow import Flow, Record
from outsize.runtime.handlers.sample import Sample
from outsize.runtime.native import ChainWalk, Edges, NativeFlow, through
from outsize.runtime.points import Points
from outsize.runtime.rows import Rows
from outsize.runtime.spill import Spill
from outsize.schedule import Kind

Begin = Callable[[ChainWalk, Hashable], None]  # what tells messages of other shapes apart


@dataclass
class Generated:
    """What follows a prompt. logprobs: of each token, where they were asked for."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


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
    """Steps of generation through a job. playable: the list of a kind, ready for its engine. begin:
    sets out on a walk. lists: those made so far, by kind. ran: the actions of the last step."""

    def __init__(
        self,
        flow: NativeFlow,
        engine: Engine,
        sample: Sample,
        playable: Callable[[Kind], Loaded],
        begin: Begin,
    ) -> None:
        self.flow, self.model = flow, flow.model
        self._engine, self._sample = engine, sample
        self._playable, self._begin = playable, begin
        self.lists = dict[Kind, Loaded]()
        self.ran: Sequence[Ran] = ()

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

    @torch.no_grad()
    def logits(self, ids_T: Tensor, positions_T: Tensor, bounds: tuple[int, ...]) -> Tensor:
        """logits_TV of every token, on all workers, with nothing kept of what they leave."""
        loaded = self.begin(ids_T, positions_T, bounds, None)
        kept = self.model.prologue.tokens.weight.dtype
        form = torch.empty(len(ids_T), self.model.config.vocab, dtype=kept, device="meta")
        self._sample.ready((), form)
        self._engine.play(loaded, time.perf_counter())
        given, self._sample.given = self._sample.given, None
        assert given is not None
        return given.to(ids_T.device)

    def begin(
        self, ids_T: Tensor, positions_T: Tensor, bounds: tuple[int, ...], past: Past | None
    ) -> Loaded:
        """Set out on a step; gives its list. past None: nothing came before, nothing is kept, and
        the logits of every token are asked for."""
        kind = Kind.PREFILL if past is None else kind_of(bounds)
        if kind not in self.lists:
            self.lists[kind] = self._playable(kind)
        loaded, dispatch = self.lists[kind], self.flow.execution.dispatch
        context = self.model.context(positions_T, bounds, dispatch=dispatch, past=past)
        walk = tokens_walk(self.flow, ids_T, context, loaded.points, every=past is None)
        self._begin(walk, (len(ids_T), len(bounds) - 1, past is None))
        return loaded

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
        requests = [
            Request(ids, max_tokens, sampler, frozenset(stop), logprobs)
            for ids, sampler in zip(asked, samplers, strict=True)
        ]
        found = [Generated() for _ in requests]
        for index, one in play(requests, self, self.flow.device):
            found[index].tokens.append(one.token)
            if logprobs:
                found[index].logprobs.append(one.logprob)
        return found


def tokens_walk(
    flow: NativeFlow, ids_T: Tensor, context: Context, points: Points, every: bool = False
) -> ChainWalk:
    """A step's way through the stages. Its end is logits_NV of the last token of each sequence, or
    logits_TV of every token; of ends that all share h_ND, of which every worker makes a part of
    them."""
    model, rows, ends = flow.model, flow.rows, None
    if rows is not None:
        way, held = points.way(0), points.held(0)
        rows.ask(way.microbatch, ids_T, held is None or way.first in held)
        ends = Edges(rows, way)
    chain = [partial(_first, model, rows, context)]
    chain += (partial(_block, block, context) for block in flow.blocks)
    chain.append(partial(_end, model, rows, context, every))

    def record(here: Stage, x: Tensor, spill: Spill | None) -> Record:
        return Record(partial(through, chain[here.first : here.last]), [x], spill)

    return ChainWalk(record, flow.plan, len(chain), ids_T, ends=ends, heads=flow.heads)


def _block(block: nn.Module, context: Context, x: Tensor) -> Tensor:
    return block(x, context)  # type: ignore[no-any-return]


def _first(model: Decoder, rows: Rows | None, context: Context, x: Tensor) -> Tensor:
    if rows is not None:
        return model.prologue.enter(x, context)
    return model.prologue(x, context)  # type: ignore[no-any-return]


def _end(model: Decoder, rows: Rows | None, context: Context, every: bool, x_TD: Tensor) -> Tensor:
    h_TD: Tensor = model.epilogue(x_TD, context)
    if not every:  # behind the norm: x may be cut by tokens
        h_TD = h_TD[torch.tensor(context.bounds[1:], device=h_TD.device) - 1]
    return h_TD if rows is not None else model.epilogue.logits(h_TD)
