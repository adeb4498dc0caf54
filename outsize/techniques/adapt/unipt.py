"""UniPT: a side network on what frozen blocks took, through which no gradient passes.

Diao et al., "UniPT: Universal Parallel Tuning for Transfer Learning with Efficient Parameter and
Memory", 2024 (arXiv 2308.14316). What block i took is brought to few features, t_i, and what the
last one gave, a, in the same way. Parallel interaction: m_i = attention of a to t_i, plus t_i.
Confidence aggregation: the m_i are summed by a softmax over layers of g (a * t_i). What comes of
that is added to what the last block gave:

    y = x + U relu(a + norm(P sum_i c_i m_i)),    t_i = norm(D_i x_i)

The base runs without a graph: nothing inside of a block is kept, its inputs are. U begins as zeros,
so that the model begins as it was. The paper's features are of whole texts, which a causal model
may not see: here each token has its own confidence and attends to itself and earlier ones of its
document, by softmax, which every cache and axis of tokens knows, where the paper divides rectified
scores by their sum. Norms have no weights, and layers no biases.

    adapt: {unipt: {size: 64}}                      # in a run's file
    outsize.adapt(module, "unipt", sees="all")      # every token sees all: an encoder's

Of a module that nobody here wrote the blocks are found, or named by patterns; where they are given
a mask, the side network's tokens see what theirs do.

No weight can take it up. It is whole on every worker of a tensor axis; a pipeline has no way for
what its blocks took. peft has no such adapter: files are of a peft_type of our own.

T tokens, D hidden, L layers, R features of the side network; B texts of S tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.errors import OutsizeError
from outsize.models.adapter import FORMATS, OWN, Adapted, Naming
from outsize.models.adopt import find_blocks
from outsize.models.attention import keys_and_values
from outsize.models.branches import typed_mixer
from outsize.models.config import SIDE, DecoderConfig, LayerFacts
from outsize.models.declared import STREAM, Declared, Initial
from outsize.models.decoder import Block, Decoder, typed
from outsize.models.low_rank import Factor
from outsize.models.norm import upcast
from outsize.models.plugged import linear_layers
from outsize.models.seams import MIXERS, AttendSpec, Context, Mixer, StateSpec
from outsize.models.targets import freeze, number, refuse_others, texts
from outsize.models.wiring import AnyBlock
from outsize.registry import setting, technique

KEY, FORMAT = "adapt.unipt", f"{OWN}UNIPT"
EPS = 1e-5


@dataclass(frozen=True)
class UniPT:
    """How wide the side network is, and of what in modules that nobody here wrote."""

    size: int = setting(64, "features of the side network", least=1)
    of: tuple[str, ...] = setting((), "blocks, by patterns of their paths; [] finds them")
    sees: Literal["earlier", "all"] = setting(
        "earlier", "tokens that a token attends to where blocks are given no mask"
    )

    @property
    def appended(self) -> LayerFacts:
        return LayerFacts(1 / math.sqrt(self.size), kind=SIDE, mixing=self)

    def attach(self, model: nn.Module) -> None:
        """OutsizeError for a model whose branches are wired otherwise."""
        assert isinstance(model, Decoder), "attached to one"
        if model.config.rewired:
            raise OutsizeError(
                f"{KEY}: the model has {model.config.rewired}, whose blocks give more than the"
                " stream; adapt the plain model instead"
            )
        if self.of or self.sees != "earlier":
            raise OutsizeError(
                f"{KEY}: of is {list(self.of)} and sees is {self.sees}, which are for modules of"
                " others: it is beside all blocks of a decoder, whose tokens see earlier ones"
            )
        freeze(model)
        for block in typed(model.blocks):
            assert isinstance(block, Block), "those of a plain model"
            block.seen = True
        config = replace(model.config, adapter=self)
        model.blocks.append(SideBlock(config, len(model.blocks)))

    def wrapping(self, model: nn.Module) -> Mapping[str, nn.Module]:
        """OutsizeError where no blocks are found, or blocks of several widths."""
        blocks, taken = find_blocks(model, self.of or None), Taken()
        layers = list(linear_layers(model))
        inside = ([one for n, one in layers if f"{n}.".startswith(f"{p}.")] for p, _ in blocks)
        wide = {some[0].sizes[1] if some else 0 for some in inside}
        if len(wide) > 1 or 0 in wide:
            raise OutsizeError(
                f"{KEY}.of: blocks of a {type(model).__name__} take {sorted(wide)} features;"
                " expected blocks of one width, with linear layers"
            )
        last, every = len(blocks) - 1, (path for path, _ in blocks)
        side = Side(len(blocks), wide.pop(), self.size)
        return {
            path: Tap(taken, i, self.sees == "earlier", side if i == last else None)
            for i, path in enumerate(every)
        }

    def to_json(self, adapted: Adapted) -> dict[str, Any]:
        return {
            "peft_type": FORMAT, "task_type": "CAUSAL_LM", "inference_mode": True,
            "size": self.size, "of": list(self.of), "sees": self.sees,
        }  # fmt: skip


class Interaction(nn.Module):
    """What lets tokens of the side network have an effect on later ones: attention of a to t_i, by
    layer as other attention is by head. It has no parameters."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        facts = config.layers[layer]
        assert isinstance(facts.mixing, UniPT), "a layer of this kind is its"
        self.layers, self.size = layer, facts.mixing.size
        self.spec = AttendSpec(layer, facts.scale)

    def forward(self, a_TR: Tensor, t_TLR: Tensor, ctx: Context) -> Tensor:
        """m_TLR, without what is a token's own."""
        q_TLR = a_TR.unsqueeze(1).expand_as(t_TLR)
        return ctx.attend(q_TLR, t_TLR, t_TLR, ctx.bounds, self.spec)

    def states(self, dtype: torch.dtype) -> tuple[StateSpec, ...]:
        return keys_and_values(self.layers, self.size, self.size, dtype)

    def leave(self, t_TLR: Tensor, ctx: Context) -> None:
        ctx.carry.keep((t_TLR, t_TLR))


