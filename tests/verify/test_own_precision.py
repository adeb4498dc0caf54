"""The verdict in float32 and bfloat16: plain PyTorch is within its bounds, and faults of what runs
only there are not, among them those of the choice between two kernels."""

from __future__ import annotations

import ctypes

import pytest
import torch
from verifying import case_of

from outsize.kernels import native
from outsize.kernels.entropy import LossOptions
from outsize.kernels.loss import Head
from outsize.plan import Precision
from outsize.verify import verify
from outsize.verify.bounds import numbers, trained
from outsize.verify.compare import compare
from outsize.verify.plain import train
from outsize.verify.rounding import USUAL, Rounding, roundoff
from outsize.verify.verify import EXACT


def small(named: str, **more):
    return case_of(named=named, rows=2, microbatch_rows=1, steps=1, **more)


@pytest.mark.parametrize("named", ["float32", "bfloat16"])
def test_plain_pytorch_is_within_and_a_gradient_counted_twice_is_not(named):
    case = small(named, clip=0.5)
    batches = [case.batch(0)]
    truth = train(case.within(EXACT).plain(EXACT), case.recipe, batches)
    plain = train(case.plain(case.plan.precision), case.recipe, batches)
    bounds = trained(case, truth, batches).bounds(4)
    assert not bounds.over(numbers(compare(plain, truth, named))) and not bounds.blind
    (step,) = plain
    doubled = next(iter(step.gradients))
    gradients = {**step.gradients, doubled: 2 * step.gradients[doubled]}
    twice = type(step)(step.loss, step.norm, gradients, step.weights)
    (first, *_) = bounds.over(numbers(compare([twice], truth, named)))
    assert first.key[0] == doubled and first.found == pytest.approx(1, abs=0.1)


def test_bounds_grow_with_the_root_of_the_length_of_sums():
    """A product of n terms in float32, against what its own roundings come to."""
    torch.manual_seed(0)
    for count in (16, 4096):
        a, b = (
            torch.randn(64, count, dtype=torch.float64),
            torch.randn(count, 64, dtype=torch.float64),
        )
        exact = a @ b
        with Rounding(Precision.named("float32"), 1):
            moved = a @ b
        size = (a.square() @ b.square() + exact.square()).sqrt()
        found = float(((moved - exact) / size).square().mean().sqrt())
        unit = roundoff("float32")
        assert found == pytest.approx(USUAL * unit * (1 + count) ** 0.5, rel=0.1)
        x, y = a.float(), b.float()
        terms = x.double() @ y.double()
        own = float((((x @ y).double() - terms) / size).square().mean().sqrt())
        assert own < found, "plain PyTorch adds up in no worse an order"


def test_the_choice_between_two_kernels_of_the_loss(monkeypatch):
    """Without one condition the fused pass, which knows no options, takes every loss."""
    if native.library() is None:
        pytest.skip("no compiler here")
    case = small("float32", options=LossOptions(0.1, 1e-2))
    assert verify(case).holds
    monkeypatch.setattr(
        Head,
        "bare",
        lambda head, gradient: head.vocabulary is None and head.scale == 1.0
        and head.softcap is None,
    )  # fmt: skip
    found = verify(case)
    assert found.exact.holds() and not found.holds
    assert ("", "loss") in {one.key for one in found.over}


class Broken:
    """The native passes, some of them broken. faults: by name, what comes behind the pass."""

    def __init__(self, **faults) -> None:
        self.faults = faults

    def __getattr__(self, name):
        found = getattr(native.library(), name)
        fault = self.faults.get(name.removeprefix("outsize_"))
        if fault is None:
            return found

        def run(*given):
            made = found(*given)
            fault(found, *given)
            return made

        return run


def off(_, code, g, gate, up, ggate, gup, count, threads):
    """One part in 2,000 of the gate's gradient."""
    memory = (ctypes.c_float * count).from_address(gup)
    torch.frombuffer(memory, dtype=torch.float32).mul_(1.0005)


def again(found, *given):
    """Half precision added to wider gradients, twice."""
    found(*given)


@pytest.mark.parametrize(
    ("named", "faults", "where"),
    [("float32", {"gate_backward": off}, "mlp"), ("bfloat16", {"add": again}, "")],
)
def test_a_native_pass_that_float64_never_meets(monkeypatch, named, faults, where):
    if native.library() is None:
        pytest.skip("no compiler here")
    case = small(named)
    monkeypatch.setattr(native, "loaded", lambda: Broken(**faults))
    found = verify(case)
    assert found.exact.holds() and not found.holds
    assert any(where in one.key[0] for one in found.over)
