"""Workers with slow links on one machine, for claims: real collectives, made to wait.

`Slow` wraps a collective: every operation runs as it does, through shared memory, and then takes as
long as its bytes would on a link of so many bytes a second; all collectives of a worker share its
link. Whoever waits sleeps, so the core is free for what overlaps.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from torch import Tensor
from torch.distributed import FileStore

from outsize.collectives import Collective, Mesh, World, along
from outsize.collectives.collective import DONE, Call, Handle
from outsize.collectives.joined import join
from outsize.decode.cache import StateCache
from outsize.decode.generate import Forward
from outsize.models.build import build
from outsize.models.decoder import Decoder
from outsize.models.families import parse
from outsize.parallel.tensor.decoder import split
from outsize.parallel.tensor.overlap import Overlap

GIGABIT = 125e6  # bytes a second


@dataclass
class Link:
    """A worker's link: bytes a second, and seconds before the first byte comes."""

    rate: float = GIGABIT
    latency: float = 1e-4
    free: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def carry(self, nbytes: float) -> None:
        """Wait until so many bytes would have come."""
        with self.lock:
            self.free = max(self.free, time.perf_counter()) + nbytes / self.rate
            until = self.free + self.latency
        time.sleep(max(0.0, until - time.perf_counter()))


class Slow(Collective):
    """A collective over a link."""

    def __init__(self, inner: Collective, link: Link) -> None:
        self.inner, self.link = inner, link
        self.size, self.rank, self.received = inner.size, inner.rank, inner.received

    def start(self, call: Call) -> Handle:
        before = sum(self.received.values())
        self.inner.start(call).wait()
        if call.name != "barrier":
            self.link.carry(sum(self.received.values()) - before)
        return DONE


def cut(model: Decoder, world: World, link: Link, chunks: int, **more: bool) -> Overlap | None:
    """Split a model over slow links; with chunks, what overlaps has a courier."""
    overlap = None
    if chunks:
        overlap = Overlap(Slow(along(world, "tensor", "beside"), link), chunks)
    split(model, Slow(along(world, "tensor"), link), more.get("sequence", False), beside=overlap)
    return overlap


def minima(world: World, ways: Mapping[str, Callable[[], object]], times: int) -> dict[str, float]:
    """The least seconds of each way, taken by turns; they begin together on all workers."""
    best = dict.fromkeys(ways, float("inf"))
    for turn in range(times + 1):
        for name, way in ways.items():
            along(world, "tensor").barrier()
            begin = time.perf_counter()
            way()
            along(world, "tensor").barrier()
            if turn:  # the first is to warm up
                best[name] = min(best[name], time.perf_counter() - begin)
    return best


def workers(work: Callable[[World], Any], size: int) -> list[Any]:
    """What `work` gave in each of `size` processes of one thread."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results: Any = context.Queue()
        path = str(Path(folder) / "store")
        started = [
            context.Process(target=_worker, args=(work, rank, size, path, results), daemon=True)
            for rank in range(size)
        ]
        for one in started:
            one.start()
        found = dict(results.get(timeout=500) for _ in started)
        for one in started:
            one.join()
    return [found[rank] for rank in range(size)]


def _worker(
    work: Callable[[World], Any], rank: int, size: int, path: str, results: Queue[Any]
) -> None:
    torch.set_num_threads(1)
    world = join(Mesh(tensor=size), rank, FileStore(path, size))
    results.put((rank, work(world)))
    along(world, "tensor").barrier()
    world.close()


# -- prompts over such links ---------------------------------------------------------------------

LAYERS, HIDDEN, INNER, TOKENS = 4, 640, 1792, 768
LLAMA: Mapping[str, Any] = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": 10, "num_key_value_heads": 10,
    "max_position_embeddings": TOKENS,
}  # fmt: skip
SETTING = (
    f"prompt of {TOKENS} tokens, Llama of {LAYERS} layers, hidden {HIDDEN}, 2 workers of one"
    " thread, links EMULATED (real sums, then sleep) on which the plain model's sums take 1.25"
    " times as long as its computation, float32"
)


def decoder(**changes: Any) -> Decoder:
    """The model of these figures."""
    return build(parse({**LLAMA, **changes}), seed=1)


@torch.no_grad()
def prompt(forward: Forward) -> Tensor:
    """One prompt through a model: the logits of its last token."""
    ids = torch.arange(TOKENS) * 7 % 512
    attend = StateCache(1, TOKENS).extend([0], [TOKENS])
    return forward(ids, attend.positions(), attend.bounds, attend)


def balance(world: World, link: Link, forward: Forward, times: int = 4) -> float:
    """Make the link such that a prompt's sums take 1.25 times as long as the rest; gives its rate.
    forward: of a plain model over this link."""
    link.rate, link.latency = float("inf"), 0.0
    axis = along(world, "tensor")
    before = sum(axis.received.values())
    prompt(forward)
    nbytes = sum(axis.received.values()) - before
    seconds = minima(world, {"it": lambda: prompt(forward)}, times)["it"]
    link.rate = float(axis.broadcast(torch.tensor(nbytes / (1.25 * seconds), dtype=torch.float64)))
    link.latency = 1e-4
    return link.rate
