"""A linear layer of two executors: the share, exactness, and that both run at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn import functional as F

from outsize.errors import OutsizeError
from outsize.memory.split import Rates, SplitLinear, host_rows, split
from outsize.memory.store import MemoryStore, pool
from outsize.models.linear import Linear

RATES = [Rates(40e9, 25e9, 600e9), Rates(1e9, 25e9, 1e12), Rates(80e9, 2e9, 2e9)]


@pytest.mark.parametrize("rates", RATES)
def test_the_share_is_the_fastest_of_all(rates):
    share, nbytes = split(rates), 1e9
    best = rates.seconds(nbytes, share)
    assert all(rates.seconds(nbytes, i / 1000) >= best * (1 - 1e-12) for i in range(1001))
    # Both end together.
    away = (1 - share) * nbytes * (1 / rates.link + 1 / rates.device)
    assert share * nbytes / rates.host == pytest.approx(away, rel=1e-12)


def test_a_device_that_costs_nothing_leaves_the_ratio_of_host_and_link():
    assert split(Rates(30e9, 10e9, 1e30)) == pytest.approx(0.75, rel=1e-12)


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("outputs", [1, 7, 4096])
def test_whole_rows_are_the_fastest_whole_rows(rates, outputs):
    rows = host_rows(rates, outputs, 100)
    times = [rates.seconds(outputs * 100, n / outputs) for n in range(outputs + 1)]
    assert times[rows] == pytest.approx(min(times), rel=1e-12)


@pytest.fixture
def host():
    with ThreadPoolExecutor(1) as team:
        yield team


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 20, 37])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_outputs_are_those_of_the_whole_layer(rows, bias, dtype, host):
    torch.manual_seed(0)
    linear = Linear(19, 37, bias).to(dtype)
    for parameter in linear.parameters():
        torch.nn.init.normal_(parameter)
    weight, x = linear.weight.detach().clone(), torch.randn(2, 5, 19).to(dtype)
    expected = F.linear(x, weight, linear.bias).detach()
    store = MemoryStore("host", 1 << 20)
    room = pool(weight.nbytes)
    module = SplitLinear(linear, rows, store, room, host)
    assert linear.weight.numel() == 0 and store.bytes_written == (37 - rows) * weight[0].nbytes
    tolerance = 1e-10 if dtype == torch.float64 else 0.04
    for _ in range(2):
        room.fill_(255)  # another layer was there
        assert torch.allclose(module(x), expected, rtol=0, atol=tolerance)
    assert store.bytes_read == 2 * store.bytes_written
    assert torch.equal(module.restore().weight, weight)


def test_the_host_multiplies_while_the_rest_is_read():
    """A store whose read ends only when the host's part is done: one after another never ends."""
    done = threading.Event()

    class Waiting(MemoryStore):
        def read(self, place, out, at=0):
            assert done.wait(20), "the host did not work while the weight was read"
            super().read(place, out, at)

    class Noting(ThreadPoolExecutor):
        def submit(self, call, /, *args):
            job = super().submit(call, *args)
            job.add_done_callback(lambda _: done.set())
            return job

    linear = Linear(8, 16)
    torch.nn.init.normal_(linear.weight)
    x, expected = torch.randn(3, 8), linear.weight.detach().clone()
    with Noting(1) as host:
        module = SplitLinear(linear, 9, Waiting("slow", 1 << 20), pool(4096), host)
        assert torch.allclose(module(x), x @ expected.t(), atol=1e-6)


def test_a_failed_read_is_an_error_and_leaves_no_work_behind(host):
    linear = Linear(8, 16)
    torch.nn.init.normal_(linear.weight)
    store = MemoryStore("host", 1 << 20)
    module = SplitLinear(linear, 4, store, pool(4096), host)
    store.close()
    with pytest.raises(OutsizeError, match="closed"):
        module(torch.randn(1, 8))


def test_what_cannot_work_is_refused(host):
    with pytest.raises(OutsizeError, match="link 0"):
        Rates(1e9, 0, 1e9)
    store = MemoryStore("host", 1 << 20)
    for rows, size in ((17, 4096), (4, 100)):
        with pytest.raises(OutsizeError, match="room"):
            SplitLinear(Linear(8, 16), rows, store, pool(size), host)
