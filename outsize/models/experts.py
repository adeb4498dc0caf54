"""A mixture of experts: the router, the experts, and their local dispatch.

Shazeer et al., "Outrageously large neural networks", 2017; groups and the correction bias:
DeepSeek-V3, 2024. An expert without tokens costs nothing and gets a gradient of zeros.

How many rows each expert gets is known when the router has run. Where the host computes, experts
run one by one. On a device the host would have to wait for these numbers in every layer: there all
experts multiply together (outsize/kernels/grouped.py), and the numbers stay on the device.

T tokens, D hidden, F feed-forward, E experts, J chosen a token, N = T * J rows sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outsize import accelerator
from outsize.kernels.linear import GradSink, linear
from outsize.kernels.rows import by_element
from outsize.models.config import DecoderConfig, ExpertFacts
from outsize.models.declared import INSIDE, Declared, Initial, Lies
from outsize.models.linear import Linear, redirect
from outsize.models.mlp import ACTIVATIONS, MLP, Activation, gated
from outsize.models.seams import Context, ExpertSet
from outsize.torch_private import FakeTensor


@dataclass(frozen=True)
class Expert:
    """One expert's weights, views into the stacked ones: gate, up (F, D), down (D, F)."""

    gate: Tensor
    up: Tensor
    down: Tensor
    sinks: tuple[GradSink | None, GradSink | None, GradSink | None]
    activation: Activation

    def __call__(self, x_ND: Tensor) -> Tensor:
        gate_NF = linear(x_ND, self.gate, None, self.sinks[0])
        up_NF = linear(x_ND, self.up, None, self.sinks[1])
        return linear(gated(gate_NF, up_NF, self.activation), self.down, None, self.sinks[2])


class Experts(nn.Module):
    """Stacked weights gate, up (E, F, D) and down (E, D, F); `sink` as in Linear.

    A sink is called with the stacked parameter, whose gradient it adds to: once for each weight, or
    once for each weight and expert that has tokens, where these run one by one.
    """

    def __init__(self, hidden: int, facts: ExpertFacts, activation: str) -> None:
        super().__init__()
        self.every = facts.count
        self.activation = ACTIVATIONS[activation]
        self.gate = nn.Parameter(torch.empty(facts.count, facts.hidden, hidden))
        self.up = nn.Parameter(torch.empty(facts.count, facts.hidden, hidden))
        self.down = nn.Parameter(torch.empty(facts.count, hidden, facts.hidden))
        self.sink: GradSink | None = None

    def declare(self, leaf: str) -> Declared:
        lies = Lies(2 if leaf == "down" else 1, "expert_inner")
        return Declared(Initial(std="model"), lies, stack="experts")

    @property
    def count(self) -> int:
        """Experts that lie on this worker."""
        return self.gate.shape[0]

    def each(self) -> tuple[Expert, ...]:
        """The experts one by one. Call once a forward: the views are taken together, so that
        autograd stacks their gradients once instead of adding a full-size one an expert."""
        stacked = (self.gate, self.up, self.down)
        views = [weight.unbind(0) for weight in stacked]

        def sink_of(weight: Tensor, e: int) -> GradSink | None:
            return redirect(self.sink, weight, lambda grad: grad[e])

        return tuple(
            Expert(
                views[0][e],
                views[1][e],
                views[2][e],
                (sink_of(self.gate, e), sink_of(self.up, e), sink_of(self.down, e)),
                self.activation,
            )
            for e in range(self.count)
        )

    def forward(self, x_ND: Tensor, sizes: Sequence[int] | Tensor) -> Tensor:
        """x_ND sorted by expert, sizes[e] rows for expert e -> y_ND in the same order. Without any
        row the first expert runs on none, so that autograd goes the same ways on every worker."""
        if isinstance(sizes, Tensor):
            return self._together(x_ND, sizes)
        pieces, each = x_ND.split(list(sizes)), self.each()
        outputs = [expert(x) for expert, x in zip(each, pieces, strict=True) if len(x)]
        return torch.cat(outputs or [each[0](x_ND)])

    def _together(self, x_ND: Tensor, sizes_E: Tensor) -> Tensor:
        from outsize.kernels.grouped import ends_of, grouped  # of devices alone

        ends_E = ends_of(sizes_E)
        gate_NF = grouped(x_ND, self.gate, ends_E, self.sink)
        up_NF = grouped(x_ND, self.up, ends_E, self.sink)
        return grouped(gated(gate_NF, up_NF, self.activation), self.down, ends_E, self.sink)


