"""The ledger against bytes counted by hand, and against itself on fake tensors."""

from __future__ import annotations

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from outsize.memory import Ledger, OverBudget


def live(ledger: Ledger) -> int:
    assert ledger.total == sum(ledger.live.values())
    return ledger.total


def test_a_storage_counts_once_however_many_tensors_see_it():
    with Ledger() as ledger:
        x = torch.empty(10, 6)
        assert live(ledger) == 240
        views = [x.view(60), x[2:5], x.t(), x.unsqueeze(0), x.detach(), x.expand(4, 10, 6)]
        assert live(ledger) == 240
        y = x.double()
        assert live(ledger) == 240 + 480
        del x
        assert live(ledger) == 240 + 480, "the views hold it"
        del views
        assert live(ledger) == 480
        del y
        assert live(ledger) == 0 and ledger.peak == 720


def test_in_place_operators_allocate_nothing():
    with Ledger() as ledger:
        x = torch.ones(100)
        ledger.reset_peak()
        x.add_(1).mul_(2).exp_()
        x[3:7].zero_()
        assert live(ledger) == ledger.peak == 400


def test_out_variants_grow_their_storage():
    a, b = torch.ones(8, 5), torch.ones(5, 3)
    with Ledger() as ledger:
        out = torch.empty(0)
        assert live(ledger) == 0
        torch.mm(a, b, out=out)
        assert live(ledger) == 8 * 3 * 4
        torch.mm(a, b, out=out)
        assert live(ledger) == 8 * 3 * 4
        out.resize_(100)
        assert live(ledger) == 400
        out.untyped_storage().resize_(0)
        out.add_(0) if out.untyped_storage().nbytes() else ledger.see(out)
        assert live(ledger) == 0


def test_inputs_from_before_are_counted_when_they_are_seen():
    x = torch.ones(50, dtype=torch.float64)
    with Ledger() as ledger:
        y = x + 1
        assert live(ledger) == 400
        z = x.view(10, 5)
        assert live(ledger) == 800
        del y, z
        assert live(ledger) == 400, "x itself is alive"
    del x
    assert live(ledger) == 0


def test_a_released_tensor_is_no_longer_counted_and_may_come_back():
    x = torch.ones(10)
    with Ledger() as ledger:
        with ledger.kind("data"):
            ledger.see(x)
        assert ledger.live["data"] == 40
        ledger.release(x)
        ledger.release(x)
        assert live(ledger) == 0
        ledger.see(x)
        assert live(ledger) == 40
    del x
    assert live(ledger) == 0


def test_what_autograd_saves_is_counted_until_the_backward_pass():
    x = torch.ones(1000, requires_grad=True)
    with Ledger() as ledger:
        y = x.exp().sin().sum()  # exp(x) is saved twice, by both: one storage
        gc.collect()
        assert live(ledger) == 4000 + 4
        y.backward()
        y = None
        assert live(ledger) == 4000  # x.grad
        x.grad = None
        assert live(ledger) == 0


def test_kinds_and_settling():
    with Ledger() as ledger:
        with ledger.kind("parameters"):
            weight = torch.empty(10)
        with pytest.raises(RuntimeError), ledger.kind("master"):
            raise RuntimeError
        kept, thrown = torch.empty(20), torch.empty(30)
        assert ledger.live["parameters"] == 40 and ledger.live["workspace"] == 200
        del thrown
        ledger.settle()
        assert ledger.live["activations"] == 80 and ledger.live["workspace"] == 0
        del weight
        assert ledger.live["parameters"] == 0
        del kept
        assert ledger.live["activations"] == 0


def test_the_peak_is_that_of_the_highest_moment():
    with Ledger() as ledger:
        first = torch.empty(10)
        ledger.settle()
        second = torch.empty(20)
        del second
        assert ledger.peak == 120
        ledger.reset_peak()
        assert ledger.peak == ledger.total == 40
        del first


def test_other_devices_are_not_counted():
    with Ledger() as ledger:
        torch.empty(10, device="meta")
        torch.empty(0)
        assert live(ledger) == ledger.peak == 0


def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(12, 40), torch.nn.GELU(), torch.nn.LayerNorm(40), torch.nn.Linear(40, 3)
    )


def train(model, x):
    """Counts after every part of two steps of a small network."""
    counts = []
    optimizer = torch.optim.AdamW(model.parameters(), fused=False)
    with Ledger() as ledger:
        for _ in range(2):
            loss = torch.nn.functional.cross_entropy(model(x), x.new_zeros(9, dtype=torch.int64))
            counts.append((ledger.total, ledger.peak))
            loss.backward()
            counts.append((ledger.total, ledger.peak))
            optimizer.step()
            optimizer.zero_grad()
            counts.append((ledger.total, ledger.peak))
            ledger.settle()
            del loss
    return counts, dict(ledger.live)


def test_counts_are_the_same_in_every_run():
    assert train(network(), torch.ones(9, 12)) == train(network(), torch.ones(9, 12))


def test_fake_tensors_count_as_real_ones():
    real = train(network(), torch.ones(9, 12))
    with FakeTensorMode():
        fake = train(network(), torch.ones(9, 12))
    assert fake == real and real[0][0][0] > 9 * 40 * 4


def test_over_the_budget_it_raises_with_the_missing_bytes_and_stays_consistent():
    with Ledger(budget=1000) as ledger:
        held = torch.empty(200)  # 800 bytes
        with pytest.raises(OverBudget, match="57 bytes missing") as caught:
            torch.empty(257, dtype=torch.int8)
        assert caught.value.missing == 57
        assert live(ledger) == ledger.peak == 800
        exactly = torch.empty(50)
        assert live(ledger) == 1000
        with pytest.raises(OverBudget, match="1 byte missing"):
            torch.empty(1, dtype=torch.int8)
        del held, exactly
        assert live(ledger) == 0
        assert torch.empty(250).numel() == 250


def test_growing_over_the_budget_leaves_what_was_counted():
    with Ledger(budget=1000) as ledger:
        x = torch.empty(100)
        with pytest.raises(OverBudget) as caught:
            x.resize_(300)
        assert caught.value.missing == 200 and live(ledger) == 400
        del x, caught  # whose traceback holds x
        assert live(ledger) == 0


def test_over_the_budget_inside_a_backward_pass():
    x = torch.ones(100, requires_grad=True)
    with Ledger() as free:
        y = x.exp().exp().sum()
        free.reset_peak()
        y.backward()
        peak = free.peak
    x.grad = y = None
    with Ledger(budget=peak - 1) as ledger:
        y = x.exp().exp().sum()
        with pytest.raises(OverBudget, match="1 byte missing"):
            y.backward()
        y = None
        gc.collect()
        assert live(ledger) == (0 if x.grad is None else 400)
