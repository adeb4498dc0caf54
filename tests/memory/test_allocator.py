"""The ledger over a device's allocator: figures by hand, where the allocator only counts."""

from __future__ import annotations

import pytest
import torch

from outsize.memory import Ledger, OverBudget, meter

WHOLE = 2000  # bytes of the device


class Counting:
    """An allocator as a number."""

    def __init__(self, held, monkeypatch):
        self.held = self.high = held
        for name, stands_in in (
            ("memory_allocated", lambda _: self.held),
            ("max_memory_allocated", lambda _: self.high),
            ("reset_peak_memory_stats", lambda _: self.take(0, reset=True)),
            ("get_memory_info", lambda _: (WHOLE - self.held, WHOLE)),
        ):
            monkeypatch.setattr(torch.accelerator, name, stands_in)

    def take(self, count, reset=False):
        self.held += count
        self.high = self.held if reset else max(self.high, self.held)


def test_kinds_peak_and_what_was_there_before(monkeypatch):
    allocator = Counting(1000, monkeypatch)
    ledger = meter("cuda", 500)
    with ledger:
        with ledger.kind("parameters"):
            allocator.take(100)
        with ledger.kind("optimizer"):
            allocator.take(200)
        ledger.reset_peak()
        allocator.take(90)
        allocator.take(-50)
        ledger.settle()
    assert ledger.live["parameters"] == 100
    assert ledger.live["optimizer"] == 200
    assert ledger.live["activations"] == 40
    assert (ledger.total, ledger.peak) == (340, 390)


def test_an_action_that_was_over_its_budget_raises_at_its_end(monkeypatch):
    allocator = Counting(1000, monkeypatch)
    ledger = meter("cuda", 500)
    allocator.take(500)
    ledger.settle()
    allocator.take(7)
    allocator.take(-107)
    with pytest.raises(OverBudget, match="7 bytes missing"):
        ledger.settle()


def test_a_device_that_runs_out_raises_as_the_dispatcher_would(monkeypatch):
    Counting(0, monkeypatch)
    ledger = meter("cuda", 100)
    with pytest.raises(OverBudget, match="budget of 100 B"), ledger:
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(ValueError, match="else"), ledger:
        raise ValueError("else")


def test_a_cpu_is_counted_at_the_dispatcher():
    assert isinstance(meter("cpu", 5), Ledger)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_both_count_the_same_on_a_gpu():
    device = torch.device("cuda")
    theirs, ours = meter(device), Ledger(device="cuda")
    with theirs, ours:
        held = torch.empty(1 << 20, device=device)
        (held + 1).sum()
        assert theirs.total == ours.total
