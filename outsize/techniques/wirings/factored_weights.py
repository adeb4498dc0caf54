"""Factored weights: each weight of the blocks is a product of two matrices, trained from the start.

Glentis et al., "Scalable Parameter and Memory Efficient Pretraining for LLM: Recent Algorithmic
Advances and Benchmarking", 2025 (arXiv 2505.22922). A weight of M by N is scale B A, with B (M, K)
and A (K, N), and is never there itself: parameters, gradients and optimizer states are K (M + N)
numbers each. First values are those of the authors' code, and so is a rank of a quarter of the
width, where none is said. Their scale is 32 / K; where none is said it is 1 here: at small widths
theirs begins far from where a plain model does.

Every so many steps the factors are made anew of their product (`refactored`): with the singular
values S of B A = U S V', B is U sqrt(S) and A sqrt(S) V', equally large and each of orthogonal
columns; the model computes what it did. All moments of the optimizer begin anew with them, and the
learning rate rises again for some steps, in a line from a thousandth of what it would be.

    factored_weights: {rank: 64}
    plan: {approximate: [refactored]}
    refactored: {gap: 200}

A model says the same in its config.json, as "factored_weights". Biases, embeddings, norms, experts
and the head are as they are. On a tensor axis a factor is cut as an adapter's is.

A trained model has factors by `outsize convert --factored RATIO`: those of the largest singular
values of each weight, as many as leave it 1 / RATIO of its numbers (Guo, Wang and Kankanhalli,
"PELA", 2024; what it learns by afterwards: outsize/techniques/pela.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, sqrt
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from outsize.errors import OutsizeError
from outsize.models.adapter import Weighed
from outsize.models.config import DecoderConfig
from outsize.models.declared import Initial
from outsize.models.decoder import Decoder
from outsize.models.families import reading
from outsize.models.linear import Linear, dense, linears
from outsize.models.low_rank import LowRank
from outsize.models.targets import check_rank, inside
from outsize.models.wiring import WIRES, Wire
from outsize.registry import setting, technique

NAME, RESTARTS = "factored_weights", "refactored"


@dataclass(frozen=True)
class FactoredWeights:
    """What a run says of them."""

    rank: int | None = setting(None, "of each weight; open: a quarter of the model's width", 1)
    alpha: float | None = setting(
        None, "the product of the factors counts alpha / rank; open: the rank", 0
    )

    def limited(self, config: DecoderConfig) -> DecoderConfig:
        rank = self.rank or max(1, config.hidden // 4)
        return factored(config, rank, float(rank) if self.alpha is None else self.alpha)


@dataclass(frozen=True)
class Refactored:
    """Of a run whose plan.approximate names it."""

    gap: int = setting(200, "steps until factors are made anew of their products", least=1)
    reset: bool = setting(True, "the optimizer's states begin anew with them")
    recovery: int = setting(10, "steps in which the learning rate rises again after a reset", 0)


@dataclass(frozen=True)
class Factors:
    """What the Linears of a model's blocks hold in the place of their weights. ratio: the weight's
    numbers over those of its two factors, where rank and alpha (both 0 then) are of each weight."""

    rank: int
    alpha: float
    ratio: float = 0.0
    key = NAME

    def of(self, one: Linear) -> tuple[int, float]:
        """The rank of a whole Linear's factors, and what their product counts."""
        if not self.ratio:
            return self.rank, self.alpha / self.rank
        d_out, d_in = one.sizes
        return max(1, int(d_out * d_in / (self.ratio * (d_out + d_in)))), 1.0

    def attach(self, model: nn.Module) -> None:
        for name, one in list(linears(model)):
            if one.product is not dense:
                raise OutsizeError(f"config.json: {NAME} wants plain products, and {name} has none")
            check_rank(NAME, self.of(one)[0], inside(name), one)
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, Factored(one, self))

    def detach(self, model: nn.Module) -> None:
        for name, one in list(linears(model)):
            if isinstance(one, Factored):
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, one.multiplied())

    def left(self, config: DecoderConfig) -> DecoderConfig:
        source = {key: value for key, value in config.source.items() if key != NAME}
        return replace(config, weights=None, source=source)


class Factored(Linear):
    """A Linear without a weight: what is beside it is all of its product."""

    def __init__(self, like: Linear, said: Factors) -> None:
        d_out, d_in = like.sizes
        super().__init__(d_in, d_out, like.bias is not None, like.use, like.unit, like.whole)
        self.beside: Product
        self.beside = Product(self, *said.of(like))
        del self.weight

    @property
    def sizes(self) -> tuple[int, int]:
        if self.weight_here is not None:  # it is being made
            return super().sizes
        return len(self.beside.b.weight), self.beside.a.weight.shape[1]

    def matrix(self) -> Tensor:
        return self.beside.change()

    def multiplied(self) -> Linear:
        """The plain one that computes the same."""
        d_out, d_in = self.sizes
        made = Linear(d_in, d_out, self.bias is not None, self.use, self.unit, self.whole)
        made.weight = nn.Parameter(self.matrix().detach().to(self.beside.b.weight.dtype))
        made.bias = self.bias
        return made


