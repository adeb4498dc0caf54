"""The traces of a run's workers, brought to the first of them."""

from __future__ import annotations

import json
import platform
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from outsize.collectives import Collective, World, everyone
from outsize.trace.merge import merged
from outsize.trace.text import dumps, loads
from outsize.trace.trace import Trace


def gathered(world: World, trace: Trace, device: torch.device | str = "cpu") -> Trace | None:
    """The trace of all workers on rank 0, None on the others; each brings its own. Every worker
    calls it. device: where tensors are that workers send one another."""
    if world.mesh.size == 1:
        return trace
    group = everyone(world)
    mine = torch.frombuffer(bytearray(packed(trace)), dtype=torch.uint8).to(device)
    sizes = torch.zeros(group.size, dtype=torch.int64, device=device)
    group.all_gather(sizes.new_tensor([mine.numel()]), _spans([1] * group.size), sizes)
    texts = _texts(group, mine, [int(size) for size in sizes.tolist()])
    if world.rank:
        return None
    told = [unpacked(text, f"the trace of rank {rank}") for rank, text in enumerate(texts)]
    return merged([trace for trace, _ in told], [clock for _, clock in told])


def packed(trace: Trace) -> bytes:
    """A trace with its begin and the name of this machine's clock. A tenth of its text."""
    head = json.dumps({"begin": trace.begin, "clock": clock()})
    return zlib.compress(f"{head}\n{dumps(trace)}".encode(), 1)


def unpacked(data: bytes, name: str = "trace") -> tuple[Trace, str]:
    """What `packed` made: the trace, and the name of its clock."""
    head, _, text = zlib.decompress(data).decode().partition("\n")
    said = json.loads(head)
    return replace(loads(text, name), begin=said["begin"]), said["clock"]


def clock() -> str:
    """Names what time.perf_counter() counts from: since which start of which kernel, and in which
    of its time namespaces; the machine where the kernel does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return platform.node()


def _texts(group: Collective, mine: Tensor, sizes: Sequence[int]) -> list[bytes]:
    spans = _spans(sizes)
    whole = mine.new_empty(sum(sizes))
    group.all_gather(mine, spans, whole)
    data = bytes(whole.cpu().numpy())
    return [data[first:last] for first, last in spans]


def _spans(sizes: Sequence[int]) -> list[tuple[int, int]]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]