class Side(nn.Module):
    """What is added to the stream behind the last block. down: of what each took, and of that."""

    def __init__(self, layers: int, wide: int, size: int) -> None:
        super().__init__()
        every = range(layers + 1)
        self.down = nn.ModuleList(_factor(wide, size, f"down.{i}") for i in every)
        self.gate = _factor(size, 1, "gate")
        self.project = _factor(size, size, "project")
        self.up = _factor(size, wide, "up", begins=False)

    def targets(self, taken: Mapping[int, Tensor]) -> Tensor:
        """t (..., L, R), of what the blocks took, (..., D)."""
        assert len(taken) == len(self.down) - 1, "all blocks ran"
        return torch.stack([_normed(self.down[i](taken[i].detach())) for i in sorted(taken)], -2)

    def forward(
        self, x: Tensor, taken: Mapping[int, Tensor], attend: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """What goes on in the place of x (..., D). attend: of a (..., R) and t."""
        t, a = self.targets(taken), _normed(self.down[-1](x.detach()))
        m = attend(a, t) + t
        score: Tensor = self.gate(a.unsqueeze(-2) * t)
        c = upcast(score).softmax(-2).to(m.dtype)
        y: Tensor = x + self.up(F.relu(a + _normed(self.project((c * m).sum(-2)))))
        return y


class SideBlock(AnyBlock):
    """x_TD -> y_TD, behind all blocks of a decoder."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.interaction = Interaction(config, layer)
        self.side = Side(layer, config.hidden, self.interaction.size)

    @property
    def mixer(self) -> Mixer:
        return typed_mixer(self.interaction)

    def forward(self, x_TD: Tensor, ctx: Context) -> Tensor:
        y_TD: Tensor = self.side(x_TD, ctx.taken, lambda a, t: self.interaction(a, t, ctx))
        return y_TD

    def leave(self, x: Tensor, ctx: Context) -> None:
        """Keep what these tokens leave for later ones, and compute nothing else."""
        self.mixer.leave(self.side.targets(ctx.taken), ctx)


class Taken:
    """What blocks of a module took that run one after another, and what the last one gave."""

    def __init__(self) -> None:
        self.given: Tensor | None = None
        self.by_block: dict[int, Tensor] = {}


class Tap(nn.Module):
    """How a block of a module computes: as it did; what it took is kept for the last one's side
    network. place: of the block; causal: tokens see earlier ones where there is no mask."""

    def __init__(self, taken: Taken, place: int, causal: bool, side: Side | None) -> None:
        super().__init__()
        self.taken, self.place, self.causal, self.side = taken, place, causal, side

    def forward(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What the block gives. OutsizeError for what the block before has not given just now."""
        taken = self.taken
        x_BSD = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        if not self.place:
            taken.by_block.clear()
            if any(map(_holding, (*args, *kwargs.values()))):
                raise OutsizeError(
                    f"{KEY}: the module's cache holds earlier tokens, of which the side network"
                    " knows nothing; pass use_cache=False"
                )
        elif x_BSD is not taken.given:
            raise OutsizeError(
                f"{KEY}: a block was not given what the one before gave: run apart, or computed"
                " again, blocks do not know what the others took; leave that out"
            )
        taken.by_block[self.place] = x_BSD
        given: Any = type(block).__mro__[1].forward(block, *args, **kwargs)  # type: ignore[attr-defined]
        several = isinstance(given, tuple)
        y_BSD = given[0] if several else given
        if self.side is None:
            taken.given = y_BSD
            return given
        y_BSD = self.side(y_BSD, taken.by_block, partial(self._attend, _mask(args, kwargs)))
        taken.given = None
        taken.by_block.clear()
        return (y_BSD, *given[1:]) if several else y_BSD

    def _attend(self, mask: Tensor | None, a_BSR: Tensor, t_BSLR: Tensor) -> Tensor:
        """m_BSLR, without what is a token's own."""
        t_BLSR = t_BSLR.transpose(1, 2)
        q_BLSR = a_BSR.unsqueeze(1).expand_as(t_BLSR)
        causal = self.causal and mask is None
        return F.scaled_dot_product_attention(
            q_BLSR, t_BLSR, t_BLSR, mask, is_causal=causal
        ).transpose(1, 2)


def _holding(said: object) -> bool:
    """Whether this is a cache of transformers that holds tokens."""
    length = getattr(said, "get_seq_length", None)
    return callable(length) and length() > 0


def _mask(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """What a block is given as the mask of its scores, (B, 1, S, S). OutsizeError for another."""
    found = kwargs.get("attention_mask")
    if found is None:
        found = next((x for x in args[1:] if isinstance(x, Tensor) and x.dim() == 4), None)
    if found is not None and not (isinstance(found, Tensor) and found.dim() == 4):
        raise OutsizeError(
            f"{KEY}: blocks are given a mask that is no tensor of four dims, by which tokens cannot"
            " be told apart; expected attention of eager or sdpa"
        )
    return found


def _factor(d_in: int, d_out: int, name: str, begins: bool = True) -> Factor:
    start = Initial(bound=1 / math.sqrt(d_in)) if begins else Initial()
    return Factor((d_in, d_out), Declared(start, STREAM, f"/unipt.{name}.weight"))


def _normed(x_TR: Tensor) -> Tensor:
    return F.layer_norm(x_TR, x_TR.shape[-1:], eps=EPS)


def read(found: Mapping[str, Any], naming: Naming) -> UniPT:
    """The adapter that an adapter_config.json says. OutsizeError for what is not one."""
    refuse_others(found, {})
    of, sees = found.get("of", []), found.get("sees", "earlier")
    if sees not in ("earlier", "all"):
        raise OutsizeError(f"adapter_config.json: sees is {sees!r}; expected earlier or all")
    return UniPT(number(found, "size"), texts(found, "of") if of else (), sees)


MIXERS.add(SIDE, Interaction)
FORMATS.add(FORMAT, read)
technique(KEY, UniPT, "trains a side network on what frozen blocks took, which keep nothing else")
