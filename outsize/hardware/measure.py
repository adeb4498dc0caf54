"""Short measurements on one torch device: matmul by shape, attention, bandwidth, overheads.

Everything is timed by a Timer that the caller may replace, so that tests are deterministic.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from outsize import accelerator
from outsize.hardware import host
from outsize.hardware.hardware import Attention, Matmul, Rate
from outsize.kernels import attention
from outsize.kernels.product import linear
from outsize.torch_private import gradient

Shape = tuple[int, int, int]  # T, I, O of (T, I) x (I, O)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# In order of work, so that a slow dtype is found out before its long shapes are tried. They are
# what a block of hidden size 384 or 1,024 does at 1 to 2,048 tokens: forward, input gradient,
# weight gradient (tokens in the middle), head.
# The first are those of small models, of which a call is a good part.
CPU_SHAPES: tuple[Shape, ...] = (
    (8, 64, 64),
    (256, 64, 64),
    (1, 1024, 1024),
    (64, 256, 192),
    (256, 192, 192),
    (64, 384, 384),
    (512, 384, 384),
    (384, 512, 1024),
    (512, 384, 1024),
    (512, 1024, 384),
    (2048, 384, 1024),
    (1024, 1024, 1024),
    (512, 384, 14336),
)
GPU_SHAPES: tuple[Shape, ...] = (
    (1, 4096, 4096),
    (128, 4096, 4096),
    (1024, 1024, 1024),
    (1024, 4096, 4096),
    (4096, 2048, 4096),
    (4096, 4096, 4096),
    (2048, 4096, 14336),
    (8192, 8192, 8192),
)
LARGE: Shape = (4096, 4096, 4096)  # what a CPU's peak is quoted at; a second or more on few cores
LONGEST = 0.1  # seconds that one call may be expected to take in a quick probe
ENOUGH = 0.015  # seconds of repeats after which the best one stands
LEAST_REPEATS, MOST_REPEATS = 5, 30  # at least some: a neighbour's time slice spoils one or two
TINY_CALLS = 200
HEADS, HEAD_SIZE = 6, 64
LONG, SHORT = (4096, 32), 2e-4  # tokens and heads where a call of 512 takes fewer seconds than this
LOCKED = 1 << 20  # bytes, page-locked: fewer are copied before a copy has begun
COPIED = 2**27  # bytes


class Timer(Protocol):
    """Seconds that one call of work takes on a device."""

    def __call__(self, work: Callable[[], object], device: torch.device) -> float: ...


def best_of(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of some calls after one that warms up; of two where one takes long.

    The shortest, because whatever else runs on the machine can only add to it. On a processor none
    counts for less than its processor time over the cores' worth that is granted: the quota of a
    control group stops what runs long, and hardly a short call.
    """
    granted = host.granted()
    once = _device_seconds if accelerator.queues(device) else partial(_host_seconds, granted)
    warm = once(work, device)
    if warm > LONGEST:  # one more all the same: the first call also builds kernels and threads
        return min(warm, once(work, device))
    taken: list[float] = []
    while len(taken) < LEAST_REPEATS or (sum(taken) < ENOUGH and len(taken) < MOST_REPEATS):
        taken.append(once(work, device))
    return min(taken)


def matmuls(device: torch.device, quick: bool, timer: Timer, date: str) -> Iterator[Matmul]:
    """The table of rates by shape and dtype. A shape that would take too long is left out: longer
    than the one before by its work, a call of the smallest aside, which work hardly makes longer
    and others' work may."""
    apart = accelerator.queues(device)
    shapes = GPU_SHAPES if apart else CPU_SHAPES if quick else (*CPU_SHAPES, LARGE)
    for dtype in ("fp32", "bf16", "fp16") if apart else ("fp32", "bf16"):
        call, each = float("inf"), 0.0  # seconds: of the smallest shape, and of one of its FLOP
        for T, I, O in shapes:  # noqa: E741
            work = 2 * T * I * O
            if quick and each * work > LONGEST:
                continue
            x_TI = _numbers((T, I), dtype, device)
            w_OI = _numbers((O, I), dtype, device)
            spent = timer(torch.no_grad()(partial(linear, x_TI, w_OI, None)), device)
            call = min(call, spent)
            each = (spent - call) / work
            yield Matmul(T, I, O, dtype, Rate(work / spent, "FLOP/s", "probe", date))


def attentions(device: torch.device, quick: bool, timer: Timer, date: str) -> Iterator[Attention]:
    """Causal attention, forward and backward apart, in both dtypes that training uses. Where so few
    tokens only tell what a call costs, of more of them and more heads."""
    shapes: tuple[tuple[int, int], ...] = (
        ((512, HEADS),) if quick else ((512, HEADS), (2048, HEADS))
    )
    if accelerator.queues(device):
        forward = next(_attention(512, HEADS, "bf16", device, timer, date))
        if 2 * 512**2 * HEAD_SIZE * HEADS / forward.rate.value < SHORT:
            shapes = (LONG,)
    for shape in shapes:
        for dtype in ("fp32", "bf16"):
            yield from _attention(*shape, dtype, device, timer, date)