class Product(LowRank):
    """scale B A x, in the place of W x. It reads x when it is called, and no product before."""

    enters = True

    def __init__(self, one: Linear, rank: int, scale: float) -> None:
        super().__init__(one, rank, scale)
        start = Initial(bound=1 / sqrt(rank))
        self.a.declared = replace(self.a.declared, file=None)
        self.b.declared = replace(self.b.declared, file=None, initial=start)

    def forward(self, one: Weighed, x: Tensor) -> Tensor:
        return self.update(x)

    def merged(self, weight: Tensor) -> Tensor:
        return self.change()


def factored(config: DecoderConfig, rank: int, alpha: float, ratio: float = 0) -> DecoderConfig:
    """The config of the same model with factors. OutsizeError for one that has others, that is
    wired in a way of its own, or whose weights are codes."""
    made = Factors(rank, alpha, ratio)
    if config.weights == made:
        return config
    if config.rewired or config.coding is not None or config.weights is not None:
        there = config.rewired or ("codes" if config.weights is None else "other factors")
        raise OutsizeError(f"{NAME}: the model has {there}; expected a plain one")
    said = {"ratio": ratio} if ratio else {"rank": rank, "alpha": alpha}
    return replace(config, weights=made, source={**config.source, NAME: said})


def _read(config: DecoderConfig, said: Mapping[str, Any]) -> DecoderConfig:
    found = said[NAME]
    if not isinstance(found, Mapping):
        raise OutsizeError(f"config.json: {NAME} is {found!r}; expected rank and alpha, or ratio")
    if "ratio" in found:
        ratio = reading.number(found, "ratio")
        if not 1 <= ratio < inf or "rank" in found:
            raise OutsizeError(
                f"config.json: {NAME} is {dict(found)!r}; expected a ratio of 1 or more, or a rank"
            )
        return factored(config, 0, 0.0, ratio)
    rank = reading.integer(found, "rank")
    return factored(config, rank, reading.number(found, "alpha", float(rank)))


@torch.no_grad()
def converted(model: Decoder, config: DecoderConfig) -> Decoder:
    """A plain model with the factors of `config`, which are the model's `factored`: U sqrt(S) and
    sqrt(S) V' of the largest singular values of each weight. What does not change is shared."""
    with torch.device("meta"):
        made = Decoder(config)
    owners, every = dict(model.named_parameters(remove_duplicate=False)), dict(linears(model))
    for name, one in list(linears(made)):
        assert isinstance(one.beside, Product), "it has factors"
        weight = every[name].matrix()
        a_KN, b_MK = nearest(weight, one.beside.rank, one.beside.scale)
        one.beside.a.weight = nn.Parameter(a_KN.to(weight.dtype))
        one.beside.b.weight = nn.Parameter(b_MK.to(weight.dtype))
    for prefix, module in made.named_modules():
        for leaf, _ in list(module.named_parameters(recurse=False)):
            if f"{prefix}.{leaf}" in owners:
                module.register_parameter(leaf, owners[f"{prefix}.{leaf}"])
    made.origin, made.words = model.origin, model.words
    return made


def nearest(weight_MN: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """A (rank, N) and B (M, rank) of which scale B A is nearest to the weight, equally large;
    float32 at least. The largest element of each column of U is above 0."""
    wide = torch.promote_types(weight_MN.dtype, torch.float32)
    u, s, v = torch.linalg.svd(weight_MN.to(wide), full_matrices=False)
    u_MK, v_KN = u[:, :rank], v[:rank]
    sign_K = u_MK.gather(0, u_MK.abs().argmax(0, keepdim=True))[0].sign()
    root_K = (s[:rank] / scale).sqrt() * sign_K
    return root_K[:, None] * v_KN, u_MK * root_K


def _drawn(draw: Random, made: dict[str, Any]) -> dict[str, Any]:
    return {**made, NAME: {"rank": draw.choice((1, 2, 3)), "alpha": 4.0}}


WIRES.add(NAME, Wire(_read, _drawn, share=0.0, made=converted))
technique(NAME, FactoredWeights, "trains two factors in the place of each weight (2505.22922)")
technique(
    RESTARTS,
    Refactored,
    "settings of plan.approximate: [refactored]",
    exact=False,
    touches=frozenset({"the backward pass"}),
    method="outsize.runtime.special.refactoring.Refactoring",
)
