"""The engine on the workers of a mesh: one is asked, all take its steps."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from asking import ROOM, ROOMS, Told, Unkept, answered, asks, plainly
from decoders import CONFIGS, SMALL
from threads import play

import outsize
from outsize.collectives import World, parse_mesh
from outsize.decode.paged import Part
from outsize.decode.samplers import Sampling
from outsize.errors import OutsizeError
from outsize.kernels import native
from outsize.memory.sizes import format_bytes
from outsize.models.build import build
from outsize.models.families import parse
from outsize.serve.asks import Ask, End, Room, Token
from outsize.serve.drafts import Lookup
from outsize.serve.engine import Engine
from outsize.serve.files import Limits
from outsize.serve.load import on_mesh
from outsize.serve.model import Model
from outsize.serve.policies import POLICIES
from outsize.serve.steps import Do, Tables, message

COMPILED = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")
LEARNED = {**CONFIGS["learned"], "n_positions": 64, "n_layer": 2}
TWO = {"num_hidden_layers": 2}
GATED = {**SMALL, "model_type": "gla", "num_key_value_heads": 4}
CASES = {
    "latents in bfloat16": ("pipeline=2", CONFIGS["latent"] | TWO, torch.bfloat16),
    "experts that are cut": ("tensor=2", CONFIGS["experts"] | TWO, torch.bfloat16),
    "tied": ("pipeline=2,tensor=2", LEARNED, torch.float32),
}


def saved(path: Path, config: dict[str, Any], dtype: torch.dtype) -> Path:
    made = build(parse(config), seed=3, dtype=dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    outsize.save(made, path / "hf")
    return path / "hf"


def engine_of(model: Model, room: Room, draft: bool = False) -> Engine:
    """Over weights that are in memory, here or on a mesh."""
    session = None if model.home is None else model.home.session
    return Engine(model, room, POLICIES.get("mixed"), session, Lookup if draft else None)


def told(model: Model, some: Sequence[Ask], room: Room, draft: bool = False) -> list[list[Token]]:
    """What all are told that ask together, on the worker that is asked."""
    engine = engine_of(model, room, draft)
    try:
        if engine.steps.leads:
            return answered(engine, some)
        engine.start()
        return []
    finally:
        engine.close()


def every(model: Model) -> list[Any]:
    """Of each request alone; in slices; interrupted for want of pages; with drafts; scored, and
    what the head would multiply."""
    some = asks()
    alone = [told(model, [ask], ROOM) for ask in some]
    rooms = [told(model, some, room) for room in ROOMS.values()]
    drafted = told(model, some, ROOM, draft=True)
    engine = engine_of(model, ROOMS["slices"])
    if engine.steps.leads:
        engine.steps.rest()  # as after a while in which nobody asks
    with engine:
        scored, seen = list[Token](), list[Any]()
        if engine.steps.leads:
            scored = engine.logprobs([*some[3].ids, 7, 2], 2)
            engine.look(some[3].ids, True, lambda h_TE: seen.append(h_TE.tolist()))
    return [alone, *rooms, drafted, scored, seen]


@COMPILED
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tokens_and_logprobs_do_not_depend_on_others(
    case: tuple[str, dict[str, Any], torch.dtype], tmp_path: Path
) -> None:
    """Bit for bit on one mesh; on a pipeline those of one worker."""
    mesh, config, dtype = case
    path, axes = saved(tmp_path, config, dtype), parse_mesh(mesh)

    def work(world: World) -> list[Any]:
        with on_mesh(path, world) as model:
            return every(model)

    found = play(axes, work)
    (lead,) = (rank for rank, one in enumerate(found) if one[1])
    assert lead == axes.ranks("pipeline", 0)[-1]
    alone, *others, _, seen = found[lead]
    assert sum(map(len, seen)) == len(asks()[3].ids)
    assert all(company == [one for (one,) in alone] for company in others)
    if axes.tensor == 1:
        assert found[lead] == every(outsize.load(path))


@pytest.mark.parametrize("form", ["llama", "gated"])
def test_tokens_are_those_of_one_full_pass(form: str, tmp_path: Path) -> None:
    """In float64, of states by token and by sequence."""
    config = GATED if form == "gated" else CONFIGS[form]
    path, some = saved(tmp_path, config | TWO, torch.float64), asks()

    def work(world: World) -> list[list[Token]]:
        with on_mesh(path, world) as model:
            return told(model, some, replace(ROOM, budget=5, pages=14, slots=3))

    (found,) = filter(None, play(parse_mesh("pipeline=2,tensor=2"), work))
    model = outsize.load(path)
    for ask, one in zip(some, found, strict=True):
        plainly(model, ask, one, 1e-10)


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose blocks are most of it."""
    config = {**SMALL, "model_type": "llama", "num_hidden_layers": 8, "intermediate_size": 256}
    return saved(tmp_path_factory.mktemp("larger"), config, torch.float32)


