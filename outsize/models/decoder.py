"""The decoder: prologue, blocks, epilogue. One for all families, made from a DecoderConfig.

Hidden states are flat, x_TD, whatever the batch: documents lie one after another and `bounds`
says where each begins. Nothing here knows of devices, caches or formats: multiplication,
attention and experts are met at the seams (outsize/models/seams.py).

T tokens, D hidden, V vocabulary, B rows, S tokens of a row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.errors import OutsizeError, counted
from outsize.kernels.entropy import Vocabulary
from outsize.kernels.rows import by_element, here
from outsize.models.attention import LocalAttend
from outsize.models.branches import feed_forward, mixer, typed_mixer
from outsize.models.coding import Coding
from outsize.models.config import DecoderConfig
from outsize.models.declared import Initial
from outsize.models.experts import LocalDispatch
from outsize.models.layout import VIRTUAL
from outsize.models.linear import MODEL, Embedding, Linear, dense, linears
from outsize.models.norm import Norm, upcast
from outsize.models.rope import tables
from outsize.models.seams import (
    Attend,
    Beginning,
    Carry,
    Context,
    Dispatch,
    Mixer,
    Past,
    all_of,
)
from outsize.models.wiring import AnyBlock

if TYPE_CHECKING:
    from outsize.models.dropout import Noise

Drop = Callable[[Tensor], Tensor]
BRANCHES = ("attention", "mlp")  # of a block


def around_of(branch: str) -> str:
    """The name in a block of what is around a branch."""
    return f"{branch}_around"


class Prologue(nn.Module):
    """ids_T -> x_TD: token embedding, scaled and projected, plus learned positions if any. virtual:
    what virtual tokens have in its place (outsize/models/virtual.py)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        size = config.embed_size or config.hidden
        self.scale, self.offset = config.embed_scale, config.position_offset
        norm, start = config.embed_norm, MODEL
        if norm is not None:
            start = Initial(bound=math.sqrt(6 / (config.vocab + size)))
        self.tokens = Embedding(config.vocab, size, "vocab", start)
        self.norm = None if norm is None else Norm(size, norm)
        rows = config.learned_positions
        self.positions = Embedding(rows, config.hidden) if rows else None
        self.project = Linear(size, config.hidden) if size != config.hidden else None
        self.virtual: nn.Module | None = None

    def forward(self, ids_T: Tensor, ctx: Context) -> Tensor:
        return self.enter(self.tokens(ids_T), ctx)

    def enter(self, x_TD: Tensor, ctx: Context) -> Tensor:
        """What follows the token embedding, of embed_size or D."""
        if self.norm is not None:
            x_TD = self.norm(x_TD)
        if self.scale != 1:  # rounded to the dtype of the weights, as those were trained
            x_TD = x_TD * x_TD.new_full((), self.scale)
        if self.virtual is not None:
            own_TE, here_T1 = self.virtual(ctx.positions_T)
            x_TD = torch.where(here_T1, own_TE, x_TD)
        if self.project is not None:
            x_TD = self.project(x_TD)
        if self.positions is not None:
            x_TD = x_TD + self.positions(ctx.positions_T + self.offset)
        return ctx.drop(x_TD, "embedding")


