"""The decoder: prologue, blocks, epilogue. One for all families, made from a DecoderConfig.

Hidden states are flat, x_TD, whatever the batch: documents lie one after another and `bounds`
says where each begins. Nothing here knows of devices, caches or formats: multiplication,
attention and experts are met at the seams (outsize/models/seams.py).

T tokens, D hidden, V vocabulary, B rows, S tokens of a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from outsize.errors import OutsizeError
from outsize.models.attention import Attention, LatentAttention, LocalAttend
from outsize.models.config import DecoderConfig
from outsize.models.experts import ExpertMLP, LocalDispatch
from outsize.models.linear import Embedding, Linear
from outsize.models.mlp import MLP
from outsize.models.norm import Norm
from outsize.models.rope import tables
from outsize.models.seams import Attend, Context, Dispatch


class Prologue(nn.Module):
    """ids_T -> x_TD: token embedding, scaled and projected, plus learned positions if any."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        size = config.embed_size or config.hidden
        self.scale, self.offset = config.embed_scale, config.position_offset
        self.tokens = Embedding(config.vocab, size)
        rows = config.learned_positions
        self.positions = Embedding(rows, config.hidden) if rows else None
        self.project = Linear(size, config.hidden) if size != config.hidden else None

    def forward(self, ids_T: Tensor, ctx: Context) -> Tensor:
        x_TD: Tensor = self.tokens(ids_T)
        if self.scale != 1:  # rounded to the dtype of the weights, as those were trained
            x_TD = x_TD * x_TD.new_full((), self.scale)
        if self.project is not None:
            x_TD = self.project(x_TD)
        if self.positions is not None:
            x_TD = x_TD + self.positions(ctx.positions_T + self.offset)
        return x_TD


class Block(nn.Module):
    """x_TD -> x_TD: attention and MLP with their norms.

    placement: "before" x + f(norm(x)); "after_branch" x + norm(f(x)); "around_branch" both;
    "after_sum" norm(x + f(x)). Norms that a placement lacks are identities.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        before = config.placement in ("before", "around_branch")
        after = config.placement != "before"

        def norm(wanted: bool) -> nn.Module:
            return Norm(config.hidden, config.norm) if wanted else nn.Identity()

        self.after_sum, self.parallel = config.placement == "after_sum", config.parallel
        self.attention_norm = norm(before)
        mixer = Attention if config.latent is None else LatentAttention
        self.attention: Attention | LatentAttention = mixer(config, layer)
        self.attention_out_norm = norm(after)
        self.mlp_norm = norm(before)
        self.mlp: nn.Module = _mlp(config, layer)
        self.mlp_out_norm = norm(after)

    def forward(self, x_TD: Tensor, ctx: Context) -> Tensor:
        attended_TD: Tensor = self.attention(self.attention_norm(x_TD), ctx)
        if self.parallel:
            fed_TD: Tensor = self.mlp(self.mlp_norm(x_TD), ctx)
            return x_TD + attended_TD + fed_TD
        x_TD = self._add(x_TD, attended_TD, self.attention_out_norm)
        return self._add(x_TD, self.mlp(self.mlp_norm(x_TD), ctx), self.mlp_out_norm)

    def keys_values(self, x_TD: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """What the block's attention makes of its input for other tokens to attend to."""
        kv: tuple[Tensor, Tensor] = self.attention.keys_values(self.attention_norm(x_TD), ctx)
        return kv

    def _add(self, x_TD: Tensor, branch_TD: Tensor, norm: nn.Module) -> Tensor:
        y_TD: Tensor = norm(x_TD + branch_TD) if self.after_sum else x_TD + norm(branch_TD)
        return y_TD


def _mlp(config: DecoderConfig, layer: int) -> nn.Module:
    if config.layers[layer].experts:
        return ExpertMLP(config)
    inner = config.mlp_hidden
    return MLP(config.hidden, inner, config.activation, config.gated, config.mlp_bias)


class Epilogue(nn.Module):
    """x_TD -> h_TD, what the head multiplies; `logits` goes on from there."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        size = config.embed_size or config.hidden
        self.softcap, self.logit_scale = config.logit_softcap, config.logit_scale
        self.norm = Norm(config.hidden, config.norm) if config.final_norm else nn.Identity()
        self.project = Linear(config.hidden, size) if size != config.hidden else None
        self.head = Linear(size, config.vocab, use="column")

    def forward(self, x_TD: Tensor, ctx: Context | None = None) -> Tensor:
        h_TD: Tensor = self.norm(x_TD)
        return h_TD if self.project is None else self.project(h_TD)

    def logits(self, h_TD: Tensor) -> Tensor:
        """logits_TV, scaled and capped."""
        logits_TV: Tensor = self.head(h_TD)
        if self.logit_scale != 1:
            logits_TV = logits_TV * self.logit_scale
        if self.softcap is not None:
            logits_TV = (logits_TV / self.softcap).tanh() * self.softcap
        return logits_TV


class Decoder(nn.Module):
    """A language model: `model(input_ids) -> logits`, or its parts one by one.

    Parameters are made uninitialised; outsize/models/build.py fills them. A tied head shares the
    Parameter of the token embedding.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.origin: Path | None = None  # the directory that it was loaded from
        self.prologue = Prologue(config)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(len(config.layers)))
        self.epilogue = Epilogue(config)
        if config.tied:
            self.epilogue.head.weight = self.prologue.tokens.weight

    def context(
        self,
        positions_T: Tensor,
        bounds: tuple[int, ...],
        attend: Attend | None = None,
        dispatch: Dispatch | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Context:
        """The Context of a microbatch.

        positions_T (int64): each token's position inside its document; bounds: cumulative
        offsets (0, ..., T) of the documents; lengths: tokens of each whole document, where only
        its last ones are here. Raises OutsizeError for a document longer than a learned position
        table.
        """
        config = self.config
        assert bounds[0] == 0 and bounds[-1] == len(positions_T), "bounds must cover the tokens"
        if lengths is None:
            lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
        rows = config.learned_positions - config.position_offset
        if config.learned_positions and max(lengths, default=0) > rows:
            raise OutsizeError(
                f"a document of {max(lengths)} tokens is longer than the {rows} positions that "
                f"this {config.family} model has learned; use a sequence length of at most {rows}"
            )
        dtype = self.prologue.tokens.weight.dtype
        rope = {
            name: tables(facts, positions_T, bounds, lengths, dtype)
            for name, facts in config.ropes.items()
        }
        return Context(
            positions_T, bounds, rope, attend or LocalAttend(), dispatch or LocalDispatch()
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
        rows = 1 if input_ids.dim() == 1 else input_ids.shape[0]
        length = input_ids.shape[-1]
        positions_T = torch.arange(length, device=input_ids.device).repeat(rows)
        bounds = tuple(range(0, rows * length + 1, length)) if length else (0,)
        ctx = self.context(positions_T, bounds)
        logits_TV = self.epilogue.logits(self.hidden(input_ids.flatten(), ctx))
        return logits_TV.view(*input_ids.shape, logits_TV.shape[-1])