class Router(nn.Module):
    """x_TD -> (chosen_TJ int64, weight_TJ float32 or float64). share: of the gradient of a loss of
    its own scores, the part that this worker adds, where several compute the same."""

    def __init__(self, hidden: int, facts: ExpertFacts) -> None:
        super().__init__()
        self.facts = facts
        self.score = Linear(hidden, facts.count, whole=INSIDE)
        self.share = 1.0
        # Moved by load balancing, never by a gradient; stays in float32.
        correction = torch.empty(facts.count, dtype=torch.float32)
        self.correction = (
            nn.Parameter(correction, requires_grad=False) if facts.correction else None
        )

    def declare(self, _: str) -> Declared:
        """The correction, which no gradient ever moves."""
        return Declared(Initial(value=0.0), Lies())

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        score_TE = self.scores(x_TD)
        chosen_TJ = self.choose(score_TE)
        return chosen_TJ, self.weigh(score_TE, chosen_TJ)

    def scores(self, x_TD: Tensor) -> Tensor:
        """score_TE, float32 or float64."""
        logits_TE = self.score.wide(x_TD)
        soft = self.facts.scoring == "softmax"
        return logits_TE.softmax(-1) if soft else by_element(torch.sigmoid, logits_TE)

    def weigh(self, score_TE: Tensor, chosen_TJ: Tensor) -> Tensor:
        """weight_TJ of what was chosen."""
        weight_TJ = score_TE.gather(1, chosen_TJ)
        if self.facts.normalise:
            # All sigmoids may underflow together; a softmax's largest entries cannot.
            floor = 0.0 if self.facts.scoring == "softmax" else 1e-20
            weight_TJ = weight_TJ / (weight_TJ.sum(-1, keepdim=True) + floor)
        return weight_TJ * self.facts.scaling

    @torch.no_grad()
    def choose(self, score_TE: Tensor) -> Tensor:
        """chosen_TJ."""
        facts = self.facts
        if self.correction is not None:
            score_TE = score_TE + self.correction
        if facts.groups > 1:
            # A group's score is the sum of its two best; experts of lost groups are out.
            grouped = score_TE.unflatten(1, (facts.groups, -1))
            best_two = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
            won = best_two.topk(facts.chosen_groups, dim=-1).indices
            lost = torch.ones_like(best_two, dtype=torch.bool).scatter_(1, won, False)
            score_TE = grouped.masked_fill(lost.unsqueeze(-1), float("-inf")).flatten(1)
        return score_TE.topk(facts.chosen, dim=-1).indices


class _Sort(torch.autograd.Function):
    """Rows of x_TD by expert. The backward sums each token's J rows in fixed order, where the
    backward of plain indexing would add them in whatever order a GPU happens to."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_N: Tensor, inverse_N: Tensor, j: int) -> Tensor:
        ctx.save_for_backward(inverse_N)
        ctx.j = j
        return x_TD[order_N // j]

    @staticmethod
    def backward(ctx: Any, gy_ND: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse_N,) = ctx.saved_tensors
        return gy_ND[inverse_N].unflatten(0, (-1, ctx.j)).sum(1), None, None, None


class Reorder(torch.autograd.Function):
    """x_ND[places_N], where inverse_N orders them back."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, places_N: Tensor, inverse_N: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_N)
        return x_ND[places_N]

    @staticmethod
    def backward(ctx: Any, gy_ND: Tensor) -> tuple[Tensor, None, None]:
        (inverse_N,) = ctx.saved_tensors
        return gy_ND[inverse_N], None, None


def unknown(chosen_TJ: Tensor) -> bool:
    """Whether no values exist: of a rehearsal, or of shapes alone."""
    return isinstance(chosen_TJ, FakeTensor) or chosen_TJ.is_meta


def sizes_of(chosen_TJ: Tensor, count: int) -> Tensor:
    """Rows for each expert, where the choice is: int64."""
    experts_E = torch.arange(count, device=chosen_TJ.device)
    return (chosen_TJ.unsqueeze(-1) == experts_E).sum((0, 1))


def expert_sizes(chosen_TJ: Tensor, count: int) -> list[int]:
    """Rows for each expert, on the host, which waits for the device.

    Under FakeTensorMode no values exist; the load is then the most uneven one, all tokens to the
    same experts, which needs the most memory: what is predicted to fit must fit whatever comes.
    """
    if unknown(chosen_TJ):
        rows, chosen = chosen_TJ.shape
        return [rows if e < chosen else 0 for e in range(count)]
    sizes: list[int] = sizes_of(chosen_TJ, count).tolist()
    return sizes


def dispatched(
    x_TD: Tensor, chosen_TJ: Tensor, weight_TJ: Tensor, run: Callable[[Tensor], Tensor]
) -> Tensor:
    """Sort the tokens by expert, run the experts, sum up. run: x_ND in the order of the experts
    -> y_ND."""
    chosen = chosen_TJ.shape[1]
    order_N = chosen_TJ.flatten().argsort(stable=True)
    inverse_N = order_N.argsort()
    x_ND: Tensor = _Sort.apply(x_TD, order_N, inverse_N, chosen)  # type: ignore[no-untyped-call]
    y_ND: Tensor = Reorder.apply(run(x_ND), inverse_N, order_N)  # type: ignore[no-untyped-call]
    y_TJD: Tensor = y_ND.unflatten(0, (-1, chosen))
    return (y_TJD * weight_TJ.unsqueeze(-1)).sum(1).to(x_TD.dtype)


def _served(device: torch.device) -> bool:
    """Whether experts on a device multiply together, without the host."""
    if not accelerator.queues(device):
        return False
    from outsize.kernels.grouped import served

    return served(device)


class LocalDispatch:
    """Every expert is here. The host learns how many rows each has only where it must."""

    def __call__(
        self, x_TD: Tensor, chosen_TJ: Tensor, weight_TJ: Tensor, experts: ExpertSet
    ) -> Tensor:
        counts = sizes_of if _served(x_TD.device) else expert_sizes
        sizes = counts(chosen_TJ, experts.count)
        return dispatched(x_TD, chosen_TJ, weight_TJ, lambda x_ND: experts(x_ND, sizes))


class ExpertMLP(nn.Module):
    """x_TD -> y_TD: each token through its experts, and through the shared one if there is one."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        facts = config.experts
        assert facts is not None, "a layer with experts needs config.experts"
        self.router = Router(config.hidden, facts)
        self.experts = Experts(config.hidden, facts, config.activation)
        inner = facts.shared_hidden
        self.shared = (
            MLP(config.hidden, inner, config.activation, unit="shared_inner") if inner else None
        )

    def forward(self, x_TD: Tensor, ctx: Context) -> Tensor:
        chosen_TJ, weight_TJ = self.router(x_TD)
        y_TD = ctx.dispatch(x_TD, chosen_TJ, weight_TJ, self.experts)
        return y_TD if self.shared is None else y_TD + self.shared(x_TD)