class Block(AnyBlock):
    """x_TD -> x_TD: attention and MLP with their norms.

    placement: "before" x + f(norm(x)); "after_branch" x + norm(f(x)); "around_branch" both;
    "after_sum" norm(x + f(x)). Norms that a placement lacks are identities. What is added to x
    has dropout where the Context says so. attention_around, mlp_around: what an adapter makes of
    what a branch took and gave (outsize/models/around.py). seen: the Context keeps what it takes.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        before = config.placement in ("before", "around_branch")
        after = config.placement != "before"

        def norm(wanted: bool) -> nn.Module:
            return Norm(config.hidden, config.norm) if wanted else nn.Identity()

        self.layer = layer
        self.attention_around: nn.Module | None = None
        self.mlp_around: nn.Module | None = None
        self.seen = False
        self.after_sum, self.parallel = config.placement == "after_sum", config.parallel
        self.attention_norm = norm(before)
        self.attention = mixer(config, layer)
        self.attention_out_norm = norm(after)
        self.mlp_norm = norm(before)
        self.mlp = feed_forward(config, layer)
        self.mlp_out_norm = norm(after)

    def forward(self, x_TD: Tensor, ctx: Context) -> Tensor:
        steps = self.branches(x_TD, ctx)
        del x_TD  # goes with the first branch
        try:
            while True:
                next(steps)
        except StopIteration as end:
            y_TD: Tensor = end.value
            return y_TD

    def branches(self, x_TD: Tensor, ctx: Context) -> Generator[int, None, Tensor]:
        """The same step by step: stops where branches have given what is read next, and says how
        often it will stop again. Who goes on has what they gave."""
        if self.seen:
            ctx.taken[self.layer] = x_TD
        attended_TD, attended = self.given("attention", self.attention_norm(x_TD), ctx)
        drop_attended, drop_fed = (partial(ctx.drop, name=f"{self.layer}.{b}") for b in BRANCHES)
        if self.parallel:
            fed_TD, fed = self.given("mlp", self.mlp_norm(x_TD), ctx)
            yield 0
            return x_TD + drop_attended(attended(attended_TD)) + drop_fed(fed(fed_TD))
        yield 1
        attended_TD = attended(attended_TD)
        x_TD = self.add(x_TD, attended_TD, self.attention_out_norm, drop_attended)
        fed_TD, fed = self.given("mlp", self.mlp_norm(x_TD), ctx)
        yield 0
        return self.add(x_TD, fed(fed_TD), self.mlp_out_norm, drop_fed)

    def given(self, branch: str, x_TD: Tensor, ctx: Context) -> tuple[Tensor, Drop]:
        """What a branch gives, and what makes of that what goes on, once it is there."""
        y_TD: Tensor = getattr(self, branch)(x_TD, ctx)
        around = getattr(self, around_of(branch))
        return y_TD, (lambda y_TD: y_TD) if around is None else partial(around, x_TD)

    @property
    def mixer(self) -> Mixer:
        """What of the block lets tokens have an effect on others."""
        return typed_mixer(self.attention)

    @property
    def bare(self) -> bool:
        """Whether no adapter has to do with what the block or a branch of it takes and gives."""
        return self.attention_around is None and self.mlp_around is None and not self.seen

    def leave(self, x_TD: Tensor, ctx: Context) -> None:
        """Keep what the block's input leaves for later tokens, and compute nothing else."""
        self.mixer.leave(self.entering(self.attention_norm(x_TD), ctx), ctx)

    def add(
        self, x_TD: Tensor, branch_TD: Tensor, norm: nn.Module, drop: Drop = lambda x: x
    ) -> Tensor:
        """The stream with what a branch gave; norm: the branch's own, behind it or behind both."""
        if self.after_sum:
            y_TD: Tensor = norm(x_TD + drop(branch_TD))
            return y_TD
        return x_TD + drop(norm(branch_TD))


def _block(config: DecoderConfig, layer: int) -> AnyBlock:
    wired = None if config.wiring is None else config.wiring.block(config, layer)
    return wired or Block(config, layer)


def typed(blocks: nn.ModuleList) -> list[AnyBlock]:
    """A decoder's blocks, under their type."""
    return [b for b in blocks if isinstance(b, AnyBlock)]