def _attention(
    T: int, heads: int, dtype: str, device: torch.device, timer: Timer, date: str
) -> Iterator[Attention]:
    def entry(direction: Literal["forward", "backward"], products: int, spent: float) -> Attention:
        rate = Rate(products * T * T * HEAD_SIZE * heads / spent, "FLOP/s", "probe", date)
        return Attention(T, heads, HEAD_SIZE, dtype, direction, rate)

    shape = (T, heads, HEAD_SIZE)
    q, k, v = (_numbers(shape, dtype, device).requires_grad_() for _ in range(3))

    def forward() -> Tensor:
        if attention.fits(q, k, v):
            return attention.attend(q, k, v, (0, T), HEAD_SIZE**-0.5, None)
        a, b, c = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        return F.scaled_dot_product_attention(a, b, c, is_causal=True)

    with torch.no_grad():
        yield entry("forward", 2, timer(forward, device))
    with torch.enable_grad():
        out = forward()
    gy = torch.ones_like(out)
    backward = timer(lambda: gradient(out, gy, (q, k, v), retain_graph=True), device)
    yield entry("backward", 5, backward)


def bandwidth(device: torch.device, timer: Timer, date: str) -> Rate:
    """B/s of a = b + s c over arrays larger than caches: two reads and a write."""
    count = _room(device, 2**29) // 4 if accelerator.queues(device) else 2**24  # of 4 bytes
    a, b, c = (torch.ones(count, device=device) for _ in range(3))
    spent = timer(lambda: torch.add(b, c, alpha=3.0, out=a), device)
    return Rate(3 * a.nbytes / spent, "B/s", "probe", date, note="triad")


def copy(timer: Timer, date: str) -> Rate:
    """B/s at which one thread copies host memory, as a tier in RAM does beside a computation.

    Both buffers are larger than caches, and their pages are there after the call that warms up.
    """
    to, source = (torch.ones(COPIED, dtype=torch.uint8) for _ in range(2))
    work = partial(ctypes.memmove, to.data_ptr(), source.data_ptr(), COPIED)
    spent = timer(work, torch.device("cpu"))
    return Rate(COPIED / spent, "B/s", "probe", date, note="copied by one thread")


def overhead(device: torch.device, timer: Timer, date: str) -> Rate:
    """Seconds of one operator on one element: what a call costs beside its work."""
    x = torch.ones(1, device=device)

    def tiny() -> None:
        for _ in range(TINY_CALLS):
            x.add_(1.0)

    with torch.no_grad():
        return Rate(timer(tiny, device) / TINY_CALLS, "s", "probe", date)


def host_copies(device: torch.device, timer: Timer, date: str) -> tuple[Rate, Rate]:
    """B/s from pinned host memory to an accelerator, and back; from other memory where not even
    LOCKED bytes can be page-locked."""
    count = _room(device, 2**28)
    here, note = _locked(count), "pinned"
    if here is None:
        here, note = torch.empty(count, dtype=torch.uint8), "not pinned"
    count = here.nbytes
    there = torch.empty(count, dtype=torch.uint8, device=device)
    to = timer(lambda: there.copy_(here, non_blocking=True), device)
    back = timer(lambda: here.copy_(there, non_blocking=True), device)
    return (
        Rate(count / to, "B/s", "probe", date, note=note),
        Rate(count / back, "B/s", "probe", date, note=note),
    )


def _locked(most: int) -> Tensor | None:
    """So many page-locked bytes of the host, or a quarter of them, or of that."""
    while most >= LOCKED:
        try:
            return accelerator.pinned(most, "what copies are measured with")
        except accelerator.NotLocked:
            most //= 4
    return None


def _room(device: torch.device, most: int) -> int:
    """Bytes of an array for a measurement, of which an accelerator has room for several."""
    return min(most, torch.accelerator.get_memory_info(device)[0] // 8)


def _numbers(shape: tuple[int, ...], dtype: str, device: torch.device) -> Tensor:
    """Varied numbers, since a GPU multiplies constants faster than real data (it draws less
    power); from a generator of their own, so that the caller's random state stays as it was."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.empty(shape, dtype=DTYPES[dtype], device=device).uniform_(generator=generator)


def _host_seconds(granted: float, work: Callable[[], object], device: torch.device) -> float:
    spent, start = time.process_time(), time.perf_counter()
    work()
    wall = time.perf_counter() - start
    return max(wall, (time.process_time() - spent) / granted)


def _device_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Between two events of the device's current stream; what queued before does not count."""
    assert device.index is not None
    with torch.accelerator.device_index(device.index):
        start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        torch.accelerator.synchronize(device)
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
