"""Optimizers over flat ranges against torch.optim over whole parameters, many steps each."""

from __future__ import annotations

import pytest
import torch

from outsize.errors import OutsizeError
from outsize.optim import SGD, AdamW
from outsize.optim.declared import named
from outsize.optim.optimizer import Rates
from outsize.optim.parse import MuonSettings, SGDSettings, parse

SHAPES = [(5, 3), (7,), (), (2, 2, 3)]
STEPS = 150  # beyond the first hundred, where corrections for the start are near one


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(s, dtype=torch.float64, generator=generator) for s in SHAPES]


def flat(tensors) -> torch.Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def theirs(make) -> torch.Tensor:
    """Weights after STEPS steps of a torch optimizer, laid flat; a new rate every step."""
    parameters = [torch.nn.Parameter(g) for g in gradients(-1 % 1000)]
    optimizer = make(parameters)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return flat([p.detach() for p in parameters])


def ours(optimizer, ranges=((0, 35),)) -> torch.Tensor:
    weights = flat(gradients(-1 % 1000))
    assert len(weights) == 35
    state = {name: torch.zeros_like(weights) for name in named(optimizer.states)}
    for step in range(STEPS):
        gradient = flat(gradients(step))
        before = gradient.clone()
        for start, stop in ranges:
            here = slice(start, stop)
            optimizer.update(
                weights[here], gradient[here], {n: s[here] for n, s in state.items()},
                Rates(step + 1, 0.1 / (step + 1), optimizer.weight_decay),
            )  # fmt: skip
        assert torch.equal(gradient, before), "gradients are left as they are"
    return weights


CASES = {
    "adamw": (
        AdamW(weight_decay=0.3),
        lambda p: torch.optim.AdamW(p, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.3),
    ),
    "adamw, other numbers": (
        AdamW(betas=(0.7, 0.9), eps=1e-3, weight_decay=0.0),
        lambda p: torch.optim.AdamW(p, betas=(0.7, 0.9), eps=1e-3, weight_decay=0.0),
    ),
    "sgd": (SGD(), lambda p: torch.optim.SGD(p, lr=1.0)),
    "sgd, momentum, decay": (
        SGD(momentum=0.9, weight_decay=0.2),
        lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9, weight_decay=0.2),
    ),
    "sgd, decay": (
        SGD(weight_decay=0.2),
        lambda p: torch.optim.SGD(p, lr=1.0, weight_decay=0.2),
    ),
}


@pytest.mark.parametrize("ranges", [((0, 35),), ((0, 4), (4, 19), (19, 35))])
@pytest.mark.parametrize("name", CASES)
def test_many_steps_equal_torch(name, ranges):
    optimizer, make = CASES[name]
    expected, got = theirs(make), ours(optimizer, ranges)
    assert float((got - expected).abs().max()) <= 1e-12 * float(expected.abs().max())


@pytest.mark.parametrize("optimizer", [AdamW(), SGD(momentum=0.9), SGD()])
def test_a_range_leaves_its_neighbours_alone(optimizer):
    weights = torch.ones(10)
    state = {name: torch.zeros(10) for name in named(optimizer.states)}
    here = slice(3, 6)
    optimizer.update(
        weights[here], torch.ones(3), {n: s[here] for n, s in state.items()}, Rates(1, 0.1, 0.0)
    )
    for buffer in (weights - 1, *state.values()):
        assert buffer[here].all() and not buffer[:3].any() and not buffer[6:].any()


