"""Generation through stages on several workers against the whole model on one."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from threads import play

from outsize.collectives import Mesh, World, along
from outsize.decode.generate import Request, direct, generate, run
from outsize.decode.relay import Relay
from outsize.decode.samplers import Sampler, Sampling
from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.decoder import Decoder
from outsize.models.families import parse
from outsize.parallel.piped_vocabulary import cut_vocabulary

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


def tokens(steps: Any) -> list[list[int]]:
    new: list[list[int]] = [[] for _ in PROMPTS]
    for index, token in steps:
        new[index].append(token)
    return new


def requests(samplers: Any) -> list[Request]:
    pairs = zip(PROMPTS, samplers, strict=True)
    return [Request(ids, 12, sampler, frozenset()) for ids, sampler in pairs]


ROUTES = {
    "cut in two": (Mesh(pipeline=2), (0, 0, 0, 1, 1, 1)),
    "a segment each": (Mesh(pipeline=6), (0, 1, 2, 3, 4, 5)),
    "round the workers twice": (Mesh(pipeline=3), (0, 0, 1, 2, 0, 1)),
    "down and up": (Mesh(pipeline=2), (0, 0, 1, 1, 0, 0)),
    "two such pipelines": (Mesh(pipeline=2, data=2), (0, 0, 1, 1, 1, 1)),
}


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_every_worker_has_the_tokens_of_the_whole_model(route: Any) -> None:
    """Drawn and greedy, several prompts at once, whole and in slices."""
    mesh, turns = route
    whole = model()
    alone = tokens(run(requests(SAMPLINGS), direct(whole), torch.device("cpu")))
    assert len({tuple(new) for new in alone}) == 3

    def work(world: World) -> list[list[list[int]]]:
        found = []
        with Relay(whole, world, turns) as relay:
            for most in (100, 5):
                asked = requests([relay.drawing(sampling) for sampling in SAMPLINGS])
                found.append(tokens(run(asked, relay, torch.device("cpu"), most)))
        return found

    assert play(mesh, work) == [[alone, alone]] * mesh.size
    assert not [t for t in threading.enumerate() if t.name.startswith("relay send")]


@pytest.mark.parametrize("wiring", [{}, {"tie_word_embeddings": True}])
def test_rows_of_the_vocabulary_lie_on_all_workers(wiring: dict[str, bool]) -> None:
    whole = model(**wiring)
    alone = tokens(run(requests(SAMPLINGS), direct(whole), torch.device("cpu")))

    def work(world: World) -> list[list[int]]:
        mine = copy.deepcopy(whole)
        cut_vocabulary(mine, along(world, "pipeline"))
        with Relay(mine, world, (0, 0, 1, 1, 2, 2), cut=True) as relay:
            asked = requests([relay.drawing(sampling) for sampling in SAMPLINGS])
            return tokens(run(asked, relay, torch.device("cpu"), 5))

    assert play(Mesh(pipeline=3), work) == [alone] * 3


@pytest.mark.parametrize("wiring", [{"ladder_from": 2}, {"kraken_ways": 2}])
def test_streams_of_other_widths_are_handed_on(wiring: dict[str, int]) -> None:
    whole = model(**wiring)
    expected = generate(whole, PROMPTS[0], 12)

    def work(world: World) -> list[int]:
        with Relay(whole, world, (0, 1, 2, 3, 4, 5)) as relay:
            return generate(whole, PROMPTS[0], 12, relay.drawing(Sampling()), forward=relay)

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
        assert begun.wait(600.0), "the first worker waits for the second"

    whole.blocks[2].register_forward_pre_hook(hold)

    def work(world: World) -> list[tuple[int, int]]:
        with Relay(whole, world, (0, 0, 0, 1, 1, 1)) as relay:
            request = Request(PROMPTS[2], 1, relay.drawing(Sampling()), frozenset())
            return list(run([request], relay, torch.device("cpu"), 9))

    assert play(Mesh(pipeline=2), work)[0][0] == (0, generate(model(), PROMPTS[2], 1)[0])


def test_what_a_sampler_refuses_ends_the_others_waiting() -> None:
    whole = model()
    with torch.no_grad():
        whole.epilogue.head.weight[3] = float("nan")

    def work(world: World) -> list[int]:
        relay = Relay(whole, world, (0, 0, 0, 1, 1, 1))
        draw: Sampler = relay.drawing(Sampling())
        return generate(whole, PROMPTS[0], 3, draw, forward=relay)

    with pytest.raises(OutsizeError, match="not finite"):
        play(Mesh(pipeline=2), work)
