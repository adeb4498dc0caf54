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
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from torch.distributed import FileStore

import outsize
from outsize.collectives import Collective, Mesh, World, along
from outsize.collectives.collective import DONE, Call, Handle
from outsize.collectives.joined import join
from outsize.models.build import build
from outsize.models.decoder import Decoder
from outsize.models.families import parse

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


# -- the model of these figures ----------------------------------------------------------------

LAYERS, HIDDEN, INNER, TOKENS = 4, 640, 1792, 768
LLAMA: Mapping[str, Any] = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": 10, "num_key_value_heads": 10,
    "max_position_embeddings": TOKENS,
}  # fmt: skip


def decoder(**changes: Any) -> Decoder:
    """The model of these figures."""
    return build(parse({**LLAMA, **changes}), seed=1)


# -- whole models by the product's own generation, at rates fitted to nothing -------------------

RATES = {"100 Mbit/s": 12.5e6, "1 Gbit/s": GIGABIT, "10 Gbit/s": 1.25e9}
NEW, REQUESTS = 9, 3  # tokens of a request, of which the first ends the prompt
WHOLE = (
    f"prompt of {TOKENS} tokens, Llama of {LAYERS} layers, hidden {HIDDEN}, 2 workers of one"
    f" thread, {NEW} tokens, `outsize generate`'s own steps, links of"
    f" {', '.join(RATES)} and 0.1 ms EMULATED (real sums, then sleep), float32"
)
# By name, a model's directory and the chunks of its overlap; None: as the product chooses.
Ways = Mapping[str, tuple[str, int | None]]
Found = dict[str, dict[str, tuple[float, float]]]  # by rate and way, seconds of prompt and token


class SlowWorld:
    """A world whose collectives share one link."""

    def __init__(self, world: World, link: Link) -> None:
        self.mesh, self.rank, self._world, self._link = world.mesh, world.rank, world, link
        self.groups: dict[Any, Collective] = {}

    def group(self, ranks: Any, use: Any = "compute") -> Collective:
        key = (tuple(ranks), use)
        if key not in self.groups:
            self.groups[key] = Slow(self._world.group(ranks, use), self._link)
        return self.groups[key]


def whole_models(world: World, ways: Ways) -> Found:
    """Seconds of a prompt and of a token, least of the requests, in turns."""
    from outsize.decode.generate import GREEDY, Request, generate
    from outsize.plan.settings import NONE
    from outsize.schedule import Kind
    from outsize.serve.load import on_mesh

    ids = [index * 7 % 512 for index in range(TOKENS)]
    asked, found = Request(tuple(ids), NEW, GREEDY), Found()
    for rate, bytes_ in RATES.items():
        models = {
            name: on_mesh(
                Path(path),
                SlowWorld(world, Link(bytes_)),
                settings=NONE.having({"overlap": chunks}),
            )
            for name, (path, chunks) in ways.items()
        }
        least = dict.fromkeys(ways, (float("inf"), float("inf")))
        for turn in range(REQUESTS + 1):
            for name, model in models.items():
                along(world, "tensor").barrier()
                session, at_once = model.home.ready(asked)  # type: ignore[union-attr]
                if not turn and not world.rank:
                    print(f"    {rate}, {name}: {model.home}")
                generate(model, ids, NEW, GREEDY, (), None, session, at_once)
                prompt, tokens = (session.seconds[kind] for kind in (Kind.PREFILL, Kind.DECODE))
                if turn:  # the first is to warm up
                    found_now = sum(prompt), sum(tokens) / len(tokens)
                    least[name] = tuple(map(min, least[name], found_now))  # type: ignore[assignment]
        found[rate] = least
    return found


def measured(ways: Mapping[str, tuple[Decoder, int | None]]) -> Found:
    """The same on two workers, of models in this process, each by the slower worker."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {id(model): f"{folder}/{i}" for i, (model, _) in enumerate(ways.values())}
        for model, _ in ways.values():
            if not Path(paths[id(model)]).exists():
                outsize.save(model, paths[id(model)])
        saved = {name: (paths[id(model)], chunks) for name, (model, chunks) in ways.items()}
        return slowest(workers(partial(whole_models, ways=saved), 2))


def slowest(found: list[Found]) -> Found:
    """Of the workers."""
    rates = found[0]
    return {
        rate: {
            name: tuple(max(one[rate][name][i] for one in found) for i in (0, 1))  # type: ignore[misc]
            for name in rates[rate]
        }
        for rate in rates
    }


def gains(found: Found, before: str, after: str) -> tuple[list[float], list[float]]:
    """By rate how many times sooner a prompt's first token comes, and a token; and prints all."""
    prompts, tokens = list[float](), list[float]()
    for rate, each in found.items():
        for name, (prompt, token) in each.items():
            print(f"    {rate}, {name}: prompt {prompt * 1e3:.0f} ms, a token {token * 1e3:.2f}")
        prompts.append(each[before][0] / each[after][0])
        tokens.append(each[before][1] / each[after][1])
    return prompts, tokens


def mean(values: list[float]) -> float:
    """Geometric."""
    return float(torch.tensor(values, dtype=torch.float64).log().mean().exp())