class Epilogue(nn.Module):
    """x_TD -> h_TD, what the head multiplies; `logits` goes on from there. join: makes x_TD of what
    blocks give that are wired otherwise."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        size = config.embed_size or config.hidden
        self.softcap, self.logit_scale = config.logit_softcap, config.logit_scale
        self.norm = Norm(config.hidden, config.norm) if config.final_norm else nn.Identity()
        self.project = Linear(config.hidden, size) if size != config.hidden else None
        self.head = Linear(size, config.vocab, use="column", unit="vocab")
        self.vocabulary: Vocabulary | None = None  # for the loss, where some rows are elsewhere
        self.join = None if config.wiring is None else config.wiring.join(config)

    def forward(self, x_TD: Tensor, ctx: Context | None = None) -> Tensor:
        if self.join is not None:
            x_TD = self.join(x_TD, ctx)
        h_TD: Tensor = self.norm(x_TD)
        return h_TD if self.project is None else self.project(h_TD)

    def logits(self, h_TD: Tensor) -> Tensor:
        """logits_TV, scaled and capped."""
        return self.soften(self.head(h_TD))

    def soften(self, logits_TV: Tensor) -> Tensor:
        """Of what the head gave; where each row is computed alone in float32 at least, as a loss
        does."""
        if here() and (self.logit_scale != 1 or self.softcap is not None):
            logits_TV = upcast(logits_TV)
        if self.logit_scale != 1:
            logits_TV = logits_TV * self.logit_scale
        if self.softcap is not None:
            logits_TV = by_element(torch.tanh, logits_TV / self.softcap) * self.softcap
        return logits_TV


class Decoder(nn.Module):
    """A language model: `model(input_ids) -> logits`, or its parts one by one.

    Parameters are made uninitialised; outsize/models/build.py fills them. A tied head shares the
    Parameter of the token embedding.
    """

    taken_up = False  # whether its weights took up an adapter and are others than those of `origin`

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.origin: Path | None = None  # the directory that it was loaded from
        self.words: Path | None = None  # the directory of its tokenizer
        self.away = ""  # the argument of `load` for which weights are not all in memory here
        # Of so many tokens, those that this worker has between branches, where they are cut.
        self.between: Callable[[int], tuple[int, int]] = all_of
        self.prologue = Prologue(config)
        own = len(config.layers) - config.sided
        self.blocks = nn.ModuleList(_block(config, i) for i in range(own))
        self.epilogue = Epilogue(config)
        if config.tied:
            self.epilogue.head.weight = self.prologue.tokens.weight
        if config.weights is not None:
            config.weights.attach(self)
        if config.coding is not None:
            self.code(config.coding)
        if config.adapter is not None:
            config.adapter.attach(self)
        for name in config.frozen:
            self.get_parameter(name).requires_grad_(False)
        for block, layer in zip(self.blocks, config.layers, strict=True):
            for name in layer.frozen:
                block.get_parameter(name).requires_grad_(False)

    def code(self, coding: Coding) -> None:
        """Have its blocks' Linears hold codes. OutsizeError for a wiring that multiplies weights in
        a way of its own."""
        for name, one in linears(self):
            if one.product is not dense or one.beside is not None:
                own = self.config.weights
                raise OutsizeError(
                    f"weights: {coding.format.name} is decoded for plain products, and this model"
                    f" has {self.config.rewired if own is None else own.key}; convert the plain"
                    " model instead"
                )
            one.code(coding.format, name, coding.eights)
        if coding.head is not None:
            self.epilogue.head.code(coding.head, "epilogue.head", coding.eights)

    def context(
        self,
        positions_T: Tensor,
        bounds: tuple[int, ...],
        attend: Attend | None = None,
        dispatch: Dispatch | None = None,
        lengths: Sequence[int] | None = None,
        noise: Noise | None = None,
        carry: Carry | None = None,
        past: Past | None = None,
    ) -> Context:
        """The Context of a microbatch.

        positions_T (int64): each token's position inside its document; bounds: cumulative
        offsets (0, ..., T) of the documents; lengths: tokens of each whole document, where only
        its last ones are here; noise: their dropout; carry: who has recurrent states of earlier
        tokens; past: what earlier steps left, in place of attend, carry and lengths. Raises
        OutsizeError for a document longer than a learned position table.
        """
        config = self.config
        if past is not None:
            attend, carry, lengths = past, past, past.lengths
        assert bounds[0] == 0 and bounds[-1] == len(positions_T), "bounds must cover the tokens"
        if lengths is None:
            lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
        rows = config.learned_positions - config.position_offset
        if config.learned_positions and max(lengths, default=0) > rows:
            raise OutsizeError(
                f"a document of {counted(max(lengths), 'token')} is longer than the"
                f" {counted(rows, 'position')} that "
                f"this {config.family} model has learned; use a sequence length of at most {rows}"
            )
        dtype = self.prologue.tokens.weight.dtype
        rope = {
            name: tables(facts, positions_T, bounds, lengths, dtype)
            for name, facts in config.ropes.items()
        }
        return Context(
            positions_T,
            bounds,
            rope,
            attend or LocalAttend(),
            dispatch or LocalDispatch(),
            carry or Beginning(),
            noise,
            between=self.between,
        )

    def hidden(self, ids_T: Tensor, ctx: Context) -> Tensor:
        """ids_T (int64) through all but the head: h_TD."""
        x_TD = self.prologue(ids_T, ctx)
        for block in self.blocks:
            x_TD = block(x_TD, ctx)
        h_TD: Tensor = self.epilogue(x_TD, ctx)
        return h_TD

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids (B, S) or (S,), int64, each row a document -> logits (B, S, V) or (S, V)."""
        if input_ids.dim() not in (1, 2):
            raise OutsizeError(
                f"input_ids has shape {tuple(input_ids.shape)}; expected (rows, tokens) or "
                "(tokens,): pass one row of token ids for each sequence"
            )
        before = self.config.virtual
        rows = 1 if input_ids.dim() == 1 else input_ids.shape[0]
        length = input_ids.shape[-1] + before
        positions_T = torch.arange(length, device=input_ids.device).repeat(rows)
        bounds = tuple(range(0, rows * length + 1, length)) if length else (0,)
        ctx = self.context(positions_T, bounds)
        ids_T = F.pad(input_ids, (before, 0), value=VIRTUAL).flatten()
        h_TD = self.hidden(ids_T, ctx)
        if before:
            h_TD = h_TD.unflatten(0, (rows, length))[:, before:].flatten(0, 1)
        logits_TV = self.epilogue.logits(h_TD)
        return logits_TV.view(*input_ids.shape, logits_TV.shape[-1])
