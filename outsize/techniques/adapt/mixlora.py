"""Low-rank experts behind a router, in the MLPs of a frozen dense model (MixLoRA).

Li et al., "MixLoRA", 2024 (arXiv 2404.15159). An expert is the frozen MLP with an update of low
rank of each of its weights. A router sends each token to some of them, whose outputs are summed by
its weights. Attention may have plain updates of low rank beside that.

The loss that balances experts is summed here over documents and layers, of each
    tokens / layers * experts * sum over experts of (tokens sent there / tokens) * (mean score),
so that it does not depend on how a batch is cut; the paper takes all tokens of a batch together.
It has a gradient, and is no part of the loss that is reported. The frozen products run over each
token as often as it is sent somewhere. peft has no such adapter: files are under a peft_type of our
own, the experts of one weight stacked.

    adapt: {mixlora: {experts: 8, chosen: 2, rank: 16}}

T tokens, D hidden, E experts, J chosen of a token, N = T * J rows sorted by expert.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from outsize.errors import OutsizeError
from outsize.kernels.linear import GradSink, linear
from outsize.models.adapter import (
    FORMATS,
    OWN,
    Adapted,
    Naming,
    Part,
    Weighed,
    along_input,
    along_output,
)
from outsize.models.config import ExpertFacts
from outsize.models.declared import INSIDE, Declared, Initial
from outsize.models.decoder import Decoder
from outsize.models.experts import Router
from outsize.models.linear import Linear, redirect
from outsize.models.low_rank import Factor, LowRank
from outsize.models.mlp import MLP
from outsize.models.seams import Context
from outsize.models.targets import TARGETS, attach, check_rank, number, refuse_others, stored, texts
from outsize.registry import setting, technique

KEY, FORMAT = "adapt.mixlora", f"{OWN}MIXLORA"
ROUTER_STD = 0.02  # as in the paper's code
_MLP = "mlp"


@dataclass(frozen=True)
class MixLora:
    """How many experts each MLP has, and which Linears of attention have an update."""

    experts: int = setting(8, "experts of each MLP", least=2)
    chosen: int = setting(2, "experts that a token is sent to", least=1)
    rank: int = setting(16, "rank of the update of each weight", least=1)
    alpha: float = setting(32.0, "an update counts alpha / rank", least=1e-6)
    balance: float = setting(0.01, "factor of the loss that balances experts", least=0)
    attention: tuple[str, ...] = setting(("attention",), f"of attention: {TARGETS}")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def whole_documents(self) -> bool:
        """The loss that balances experts is summed over them."""
        return self.balance > 0

    def attach(self, model: nn.Module) -> None:
        assert isinstance(model, Decoder), "attached to one"
        if self.chosen > self.experts:
            raise OutsizeError(f"{KEY}.chosen is {self.chosen}; expected {self.experts} at most")
        mlps = [one for one in model.modules() if isinstance(one, MLP)]
        if any(layer.experts for layer in model.config.layers) or model.config.wiring is not None:
            raise OutsizeError(
                f"{KEY}: the model has {model.config.rewired or 'experts of its own'}; expected a"
                " plain one, whose MLPs it makes experts of"
            )
        parts = [Part(f"{KEY}.attention", self.attention, self.beside)] if self.attention else []
        attach(model, [*parts, Part(KEY, (_MLP,), self.among)])
        for mlp in mlps:
            mlp.mixture = Mixture(self.balance / len(mlps))

    def beside(self, name: str, one: Weighed) -> LowRank:
        """What a Linear of attention has beside it."""
        check_rank(f"{KEY}.rank", self.rank, name, one)
        return LowRank(one, self.rank, self.scale)

    def among(self, name: str, one: Weighed) -> Experts:
        """The experts of a Linear of an MLP; those of `up` come with the router."""
        check_rank(f"{KEY}.rank", self.rank, name, one)
        facts = ExpertFacts(self.experts, self.chosen, 0)
        return Experts(one, self.rank, self.scale, facts, name.endswith(".up"))

    def to_json(self, adapted: Adapted) -> dict[str, Any]:
        own = {
            "r": self.rank, "lora_alpha": self.alpha, "num_experts": self.experts,
            "top_k": self.chosen, "router_aux_loss_coef": self.balance,
            "attention_modules": [n for n, one in adapted.beside.items() if type(one) is LowRank],
        }  # fmt: skip
        return stored(FORMAT, adapted, own)


class Experts(nn.Module):
    """The low-rank parts of all experts beside a Linear: a (E, rank, d_in), b (E, d_out, rank)."""

    enters = True  # tokens go to their experts first

    def __init__(
        self, one: Weighed, rank: int, scale: float, facts: ExpertFacts, routes: bool
    ) -> None:
        super().__init__()
        (d_out, d_in), self.scale, self.every = one.sizes, scale, facts.count
        self.a = nn.Parameter(torch.empty(facts.count, rank, d_in))
        self.b = nn.Parameter(torch.empty(facts.count, d_out, rank))
        start = Initial(bound=1 / math.sqrt(d_in))  # kaiming_uniform_ with a = sqrt(5)
        lies = along_input(one, 2), along_output(one, 1)
        self.declared = {
            "a": Declared(start, lies[0], "experts.lora_A.weight", "experts"),
            "b": Declared(Initial(), lies[1], "experts.lora_B.weight", "experts"),
        }
        self.sink: GradSink | None = None
        self.router = Router(d_in, facts) if routes else None
        if self.router is not None:
            score = Declared(Initial(std=ROUTER_STD), INSIDE, "router.weight")
            self.router.score = Factor((d_in, facts.count), score)

    def declare(self, leaf: str) -> Declared:
        return self.declared[leaf]

    def forward(self, one: Weighed, x: Tensor) -> Tensor:
        """What all experts give together, in the place of the product of the last weight."""
        assert one.use == "row", "experts are reached by a Mixture"
        return x

    def merged(self, weight: Tensor) -> Tensor:
        raise AssertionError("no weight can take them up")

    def shift(self, bias: Tensor) -> Tensor:
        return bias

    def through(self, one: Linear, x_ND: Tensor, sizes: Sequence[int] | Tensor) -> Tensor:
        """The Linear's product with the updates of the experts, the bias of a column weight added:
        the first sizes[0] rows have that of expert 0, the next sizes[1] that of 1, ..."""
        y = one.plain(x_ND) + self._updates(x_ND, sizes)
        return y if one.bias is None or one.use == "row" else y + one.bias

    def _updates(self, x_ND: Tensor, sizes: Sequence[int] | Tensor) -> Tensor:
        if isinstance(sizes, Tensor):
            from outsize.kernels.grouped import ends_of, grouped  # of devices alone

            ends_E = ends_of(sizes)
            inner = grouped(x_ND, self.a, ends_E, self.sink) * self.scale
            return grouped(inner, self.b, ends_E, self.sink)
        pieces, a, b = x_ND.split(list(sizes)), self.a.unbind(0), self.b.unbind(0)
        found = [self._update(e, a[e], b[e], x) for e, x in enumerate(pieces) if len(x)]
        return torch.cat(found or [self._update(0, a[0], b[0], x_ND)])

    def _update(self, e: int, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        def sink_of(weight: Tensor) -> GradSink | None:
            return redirect(self.sink, weight, lambda grad: grad[e])

        inner = linear(x, a, None, sink_of(self.a)) * self.scale
        return linear(inner, b, None, sink_of(self.b))


@dataclass(frozen=True)
class Expert:
    """What a Dispatch sees of an MLP's experts."""

    mlp: MLP

    @property
    def every(self) -> int:
        return among(self.mlp.up).every

    @property
    def count(self) -> int:
        return among(self.mlp.up).a.shape[0]

    def __call__(self, x_ND: Tensor, sizes: Sequence[int] | Tensor) -> Tensor:
        mlp = self.mlp
        up = among(mlp.up).through(mlp.up, x_ND, sizes)
        if mlp.gate is None:
            inner = mlp.activation.forward(up)
        else:
            gate = among(mlp.gate).through(mlp.gate, x_ND, sizes)
            inner = mlp.gating(gate, up, mlp.activation)
        return among(mlp.down).through(mlp.down, inner, sizes)


