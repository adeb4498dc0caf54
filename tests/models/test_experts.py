"""Router, experts and local dispatch against a dense mixture written as its formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from outsize.models import experts as module
from outsize.models.config import ExpertFacts
from outsize.models.experts import Experts, LocalDispatch, Router, expert_sizes

TOKENS, HIDDEN, COUNT = 23, 10, 6


@pytest.fixture(params=["one by one", "together"])
def experts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Experts:
    """As the host runs them, and as a device does that alone knows how many rows each has."""
    monkeypatch.setattr(module, "_served", lambda device: request.param == "together")
    made = Experts(HIDDEN, ExpertFacts(COUNT, 2, 7), "silu").double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made


def choices(experts_used: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, two distinct experts each among the first few, weights."""
    x_TD = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    chosen_TJ = torch.rand(TOKENS, experts_used).argsort(1)[:, :2]
    weight_TJ = torch.rand(TOKENS, 2, dtype=torch.float64, requires_grad=True)
    return x_TD, chosen_TJ, weight_TJ


def dense(x_TD: Tensor, chosen_TJ: Tensor, weight_TJ: Tensor, experts: Experts) -> Tensor:
    """Every token through every expert, weighted by zero where it was not chosen."""
    gate = torch.einsum("td,efd->tef", x_TD, experts.gate)
    up = torch.einsum("td,efd->tef", x_TD, experts.up)
    y_TED = torch.einsum("tef,edf->ted", F.silu(gate) * up, experts.down)
    weight_TE = torch.zeros(TOKENS, COUNT, dtype=x_TD.dtype).scatter(1, chosen_TJ, weight_TJ)
    return torch.einsum("ted,te->td", y_TED, weight_TE)


@pytest.mark.parametrize("used", [2, 4, 6])
def test_dispatch_equals_the_dense_mixture(experts: Experts, used: int) -> None:
    x_TD, chosen_TJ, weight_TJ = choices(used)
    over = (x_TD, weight_TJ, *experts.parameters())
    pull = torch.randn(TOKENS, HIDDEN, dtype=torch.float64)
    expected = dense(x_TD, chosen_TJ, weight_TJ, experts)
    got = LocalDispatch()(x_TD, chosen_TJ, weight_TJ, experts)
    wanted = torch.autograd.grad(expected, over, pull)
    gradients = torch.autograd.grad(got, over, pull)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)
    for gradient in gradients[2:]:  # experts without tokens: zeros, not nothing
        assert not gradient[used:].any()


class Collect:
    """A sink that adds what it is given into zeros."""

    def __init__(self) -> None:
        self.gradients: dict[int, Tensor] = {}

    def __call__(self, weight: Tensor, compute: Callable[[Tensor], None]) -> None:
        compute(self.gradients.setdefault(id(weight), torch.zeros_like(weight)))


def test_a_sink_gets_what_autograd_would(experts: Experts) -> None:
    x_TD, chosen_TJ, weight_TJ = choices(4)
    over = (x_TD, weight_TJ, *experts.parameters())
    wanted = torch.autograd.grad(LocalDispatch()(x_TD, chosen_TJ, weight_TJ, experts).sum(), over)
    experts.sink = sink = Collect()
    LocalDispatch()(x_TD, chosen_TJ, weight_TJ, experts).sum().backward()
    torch.testing.assert_close(x_TD.grad, wanted[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weight_TJ.grad, wanted[1], rtol=1e-12, atol=1e-12)
    for parameter, gradient in zip(experts.parameters(), wanted[2:], strict=True):
        assert parameter.grad is None
        torch.testing.assert_close(sink.gradients[id(parameter)], gradient, rtol=0, atol=1e-12)


def test_a_sink_on_frozen_experts_gets_nothing(experts: Experts) -> None:
    experts.requires_grad_(False)
    experts.sink = sink = Collect()
    x_TD, chosen_TJ, weight_TJ = choices(4)
    LocalDispatch()(x_TD, chosen_TJ, weight_TJ, experts).sum().backward()
    assert x_TD.grad is not None and not sink.gradients


def router(facts: ExpertFacts, dtype: torch.dtype = torch.float64) -> Router:
    made = Router(HIDDEN, facts).to(dtype)
    with torch.no_grad():
        made.score.weight.normal_()
        if made.correction is not None:
            made.correction.normal_()
    return made


def test_router_sink_and_half_precision() -> None:
    made = router(ExpertFacts(COUNT, 2, 7), torch.bfloat16)
    x_TD = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    chosen_TJ, weight_TJ = made(x_TD)
    assert weight_TJ.dtype == torch.float32
    exact = (x_TD.double() @ made.score.weight.double().T).softmax(-1).topk(2)
    assert torch.equal(chosen_TJ, exact.indices)  # scores are made in float32, not in bfloat16
    share = exact.values / exact.values.sum(-1, keepdim=True)
    torch.testing.assert_close(weight_TJ.double(), share, rtol=1e-5, atol=1e-6)

    (wanted,) = torch.autograd.grad(weight_TJ[:, 0].sum(), [made.score.weight])
    made.score.sink = sink = Collect()
    made(x_TD)[1][:, 0].sum().backward()
    got = sink.gradients[id(made.score.weight)]
    torch.testing.assert_close(got, wanted)


def test_groups_are_chosen_by_their_two_best_with_the_correction() -> None:
    """Written as loops over tokens and groups."""
    facts = ExpertFacts(8, 3, 7, "sigmoid", True, 2.5, groups=4, chosen_groups=2, correction=True)
    made = router(facts)
    x_TD = torch.randn(TOKENS, HIDDEN, dtype=torch.float64)
    chosen_TJ, weight_TJ = made(x_TD)
    assert made.correction is not None
    for t in range(TOKENS):
        score = (made.score.weight @ x_TD[t]).sigmoid()
        seen = (score + made.correction).tolist()
        best = sorted(range(4), key=lambda g: -sum(sorted(seen[2 * g : 2 * g + 2])[-2:]))[:2]
        allowed = [e for e in range(8) if e // 2 in best]
        wanted = sorted(allowed, key=lambda e: -seen[e])[:3]
        assert sorted(wanted) == sorted(chosen_TJ[t].tolist())
        share = score[chosen_TJ[t]] / score[wanted].sum() * 2.5
        torch.testing.assert_close(weight_TJ[t], share, rtol=1e-12, atol=1e-12)
    gone_TE = torch.zeros(TOKENS, 8)  # sigmoids that have underflowed together
    assert torch.equal(made.weigh(gone_TE, chosen_TJ), gone_TE[:, :3])


def test_sizes_are_counted_and_most_uneven_without_values() -> None:
    chosen_TJ = torch.tensor([[0, 3], [3, 1], [3, 0]])
    assert expert_sizes(chosen_TJ, 5) == [2, 1, 0, 3, 0]
    assert expert_sizes(chosen_TJ.to("meta"), 4) == [3, 3, 0, 0]
