"""Memory of the device: nothing of the host's, blocks as CUDA's, a limit, NaN when it is freed."""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
from collections.abc import Callable

import pytest
import strict
import torch
from torch import accelerator

MIB = 1 << 20


def _death(run: Callable[[], object]) -> tuple[int, str]:
    """The signal that ends a forked process that calls `run`, and what it wrote on stderr."""
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            os.dup2(said.fileno(), 2)
            run()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, said.read().decode()


def test_a_host_that_reads_or_writes_it_ends() -> None:
    strict.start("eager")
    x = torch.ones(1000, device="strict")
    for run in (
        lambda: ctypes.string_at(x.data_ptr(), 4),
        lambda: ctypes.memset(x.data_ptr(), 0, 4),
    ):
        ended, said = _death(run)
        assert ended == signal.SIGSEGV
        assert "the host read or wrote memory of device 0 at 0x" in said
    assert x.cpu().eq(1).all()


def test_a_library_of_the_host_that_reads_it_ends() -> None:
    """A tensor whose bytes are taken for the CPU's: what a forgotten copy comes to."""
    strict.start("demand")
    x = torch.ones(8, device="strict")
    bytes_of = (ctypes.c_float * 8).from_address(x.data_ptr())
    ended, said = _death(lambda: torch.frombuffer(bytes_of, dtype=torch.float32).sum())
    assert ended == signal.SIGSEGV and "device 0" in said


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        # What is left over of a large segment is cut off only where it is more than 1 MiB.
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (21 * MIB, 22 * MIB, 22 * MIB),
    ],
)
def test_blocks_are_rounded_as_those_of_cuda(asked: int, allocated: int, reserved: int) -> None:
    strict.start("demand")
    x = torch.empty(asked, dtype=torch.uint8, device="strict")
    assert accelerator.memory_allocated() == allocated
    assert accelerator.memory_reserved() == reserved
    assert accelerator.memory_stats()["requested_bytes.all.current"] == x.numel()
    del x
    assert accelerator.memory_allocated() == 0
    assert accelerator.memory_reserved() == reserved
    accelerator.empty_cache()
    assert accelerator.memory_reserved() == 0


def test_peaks_are_kept_and_forgotten() -> None:
    strict.start("demand")
    x = torch.empty(4 * MIB, dtype=torch.uint8, device="strict")
    del x
    y = torch.empty(MIB, dtype=torch.uint8, device="strict")
    assert accelerator.max_memory_allocated() == 4 * MIB
    accelerator.reset_peak_memory_stats()
    assert accelerator.max_memory_allocated() == y.numel()


def test_a_freed_block_is_given_again_and_its_neighbours_merge() -> None:
    strict.start("demand")
    parts = [torch.empty(MIB // 2, dtype=torch.uint8, device="strict") for _ in range(4)]
    at = [part.data_ptr() for part in parts]
    assert at == [at[0] + i * MIB // 2 for i in range(4)]
    del parts[1:3]
    assert torch.empty(MIB, dtype=torch.uint8, device="strict").data_ptr() == at[1]


def test_the_limit_is_the_device_s() -> None:
    strict.start("demand", device_bytes=64 * MIB)
    kept = torch.empty(40 * MIB, dtype=torch.uint8, device="strict")
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 30\.0.* MiB"):
        torch.empty(30 * MIB, dtype=torch.uint8, device="strict")
    assert accelerator.get_memory_info() == (24 * MIB, 64 * MIB)
    del kept  # cached segments go back where there is no room
    torch.empty(60 * MIB, dtype=torch.uint8, device="strict")
    assert accelerator.memory_stats()["num_alloc_retries"] == 2


def test_what_nobody_wrote_and_what_is_freed_reads_as_nan() -> None:
    strict.start("demand")
    assert torch.empty(100, device="strict").cpu().isnan().all()
    x = torch.ones(100, device="strict")
    view = torch.empty(0, device="strict").set_(x)
    at = x.data_ptr()
    del x
    assert view.cpu().eq(1).all()
    del view
    again = torch.empty(100, device="strict")
    assert again.data_ptr() == at and again.cpu().isnan().all()