def among(one: Linear) -> Experts:
    """The experts beside a Linear."""
    assert isinstance(one.beside, Experts), "it was attached"
    return one.beside


@dataclass(frozen=True)
class Mixture:
    """What an MLP computes. balance: factor of the loss of this layer."""

    balance: float

    def __call__(self, mlp: MLP, x_TD: Tensor, ctx: Context) -> Tensor:
        router = among(mlp.up).router
        assert router is not None, "it lies with the experts of up"
        score_TE = router.scores(x_TD)
        chosen_TJ = router.choose(score_TE)
        if self.balance and torch.is_grad_enabled() and ctx.factor != 0:
            slope_TE = self._slope(score_TE, chosen_TJ, ctx) * router.share
            score_TE = _Sloped.apply(score_TE, slope_TE)  # type: ignore[no-untyped-call]
        y_TD = ctx.dispatch(x_TD, chosen_TJ, router.weigh(score_TE, chosen_TJ), Expert(mlp))
        y_TD = among(mlp.down)(mlp.down, y_TD)
        # The weights of a token's experts add up to 1: together they have the bias once.
        bias = mlp.down.bias if mlp.down.adds_bias else None
        return y_TD if bias is None else torch.add(y_TD, bias)

    @torch.no_grad()
    def _slope(self, score_TE: Tensor, chosen_TJ: Tensor, ctx: Context) -> Tensor:
        """The gradient (T, E) of the balancing loss. OutsizeError where the tokens are not all
        those of their documents."""
        (tokens, experts), bounds = score_TE.shape, ctx.bounds
        if ctx.factor is None or tokens != bounds[-1]:
            raise OutsizeError(
                f"{KEY}.balance is summed over whole documents, which this plan cuts (chunks of"
                " the sequence, mlp_tile, a context axis); leave that out, or set it to 0"
            )
        each_E = torch.arange(experts, device=score_TE.device)
        sent_TE = (chosen_TJ.unsqueeze(-1) == each_E).sum(1).to(score_TE.dtype)
        lengths = torch.tensor([b - a for a, b in pairwise(bounds)], device=score_TE.device)
        document_T = torch.repeat_interleave(lengths, output_size=tokens)
        sums_DE = score_TE.new_zeros(len(lengths), experts).index_add_(0, document_T, sent_TE)
        share_DE = sums_DE / lengths.clamp(min=1).unsqueeze(1)
        return share_DE[document_T] * (ctx.factor * self.balance * experts)