@pytest.mark.parametrize("optimizer", [AdamW(weight_decay=0.1), SGD(momentum=0.9)])
@pytest.mark.parametrize("gradient", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32])
def test_dtypes_may_be_mixed(optimizer, gradient, weight):
    """Weights are near those of float32 throughout: apart by what rounding them to their own
    dtype at every step allows."""
    start, first = torch.randn(64), torch.randn(64)
    results = []
    for dtypes in ((weight, gradient), (torch.float32, torch.float32)):
        w, g = start.bfloat16().to(dtypes[0]), first.bfloat16().to(dtypes[1])
        state = {name: torch.zeros(64) for name in named(optimizer.states)}
        for step in range(5):
            optimizer.update(w, g, state, Rates(step + 1, 0.05, optimizer.weight_decay))
        assert w.dtype == dtypes[0] and g.dtype == dtypes[1]
        assert all(s.dtype == torch.float32 for s in state.values())
        results.append(w.float())
    limit = 5 * 2.0**-8 if weight is torch.bfloat16 else 0.0  # five roundings of half a last digit
    assert bool(((results[0] - results[1]).abs() <= limit * results[1].abs().clamp(min=0.5)).all())


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32])
def test_moments_in_half_precision(weight):
    """Each step rounds them by half a last digit, 2^-9 of their size, of which every step forgets
    1 - beta: a geometric sum."""
    optimizer, generator = AdamW(betas=(0.9, 0.95)), torch.Generator().manual_seed(3)
    start = torch.randn(64, generator=generator)
    got = {name: torch.zeros(64, dtype=torch.bfloat16) for name in named(optimizer.states)}
    exact = {name: torch.zeros(64, dtype=torch.float64) for name in got}
    w, wide = start.to(weight, copy=True), start.double()
    for step in range(60):
        g = (1 + torch.rand(64, generator=generator)).to(weight)
        optimizer.update(w, g, got, Rates(step + 1, 0.01, 0.0))
        optimizer.update(wide, g.double(), exact, Rates(step + 1, 0.01, 0.0))
    for name, beta in zip(got, optimizer.betas, strict=True):
        off = (got[name].double() / exact[name] - 1).abs().max()
        assert got[name].dtype == torch.bfloat16 and float(off) < 2.0**-9 / (1 - beta)
    if weight == torch.float32:  # the root of the second moment is off half as much
        allowed = 2.0**-9 / (1 - 0.9) + 2.0**-10 / (1 - 0.95)
        moved = wide - start.double()
        assert float(((w.double() - wide) / moved).abs().max()) < allowed


def test_what_an_optimizer_says_of_itself():
    assert named(AdamW().states) == ("exp_avg", "exp_avg_sq")
    assert SGD().states == () and named(SGD(momentum=0.5).states) == ("momentum",)
    assert AdamW().grain == SGD().grain == 1


BAD = {
    "optimizer: betas is [0.9, 1.5]; expected 0 or more and less than 1": (
        lambda: AdamW(betas=(0.9, 1.5))
    ),
    "optimizer: lr is -1; expected a number of 0 or more": lambda: AdamW(-1.0),
    "optimizer: eps is nan; expected a number of 0 or more": lambda: AdamW(eps=float("nan")),
    "optimizer: momentum is 1; expected 0 or more and less than 1": lambda: SGD(momentum=1.0),
    "optimizer: weight_decay is inf; expected a number": (
        lambda: parse("muon", 1e-3, float("inf"), (0.9, 0.95))
    ),
}


@pytest.mark.parametrize("text", BAD)
def test_settings_that_make_no_sense_are_refused(text):
    with pytest.raises(OutsizeError) as caught:
        BAD[text]()
    assert str(caught.value).startswith(text)


def test_optimizers_by_name():
    assert parse("sgd", 1e-3, 0.2, (0.8, 0.9), SGDSettings(0.5)) == SGD(1e-3, 0.5, 0.2)
    assert parse("muon", 1e-3, 0.2, (0.8, 0.9), MuonSettings(0.5)).momentum == 0.5
    assert parse("adamw", 1e-3, 0.2, (0.8, 0.9)) == AdamW(1e-3, (0.8, 0.9), weight_decay=0.2)
    assert parse("sgd", 1e-3, 0.2, (0.8, 0.9)) == SGD(1e-3, 0.8, 0.2)
    with pytest.raises(OutsizeError, match="optimizer 'adamm' is not known; did you mean 'adamw'"):
        parse("adamm", 1e-3, 0.2, (0.8, 0.9))
