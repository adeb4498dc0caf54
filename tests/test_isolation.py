"""The walls that conftest.py puts around every test."""

from __future__ import annotations

import os
import signal
import socket

import pytest
import torch
from openmp import let_threads_go

from outsize.hardware.probe import probe


def test_far_connection_is_refused() -> None:
    with socket.socket() as sock, pytest.raises(OSError, match="without a network"):
        sock.connect(("192.0.2.1", 80))
    with socket.socket() as sock, pytest.raises(OSError, match="without a network"):
        sock.connect_ex(("192.0.2.1", 80))


def test_loopback_connection_works() -> None:
    with socket.socket() as server, socket.socket() as client:
        server.bind(("127.0.0.1", 0))
        server.listen()
        client.connect(server.getsockname())
        assert client.getpeername() == server.getsockname()


@pytest.mark.parametrize("turn", [1, 2])
def test_each_test_starts_alike(turn: int) -> None:
    assert torch.initial_seed() == 0 and torch.get_num_threads() == 1
    assert torch.get_default_dtype() is torch.float32
    torch.manual_seed(turn)
    torch.set_default_dtype(torch.float64)


@pytest.mark.parametrize("turn", [1, 2])
def test_cache_holds_but_kernels_and_rates_at_start(turn: int) -> None:
    cache = os.environ["XDG_CACHE_HOME"]
    assert os.listdir(cache) == ["outsize"]
    kernels, rates = sorted(os.listdir(os.path.join(cache, "outsize")), reverse=True)
    assert kernels == "kernels" and rates.startswith("hardware-")
    assert probe("cpu").source == "test"
    os.mkdir(os.path.join(cache, "left_by_a_test"))


def test_a_forked_process_has_threads_of_its_own_after_a_test_that_had_some() -> None:
    torch.set_num_threads(2)
    x = torch.ones(1 << 17)
    x.exp()
    let_threads_go()
    worker = os.fork()
    if not worker:
        signal.alarm(60)  # ends it where it waits for threads that it does not have
        x.exp()
        os._exit(0)
    assert os.waitpid(worker, 0)[1] == 0
