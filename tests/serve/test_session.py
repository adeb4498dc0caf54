"""Generation through stages on several workers against the whole model on one."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from many import run
from threads import play

from outsize.collectives import Mesh, World
from outsize.decode.generate import Request, direct, generate
from outsize.decode.generate import play as answers
from outsize.decode.samplers import Sampling
from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.decoder import Decoder
from outsize.models.families import parse
from outsize.serve.meshed import session_on

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "initializer_range": 0.3,  # lively: otherwise one token is repeated
}
PROMPTS = ((5, 17, 2, 44, 9, 30, 8), (3,), tuple(range(40)))
SAMPLINGS = (Sampling(0.9, 20, 0.9, seed=1), Sampling(), Sampling(1.2, seed=3))


def model(**facts: Any) -> Decoder:
    return build(parse({**CONFIG, **facts}), seed=1, dtype=torch.float64)


REQUESTS = [
    Request(ids, 6, sampler, frozenset()) for ids, sampler in zip(PROMPTS, SAMPLINGS, strict=True)
]
CPU = torch.device("cpu")


def by_prompt(steps: Any) -> list[list[int]]:
    new: list[list[int]] = [[] for _ in PROMPTS]
    for index, token in steps:
        new[index].append(token)
    return new


ROUTES = {
    "a segment each": (Mesh(pipeline=6), (0, 1, 2, 3, 4, 5)),
    "two such pipelines": (Mesh(pipeline=2, data=2), (0, 0, 1, 1, 1, 1)),
}


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_every_worker_has_the_tokens_of_the_whole_model(route: Any) -> None:
    """Drawn and greedy, several prompts at once, whole and in slices."""
    mesh, turns = route
    whole, before = model(), set(threading.enumerate())
    alone = by_prompt(run(REQUESTS, direct(whole), CPU))
    assert len({tuple(new) for new in alone}) == 3

    def work(world: World) -> list[list[list[int]]]:
        found = []
        with session_on(whole, world, turns) as spread:
            for most in (100, 5):
                steps = answers(REQUESTS, spread, CPU, most)
                found.append(by_prompt((index, one.token) for index, one in steps))
        return found

    assert play(mesh, work) == [[alone, alone]] * mesh.size
    for thread in {t for t in threading.enumerate() if t.name.startswith("lane ")} - before:
        thread.join(120)  # closing told it to end
        assert not thread.is_alive()


@pytest.mark.parametrize("wiring", [{"ladder_from": 2}, {"kraken_ways": 2}])
def test_streams_of_other_widths_are_handed_on(wiring: dict[str, int]) -> None:
    whole = model(**wiring)
    expected = generate(whole, PROMPTS[0], 5)

    def work(world: World) -> list[int]:
        with session_on(whole, world, (0, 1, 2, 3, 4, 5)) as spread:
            return generate(whole, PROMPTS[0], 5, step=spread)

    assert play(Mesh(pipeline=6), work) == [expected] * 6


def test_who_has_handed_on_a_slice_begins_with_the_next() -> None:
    """The second worker does not take the first slice until the first worker has begun with the
    second, which one that waited for logits would never do."""
    whole, begun = model(), threading.Event()
    calls = []

    def count(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            begun.set()

    whole.prologue.register_forward_pre_hook(count)

    def hold(*_: Any) -> None:
        assert begun.wait(120.0), "the first worker waits for the second"

    whole.blocks[2].register_forward_pre_hook(hold)

    def work(world: World) -> list[int]:
        with session_on(whole, world, (0, 0, 0, 1, 1, 1)) as spread:
            return generate(whole, PROMPTS[2], 1, step=spread, prefill_tokens=9)

    assert play(Mesh(pipeline=2), work) == [generate(model(), PROMPTS[2], 1)] * 2


def test_what_a_sampler_refuses_ends_the_others_waiting() -> None:
    whole = model()
    with torch.no_grad():
        whole.epilogue.head.weight[3] = float("nan")

    def work(world: World) -> list[int]:
        spread = session_on(whole, world, (0, 0, 0, 1, 1, 1))
        return generate(whole, PROMPTS[0], 3, step=spread)

    with pytest.raises(OutsizeError, match="not finite"):
        play(Mesh(pipeline=2), work)