PROMPTS = [[n] * (5 * n) for n in range(1, 5)]
SHARES = {
    "tensor": ("tensor=2", None),
    "pipeline in files": ("pipeline=2", 480_000),
}


@pytest.mark.parametrize("case", SHARES.values(), ids=SHARES)
def test_each_worker_holds_what_was_foretold(
    case: tuple[str, int | None], larger: Path, tmp_path: Path
) -> None:
    """And of weights that stay in files no more than its budget, with the same texts."""
    mesh, memory = case
    counting = Barrier(parse_mesh(mesh).size)  # before the first of them is asked for anything

    def work(world: World) -> tuple[Any, ...]:
        limits = None if memory is None else Limits(memory, tmp_path)
        with outsize.engine(on_mesh(larger, world, limits=limits), context=64, requests=3) as one:
            plan, home = one.plan, one.engine.model.home
            assert plan.session is not None and home is not None
            plan.session.count(home.buffers)  # and goes on counting
            plan.session.forget = lambda: None
            plan.session.seconds = defaultdict(Unkept)
            counting.wait()
            found = one.generate(PROMPTS, 5) if one.leads else []
            if not one.leads:
                with pytest.raises(OutsizeError, match="this worker follows rank"):
                    one.generate(PROMPTS, 5)
        share = plan.weights, plan.cache, plan.work
        assert one.engine.steps.bytes == plan.cache
        return found, plan.session.peak, share, plan.room, plan.lines()

    workers = play(parse_mesh(mesh), work)
    assert [one[0] for one in workers if one[0]] == [
        [outsize.load(larger).generate(prompt, 5) for prompt in PROMPTS]
    ]
    assert len({one[3] for one in workers}) == 1
    for _, peak, share, _, lines in workers:
        assert 0.5 * sum(share) < peak <= sum(share) <= (memory or 2 * peak)
        each = " of each stage" if mesh == "pipeline=2" else ""
        assert lines[0].startswith(f"on {mesh} a worker{each} holds: weights ")
        assert format_bytes(sum(share)) in lines[0]
        assert any("in a message of 372 B" in line for line in lines)
        assert ("approximate" in lines[-1]) == (mesh == "tensor=2")


def test_a_fault_of_one_worker_is_told_to_all_who_wait(larger: Path) -> None:
    ends = list[End | None]()

    def work(world: World) -> None:
        with on_mesh(larger, world) as model, engine_of(model, ROOM) as engine:
            if engine.steps.leads:
                one = Told()
                engine.submit(Ask((1, 2, 3), 60, Sampling()), one)
                one.wait()
                ends.append(one.end)
                assert engine.stuck(1e9)
                return
            plain, calls = model.blocks[0].forward, list[None]()

            def broken(*given: Any) -> Any:
                calls.append(None)
                if len(calls) == 5:
                    raise RuntimeError("a card fell off the bus")
                return plain(*given)

            model.blocks[0].forward = broken

    with pytest.raises(RuntimeError, match="a card fell off the bus"):
        play(parse_mesh("pipeline=2"), work)
    (end,) = ends
    assert end is not None and end.reason == "error"


def test_what_is_told_of_a_step_is_what_it_feeds() -> None:
    """Whatever pages slots come to have; and in one message where they grow by what is fed."""
    draw, says, hears = random.Random(0), Tables(4), Tables(4)
    pages = {slot: list[int]() for slot in range(4)}
    for _ in range(200):
        parts = []
        for slot in draw.sample(range(4), draw.randint(1, 4)):
            if draw.random() < 0.2:
                pages[slot] = draw.sample(range(99), draw.randint(0, 9))
            pages[slot] += draw.sample(range(99), draw.randint(0, 2))
            parts.append(Part(pages[slot], draw.randint(0, 9), draw.randint(1, 3), 0, slot))
        ids = [draw.randrange(1 << 30) for part in parts for _ in range(part.tokens)]
        numbers = says.numbers(Do.FEED, parts, ids)
        do, heard, others = hears.said([*numbers, 0, 0])
        assert (do, others) == (Do.FEED, ids)
        assert [one._replace(pages=list(one.pages)) for one in heard] == parts
    room = replace(ROOM, page=16, slots=64, budget=64)
    tables, fed = Tables(64), [Part(list(range(130)), 2048, 1, 0, slot) for slot in range(64)]
    tables.numbers(Do.FEED, fed, [7] * 64)
    fed = [part._replace(pages=[*part.pages, 9]) for part in fed]
    assert 4 * len(tables.numbers(Do.FEED, fed, [7] * 64)) <= message(room) < 2400
