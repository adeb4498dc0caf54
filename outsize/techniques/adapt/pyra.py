"""Tokens of images that are merged from block to block while a vision transformer adapts (PYRA).

Xiong et al., "PYRA: Parallel Yielding Re-Activation for Training-Inference Efficient Task
Adaptation", 2024 (arXiv 2403.09192), on the matching of Bolya et al., "Token Merging: Your ViT But
Faster", 2023. Between attention and MLP of a block the tokens with even places each find the one
with an odd place whose keys are most like their own; the r likest are added to it, as means by how
many tokens each stands for, whose logarithm is added to scores. Before, a token s that goes to d is
modulated: of p = norm(s + d), by trained a (r, 1) and b (1, D),

    s + s * 2 sigmoid(a^T p) * (2 sigmoid(p b^T) - 1)

which begins as s. Updates of low rank of queries and values train beside that. Later blocks have
fewer tokens, in training and for ever after.

    outsize.adapt(vit, "pyra", merged=[16], rank=8)

For ViT and DeiT classes of transformers, whose blocks it computes itself. Blocks are not run apart:
`prepare` without `blocks`. A decoder's tokens are targets: it cannot have it. No weight can take it
up. Files are of a peft_type of our own.

B images, T tokens, D features, R merged tokens, N those with even places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.errors import OutsizeError
from outsize.models.adapter import FORMATS, OWN, Adapted, Naming, Part, Weighed
from outsize.models.declared import INSIDE, Declared, Initial
from outsize.models.low_rank import LowRank
from outsize.models.targets import check_rank, number, refuse_others, stored, texts
from outsize.registry import setting, technique

KEY, FORMAT = "adapt.pyra", f"{OWN}PYRA"
PARTS = ("attention", "layernorm_before", "layernorm_after", "mlp", "dropout")
ATTENDS = ("eager", "sdpa")  # takes what is added to scores
EPS = 1e-5


@dataclass(frozen=True)
class Pyra:
    """How many tokens each block merges, and how wide the updates beside that are."""

    merged: tuple[int, ...] = setting(
        (16,), "tokens that a block merges, by block; the last number is that of all further ones"
    )
    kept: int = setting(1, "first tokens that are never merged: 1, or 2 with one of distillation")
    rank: int = setting(8, "rank of the updates of queries and values; 0: none", least=0)
    alpha: float = setting(8.0, "an update counts alpha / rank", least=0)
    targets: tuple[str, ...] = setting(("q_proj", "v_proj"), "linear layers that have updates")

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part(f"{KEY}.targets", self.targets, self.beside),) if self.rank else ()

    def beside(self, name: str, one: Weighed) -> LowRank:
        check_rank(f"{KEY}.rank", self.rank, name, one)
        return LowRank(one, self.rank, self.alpha / self.rank)

    def attach(self, model: nn.Module) -> None:
        raise OutsizeError(
            f"{KEY}: a decoder predicts something at each token, and merged ones are gone; expected"
            " a vision transformer, or another adapter (outsize keys adapt)"
        )

    def wrapping(self, model: nn.Module) -> Mapping[str, nn.Module]:
        paths = [p for p, one in model.named_modules() if set(PARTS) <= one._modules.keys()]
        counts = [*self.merged, *self.merged[-1:] * len(paths)][: len(paths)]
        if not paths:
            raise OutsizeError(
                f"{KEY}: a {type(model).__name__} has no block of {', '.join(PARTS)}; expected a"
                " ViT or DeiT class of transformers"
            )
        if not self.merged or len(self.merged) > len(paths) or min(self.merged) < 0:
            raise OutsizeError(
                f"{KEY}.merged is {list(self.merged)}; expected 1 to {len(paths)} numbers, 0 or"
                " more"
            )
        if not 0 <= self.kept <= 2:
            raise OutsizeError(f"{KEY}.kept is {self.kept}; expected 0, 1 or 2")
        going, last = Going(), len(paths) - 1
        return {
            path: Merging(_width(model.get_submodule(path)), count, self.kept, going, i, i == last)
            for i, (path, count) in enumerate(zip(paths, counts, strict=True))
        }

    def to_json(self, adapted: Adapted) -> dict[str, Any]:
        own = {
            "merged_tokens": list(self.merged), "kept_tokens": self.kept, "r": self.rank,
            "lora_alpha": self.alpha,
        }  # fmt: skip
        return {**stored(FORMAT, adapted, own), "task_type": None}


def _width(block: nn.Module) -> int:
    return next(one.in_features for one in block.modules() if isinstance(one, nn.Linear))


class Going:
    """What goes from block to block beside tokens: how many each stands for, and the tokens whose
    that is."""

    def __init__(self) -> None:
        self.tokens: Tensor | None = None
        self.size_BT1: Tensor | None = None


class Merging(nn.Module):
    """How a block computes that merges tokens. place: of the block among those that do."""

    def __init__(
        self, width: int, count: int, kept: int, going: Going, place: int, last: bool
    ) -> None:
        super().__init__()
        self.count, self.kept, self.going = count, kept, going
        self.place, self.last = place, last
        shapes = {"a": (count, 1), "b": (1, width), "weight": (width,), "bias": (width,)}
        for name, shape in shapes.items() if count else ():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def declare(self, leaf: str) -> Declared:
        starts = {"a": Initial(bound=1.0), "weight": Initial(value=1.0)}
        return Declared(starts.get(leaf, Initial()), INSIDE, f"pyra.{leaf}")

    def forward(
        self, block: Any, x_BTD: Tensor, attention_mask: Tensor | None = None, **more: Any
    ) -> Tensor:
        """What the block gives. OutsizeError for masked tokens, and for what the block before has
        not given just now."""
        size_BT1 = self._sizes(block, x_BTD, attention_mask)
        keys: list[Tensor] = []
        hook = block.attention.k_proj.register_forward_hook(lambda *a: keys.append(a[2].detach()))
        try:
            shares = None if size_BT1 is None else size_BT1.log().mT.unsqueeze(1)
            attended, *_ = block.attention(block.layernorm_before(x_BTD), shares, **more)
        finally:
            hook.remove()
        x_BTD = x_BTD + block.dropout(attended)
        if self.count:
            heads = keys[0].unflatten(-1, (-1, block.attention.head_dim))
            x_BTD, size_BT1 = self._merged(x_BTD, size_BT1, heads.mean(2))
        y_BTD: Tensor = x_BTD + block.dropout(block.mlp(block.layernorm_after(x_BTD)))
        self.going.tokens, self.going.size_BT1 = (None, None) if self.last else (y_BTD, size_BT1)
        return y_BTD

    def _sizes(self, block: Any, x_BTD: Tensor, mask: Tensor | None) -> Tensor | None:
        """How many each token stands for; None: each for itself."""
        if mask is not None or block.attention.config._attn_implementation not in ATTENDS:
            raise OutsizeError(
                f"{KEY}: merged tokens count by how many they are, which only attention of"
                f" {' and '.join(ATTENDS)} without a mask of the caller's can do"
            )
        if not self.place:
            return None
        if x_BTD is not self.going.tokens:
            raise OutsizeError(
                f"{KEY}: a block was not given what the one before gave: run apart, or computed"
                " again, blocks do not know how many tokens are merged; leave that out"
            )
        return self.going.size_BT1

    def _merged(
        self, x_BTD: Tensor, size_BT1: Tensor | None, key_BTK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Fewer tokens, and how many each stands for."""
        if size_BT1 is None:
            size_BT1 = x_BTD.new_ones(*x_BTD.shape[:2], 1)
        stay_BN, goes_BR, to_BR = self._matched(key_BTK)

        def take(x_BTD: Tensor, at: Tensor) -> Tensor:
            return x_BTD.gather(1, at.unsqueeze(-1).expand(-1, -1, x_BTD.shape[-1]))

        def put(x_BTD: Tensor, modulated: bool) -> Tensor:
            even, odd = x_BTD[:, ::2], x_BTD[:, 1::2]
            going = take(even, goes_BR)
            if modulated:
                going = self._modulated(going, take(odd, to_BR))
            odd = odd.scatter_add(1, to_BR.unsqueeze(-1).expand_as(going), going)
            stay, first = take(even, stay_BN), max(self.kept - 1, 0)
            return torch.cat((stay[:, :1], odd[:, :first], stay[:, 1:], odd[:, first:]), 1)

        total_BT1 = put(size_BT1, modulated=False)
        return put(x_BTD * size_BT1, modulated=True) / total_BT1, total_BT1

    def _modulated(self, s_BRD: Tensor, d_BRD: Tensor) -> Tensor:
        a_R1, b_1D = self.get_parameter("a"), self.get_parameter("b")
        weight, bias = self.get_parameter("weight"), self.get_parameter("bias")
        p_BRD = F.layer_norm(s_BRD + d_BRD, weight.shape, weight, bias, EPS)
        by_feature_B1D = 2 * torch.sigmoid(a_R1.mT @ p_BRD)
        by_token_BR1 = 2 * torch.sigmoid(p_BRD @ b_1D.mT) - 1
        return s_BRD + s_BRD * by_feature_B1D * by_token_BR1

    @torch.no_grad()
    def _matched(self, key_BTK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the tokens with even places which stay, in order, and which go; to which of the others
        these go. OutsizeError for too few tokens."""
        if self.count > (most := (key_BTK.shape[1] - self.kept) // 2):
            raise OutsizeError(
                f"{KEY}.merged: block {self.place} merges {self.count} tokens and has"
                f" {key_BTK.shape[1]}, of which {max(most, 0)} can be; expected fewer"
            )
        key_BTK = F.normalize(key_BTK, dim=-1)
        like_BNM = key_BTK[:, ::2] @ key_BTK[:, 1::2].mT
        if self.kept:
            like_BNM[:, 0] = -torch.inf
        if self.kept > 1:
            like_BNM[:, :, 0] = -torch.inf
        best_BN, where_BN = like_BNM.max(-1)
        order_BN = best_BN.argsort(dim=-1, descending=True, stable=True)
        goes_BR, stay_BN = order_BN[:, : self.count], order_BN[:, self.count :]
        return stay_BN.sort(-1).values, goes_BR, where_BN.gather(1, goes_BR)


def read(found: Mapping[str, Any], naming: Naming) -> Pyra:
    """The adapter that an adapter_config.json says. OutsizeError for what is not one."""
    refuse_others(found, {})
    merged, rank = found.get("merged_tokens"), found.get("r")
    if not isinstance(merged, list) or not all(type(one) is int for one in merged):
        raise OutsizeError(f"adapter_config.json: merged_tokens is {merged!r}; expected numbers")
    kept = found.get("kept_tokens")
    if type(kept) is not int or type(rank) is not int or rank < 0:
        raise OutsizeError(
            f"adapter_config.json: kept_tokens is {kept!r} and r is {rank!r}; expected whole"
            " numbers"
        )
    targets = texts(found, "target_modules") if rank else ()
    return Pyra(tuple(merged), kept, rank, number(found, "lora_alpha", float), targets)


FORMATS.add(FORMAT, read)
technique(KEY, Pyra, "merges tokens of a vision transformer block by block while it adapts")