class _Sloped(torch.autograd.Function):
    """Scores as they are, to whose gradient one more is added."""

    @staticmethod
    def forward(ctx: Any, score_TE: Tensor, slope_TE: Tensor) -> Tensor:
        ctx.save_for_backward(slope_TE)
        return score_TE.view_as(score_TE)

    @staticmethod
    def backward(ctx: Any, g_TE: Tensor) -> tuple[Tensor, None]:
        (slope_TE,) = ctx.saved_tensors
        return g_TE + slope_TE, None


def read(found: Mapping[str, Any], naming: Naming) -> MixLora:
    """The adapter that an adapter_config.json says. OutsizeError for what is not one."""
    refuse_others(found, {})
    texts(found, "target_modules")
    naming(found)  # weights of this model, MLPs' among them
    if found.get(key := "attention_modules"):
        texts(found, key)
        attention = naming.targets(naming.chosen(found, key))
    else:
        attention = ()
    balance = found.get("router_aux_loss_coef", 0.0)
    return MixLora(
        number(found, "num_experts"), number(found, "top_k"), number(found, "r"),
        number(found, "lora_alpha", float), float(balance), attention,
    )  # fmt: skip


FORMATS.add(FORMAT, read)
technique(KEY, MixLora, "trains low-rank experts of each frozen MLP behind a router")
