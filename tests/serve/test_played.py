"""Serving foretold: the simulator's steps are the engine's, and its figures those of the steps."""

from __future__ import annotations

import gc
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from asking import ROOM, VOCAB
from click.testing import CliRunner
from decoders import SMALL
from threads import play as on_threads

import outsize
from outsize.checkpoint import hub
from outsize.cli.main import main
from outsize.collectives import Lone, Mesh, World, parse_mesh
from outsize.decode.samplers import Sampling
from outsize.errors import OutsizeError
from outsize.kernels import rows
from outsize.memory.tiers import TierSpec
from outsize.models.build import build
from outsize.models.coding import held
from outsize.models.families import parse
from outsize.serve import engine as engines
from outsize.serve import request as requests
from outsize.serve.advice import advice, enough
from outsize.serve.asks import Ask, Room
from outsize.serve.engine import Engine
from outsize.serve.files import Limits
from outsize.serve.forecast import described
from outsize.serve.load import on_mesh
from outsize.serve.model import Model
from outsize.serve.planned import planned
from outsize.serve.played import Arrival, play
from outsize.serve.policies import POLICIES, Step, View
from outsize.serve.price import Curve, Price
from outsize.serve.room import Served, Wanted, served
from outsize.serve.slo import Slo
from outsize.serve.traffic import (
    candidates,
    check,
    most,
    outcome,
    steady,
    traffic_in,
    ways,
    why,
)

# Seconds whose sums are exact, so that both clocks say the same.
EXACT = Price(
    Curve(((1, 2**-6), (65, 2**-3))), Curve(((1, 2**-10), (9, 2**-8))), visit=2**-14, load=2**-13
)  # fmt: skip
NARROW = replace(ROOM, pages=14, slots=3, budget=20, price=EXACT, slo=Slo(100.0, 2**-4))


def arrivals(count: int, rate: float, seed: int = 1) -> list[Arrival]:
    chance, at, found = random.Random(seed), 0.0, list[Arrival]()
    for _ in range(count):
        at += round(chance.expovariate(rate) * 2**10) / 2**10
        found.append(Arrival(at, chance.randrange(1, 30), chance.randrange(1, 20), "ab"[at > 1]))
    return found


def seen(feeds: list[engines.Feed]) -> list[tuple[object, ...]]:
    return [(feed.request.key, *feed.part[1:], *feed.part.pages) for feed in feeds]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(build(parse({**SMALL, "model_type": "llama", "num_hidden_layers": 1}), seed=3))


@pytest.mark.parametrize(
    "policy", ["mixed", "decode-maximal", "deadline", "prompt-first", "feedback"]
)
def test_who_is_let_in_is_in_time(policy: str) -> None:
    """Ten times what is borne: who is refused is told when to come, and the others have their first
    token and all further ones as is promised, while as many as may go are there."""
    price = Price(
        Curve(((1, 0.013), (16, 0.031), (64, 0.091), (256, 0.351))),
        Curve(((1, 0.004), (8, 0.006), (64, 0.03))), 2e-8, 2e-6,
    )  # fmt: skip
    chance, at, some = random.Random(5), 0.0, list[Arrival]()
    for _ in range(250):
        at += chance.expovariate(30.0)
        some.append(Arrival(at, chance.randrange(20, 300), chance.randrange(20, 60)))
    slo = Slo(ttft=1.0, tpot=0.1)
    played = play(Room(999, 64, 64, 256, 1 << 20, 999, price, slo), POLICIES.get(policy), some)
    taken = [one for one in played.fates if not one.refused]
    assert sum(one.within(slo) for one in taken) > 0.95 * len(taken) and len(taken) > 50
    assert max(one.ttft for one in taken) > 0.8 and len(taken) < 150


@pytest.mark.parametrize("policy", POLICIES.names())
def test_the_engine_makes_the_steps_that_were_foretold(
    policy: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same arrivals: who is fed what behind how much, in which pages, step by step."""
    some, now, made, foreseen = arrivals(14, 4.0), [0.0], list[object](), list[object]()
    play(NARROW, POLICIES.get(policy), some, watch=lambda feeds: foreseen.append(seen(list(feeds))))

    clock = lambda: now[0]  # noqa: E731
    monkeypatch.setattr(engines, "time", SimpleNamespace(perf_counter=clock, monotonic=clock))
    engine = Engine(model, NARROW, POLICIES.get(policy))
    engine.line.clock, own = clock, engine.steps.feed

    def feed(*words: object) -> None:
        own(*words)  # type: ignore[arg-type]
        now[0] += engine.line.said

    monkeypatch.setattr(engine.steps, "feed", feed)
    monkeypatch.setattr(requests, "time", SimpleNamespace(thread_time=lambda: 0.0))
    compose = engine.line.feeds
    monkeypatch.setattr(engine.line, "feeds", lambda: made.append(seen(f := compose())) or f)
    waiting = list(some)
    with torch.no_grad(), rows.alone():
        while waiting or engine.line.requests:
            while waiting and waiting[0].at <= now[0]:
                one = waiting.pop(0)
                ids = torch.randint(VOCAB, (one.prompt,)).tolist()
                asks = Ask(tuple(ids), one.new, Sampling(), owner=one.key, came=one.at)
                engine.submit(asks, lambda _: None)
            if engine.line.requests:
                engine.step()
            else:
                now[0] = waiting[0].at
    engine.close()
    assert made == foreseen and len(made) > 30
    assert engine.line.counts.interrupted > 0 or policy != "feedback"


def drawn_room(seed: int) -> tuple[Room, list[Arrival]]:
    """Prompts of many slices, pages, slots and promises that are narrow; sums are exact."""
    chance, at, some = random.Random(seed), 0.0, list[Arrival]()
    first, knee = chance.choice([2**-6, 2**-8]), chance.choice([2, 5, 9])
    blocks = ((1, first), (knee, 2**-5), (knee + 64, 2**-5 + chance.choice([2**-3, 2**-2])))
    price = Price(
        Curve(blocks if seed % 2 else ((1, 2**-8), (65, 2**-8 + 2**-2))),
        Curve(((1, 2**-10), (9, 2**-10 + 2**-8))), visit=2**-13, load=2**-13,
        reach=chance.choice([1 << 40, 9, 20]), fetch=2**-12, evict=2**-12,
    )  # fmt: skip
    promises = [Slo(), Slo(100.0, 2**-4), Slo(2.0, 2**-3), Slo(1.0, 2**-2)]
    room = replace(
        ROOM, pages=chance.choice([21, 26, 40]), slots=chance.choice([2, 3, 6]), price=price,
        budget=chance.choice([4, 6, 12, 30]), below=chance.choice([0, 40]),
        slo=chance.choice(promises),
    )  # fmt: skip
    rate = chance.choice([0.4, 1, 2, 5])
    for _ in range(40):
        at += round(chance.expovariate(rate) * 2**10) / 2**10
        prompt, new = chance.randrange(1, 60), chance.randrange(1, 20)
        some.append(Arrival(at, prompt, new, chance.choice("abc")))
    return room, some


@pytest.mark.parametrize("policy", POLICIES.names())
def test_many_steps_at_once_are_those_one_by_one(policy: str) -> None:
    moving = replace(NARROW, below=40, price=replace(EXACT, fetch=2**-12, evict=2**-12))
    long = [drawn_room(seed) for seed in (11, 24, 30)]
    for room, some in (
        (NARROW, arrivals(30, 2.0)), (replace(NARROW, slo=Slo()), arrivals(30, 8.0)),
        (moving, arrivals(30, 8.0)), *long,
    ):  # fmt: skip
        quick = play(room, POLICIES.get(policy), some)
        slow = play(room, POLICIES.get(policy), some, watch=lambda _: None)
        firsts = [[repr((f.first, f.last)) for f in one.fates] for one in (quick, slow)]
        assert firsts[0] == firsts[1]  # of refused ones NaN
        assert (quick.steps, quick.busy, quick.end) == (slow.steps, slow.busy, slow.end)
        assert quick.interrupted == slow.interrupted
        each = [sorted(g for g, n in one.gaps for _ in range(n)) for one in (quick, slow)]
        assert each[0] == each[1]


def test_a_lone_request_takes_what_its_steps_do() -> None:
    room = replace(ROOM, price=EXACT, budget=16, slo=Slo())
    found = play(room, POLICIES.get("mixed"), [Arrival(3.0, 40, 5)])
    # The slices but the last draw nothing.
    prompt = EXACT.alone(40, 16) - 2 * EXACT.head(1)
    assert found.fates[0].ttft == prompt
    steps = [EXACT.next(40 + n) for n in range(4)]
    assert [gap for gap, _ in found.gaps] == steps and found.steps == 3 + 4
    told = outcome(found, Slo(prompt, sum(steps) / 4))
    assert told.within == 1.0 and told.ttft == (prompt, prompt)
    assert outcome(found, Slo(tpot=sum(steps) / 4.01)).within == 0.0
    assert told.rate == pytest.approx(1 / (prompt + sum(steps)))


def test_percentiles_are_those_of_all_tokens() -> None:
    played = play(NARROW, POLICIES.get("mixed"), arrivals(40, 4.0))
    every = np.array([gap for gap, count in played.gaps for _ in range(count)])
    told = outcome(played, NARROW.slo)
    want = tuple(np.percentile(every, (50, 99), method="inverted_cdf"))
    assert told.tpot == want and len(every) == sum(f.arrival.new - 1 for f in played.fates)


def test_what_is_promised_is_kept_or_refused() -> None:
    """With an SLO no token comes later than tpot, which prompts first would break; who is let in
    has the first one in time; the rate that is borne is one that is, and half more is not."""
    slo = Slo(ttft=0.5, tpot=2**-4)
    room = replace(ROOM, pages=64, price=EXACT, slo=slo, slots=4)
    some = steady(30.0, 24, 8, 200)
    told = outcome(play(room, POLICIES.get("mixed"), some), slo)
    assert told.tpot[1] <= slo.tpot and told.refused > 20 and told.within < 0.9
    found = ways(room, some, ("mixed", "prompt-first"))
    assert [way.outcome.keeps(slo) for way in found] == [False] * 4
    assert found == sorted(found, key=lambda way: -round(way.outcome.within, 2))
    calm = ways(room, steady(2.0, 24, 8, 200), ("prompt-first", "mixed"))
    kept = [way.outcome.keeps(slo) for way in calm]
    assert kept == sorted(kept, reverse=True) and kept[0] and not kept[-1]
    assert calm[0].policy == "mixed" and calm[-1].policy == "prompt-first"
    assert why(calm[0], calm[-1], slo).startswith("a token of a hundred after ")
    best = found[0]
    bears = most(room, some, best)
    for rate, kept in ((bears, True), (1.5 * bears, False)):
        slower = [replace(one, at=one.at * 30.0 / rate) for one in steady(30.0, 24, 8, 250)]
        whole = replace(room, budget=best.budget)
        again = outcome(play(whole, POLICIES.get(best.policy), slower), slo)
        assert again.keeps(slo) == kept


def test_the_most_without_a_promise_is_what_is_always_busy() -> None:
    room = Room(64, 4, 1, 64, 1000, 64, Price(Curve(((1, 0.25),))))
    some = steady(1.0, 1, 1, 20)
    assert most(room, some, ways(room, some, ("mixed",))[0]) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("price", "few"),
    [
        # Flat up to eight tokens, and in proportion beyond: eight draw as many as any number.
        (Price(Curve(((1, 1.0), (8, 1.0), (64, 8.0)))), 8),
        # Of each request 16 tokens are read again: n / (1 + n / 4) has no end, but little is left.
        (Price(Curve(((1, 1.0), (64, 1.0))), load=2**-6), 26),
        # Weights are read meanwhile.
        (Price(Curve(((1, 0.5), (64, 1.0))), reading=2.0), 38),
    ],
)
def test_a_sweep_finds_the_requests_that_are_enough(price: Price, few: int) -> None:
    """Where the price says that more gain little, playing so many at once says so too."""
    found, best, part = enough(price, 16, 40, Slo())
    assert found == few and 0.95 <= part <= 1.0 and found <= best
    room = Room(1 << 12, 4, 40, 64, 1 << 20, 64, price)
    rates = {
        slots: outcome(
            play(
                replace(room, slots=slots), POLICIES.get("mixed"), [Arrival(0, 1, 30)] * 4 * slots
            ),
            Slo(),
        ).tokens
        for slots in (1, found // 2, found, 40)
    }
    most = max(rates.values())
    assert rates[found] >= 0.93 * most > 0.9 * most > rates[found // 2]

    def step(count: int) -> float:
        return price.step(count, count, count * price.past(16, 1))

    _, kept, _ = enough(price, 16, 40, Slo(tpot=step(12)))
    assert step(kept) <= step(12) and kept <= best


@pytest.mark.parametrize("slots", [2, 64])
def test_no_more_are_advised_than_pages_hold(slots: int) -> None:
    """Where more always draw more, whatever the slots: 25 pages of 4 tokens, 10 tokens each."""
    room = Room(25, 4, slots, 64, 1 << 20, 64, Price(Curve(((1, 1.0), (64, 1.0)))))
    found = advice(room, 100, 25 * 8, [Arrival(0.0, 6, 4)])
    assert (found.tokens, found.best) == (10, 25 // 3)
    assert found.cache == found.few * 3 * 8 and found.free == 25 * 8 - found.cache


def test_traffic_is_read_or_refused_by_its_line(tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl"
    good = (
        '{"at": 2, "prompt": 8, "output": 3}\n\n{"at": 0.5, "prompt": 4, "output": 1, "key": "a"}\n'
    )
    file.write_text(good, encoding="utf-8")
    assert traffic_in(file) == [Arrival(0.5, 4, 1, "a"), Arrival(2.0, 8, 3)]
    for line, words in (
        ("{", "4: not a JSON object"),
        ("[1]", "4: not a JSON object"),
        ('{"at": 0, "prompt": 1, "output": 1, "outptu": 2}', "4: 'outptu' is not known"),
        ('{"at": -1, "prompt": 1, "output": 1}', "4: at is -1; expected seconds"),
        ('{"at": NaN, "prompt": 1, "output": 1}', "4: at is nan"),
        ('{"prompt": 1, "output": 1}', "4: at is None"),
        ('{"at": 0, "prompt": 0, "output": 1}', "4: prompt is 0; expected 1 token or more"),
        ('{"at": 0, "prompt": 1, "output": true}', "4: output is True"),
        ('{"at": 0, "prompt": 1, "output": 1, "key": 3}', "4: key is 3; expected a text"),
    ):
        file.write_text(good + line, encoding="utf-8")
        with pytest.raises(OutsizeError, match=f"traffic.jsonl:{words}"):
            traffic_in(file)
    file.write_text("\n", encoding="utf-8")
    with pytest.raises(OutsizeError, match="has no request"):
        traffic_in(file)
    for rate, prompt, output, words in (
        (0.0, 1, 1, "--rate"),
        (1.0, 0, 1, "--prompt"),
        (1.0, 1, 0, "--output"),
    ):
        with pytest.raises(OutsizeError, match=f"{words} is 0"):
            steady(rate, prompt, output)
    assert steady(4.0, 1, 1, 2000)[-1].at == pytest.approx(500, rel=0.1)
    with pytest.raises(OutsizeError, match=r"a prompt of 60 and 9 new tokens; .* room for 56"):
        check([Arrival(0, 60, 9)], replace(ROOM, pages=14))
    assert candidates("fair", Slo()) == ("fair",) and "deadline" not in candidates(None, Slo())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**SMALL, "model_type": "llama", "num_hidden_layers": 6, "intermediate_size": 512}
    path = tmp_path_factory.mktemp("played") / "hf"
    outsize.save(build(parse(config), seed=3), path)
    return path


# Of the weights that fit; what is said of serving; how weights are held; workers.
PLANS: dict[str, tuple[float | None, dict[str, Any], str | None, str]] = {
    "in files": (0.5, {}, None, ""),
    "in memory": (None, {}, None, ""),
    "coded, narrow pages": (None, {"cache": "int8", "requests": 2}, "int4:32", ""),
    "below": (None, {"below": 1 << 20, "queue": 70}, None, ""),
    "a pipeline": (None, {}, None, "pipeline=2"),
    "a pipeline in files, narrow pages": (0.5, {"cache": "bf16"}, None, "pipeline=2"),
    "heads that are cut": (None, {"below": 1 << 20}, None, "tensor=2"),
}


def there(
    directory: Path, wanted: Wanted, memory: int | None, weights: str | None, mesh: str
) -> Served:
    """What a server holds, the first worker's."""

    def serve(world: World) -> Served:
        limits = None if memory is None else Limits(memory)
        if mesh or limits is not None:
            model = on_mesh(directory, world, limits=limits, weights=weights)
        else:
            config = held(hub.read_config(directory), weights, "weights")[0]
            model = Model(hub.load(directory, config=config))
        with model:
            found = served(model, wanted)
        if found.below is not None:
            found.below.close()
        return found

    return on_threads(parse_mesh(mesh), serve)[0] if mesh else serve(Lone())


def exactly(notes: tuple[str, ...]) -> list[str]:
    """But for what is measured, or found of weights."""
    return [one for one in notes if "read in each step" not in one and "operator" not in one]


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_holds_what_the_server_will(case: str, directory: Path, tmp_path: Path) -> None:
    share, words, weights, mesh = PLANS[case]
    whole = sum(x.nbytes for x in outsize.load(directory).parameters())
    memory = None if share is None else int(share * whole) + 300_000
    size = words.get("below", 0)
    below = (TierSpec("disk", "disk", (tmp_path,), size),) if size else ()
    wanted = Wanted(**{"context": 64, "requests": 3, **words, "below": below})
    found, workers = described(str(directory), weights), parse_mesh(mesh) if mesh else Mesh()
    foreseen = planned(found, wanted, memory, workers)
    really = there(directory, wanted, memory, weights, mesh)
    assert foreseen.shares == really.shares and foreseen.mesh == really.mesh
    price, real = foreseen.room.price, really.room.price
    assert replace(foreseen.room, price=real) == really.room
    assert exactly(foreseen.notes) == exactly(really.notes)
    assert (price.reading > 0) == (memory is not None and not mesh)
    assert (price.fetch < math.inf) == (real.fetch < math.inf) == (size > 0 and not mesh)
    assert [n for n, _ in price.blocks.points] == [n for n, _ in real.blocks.points]
    if memory is not None:
        with pytest.raises(OutsizeError, match="bytes missing"):
            planned(found, wanted, 200_000, workers)


def said(*words: object) -> tuple[int, str]:
    found = CliRunner().invoke(main, ["plan", *map(str, words)])
    return found.exit_code, found.output


def test_a_plan_of_serving_is_printed(directory: Path, tmp_path: Path) -> None:
    traffic = tmp_path / "traffic.jsonl"
    lines = [json.dumps({"at": n / 8, "prompt": 12, "output": 4}) for n in range(12)]
    traffic.write_text("\n".join(lines), encoding="utf-8")
    ask = (directory, "--serve", "--traffic", traffic, "--slo", "ttft=100s,tpot=100s")
    code, text = said(*ask)
    assert code == 0 and "predicted for 12 requests, up to 16 of them at once, " in text
    assert "within ttft=100s,tpot=100s: 100.0% of the requests, 0 refused; up to " in text
    assert "next best: " in text
    code, text = said(*ask, "--policy", "fair", "--json")
    found = json.loads(text)
    assert code == 0 and {one["policy"] for one in found["ways"]} == {"fair"}
    assert found["requests_at_once"] == 16 and found["bytes"]["weights"] > 0
    assert found["ways"][0]["outcome"]["within"] == 1.0
    worth, cache = found["worth"], found["bytes"]["cache"]
    assert worth["tokens"] == 16 and 1 <= worth["few"] <= worth["best"]
    assert worth["cache"] + worth["free"] == cache and worth["cache"] <= worth["few"] * 16 * cache
    for words, line in (
        (("--rate", "2"), "--rate is given beside --traffic"),
        (("--slo", "tpot=0ms"), "--slo tpot=0ms"),
        (("--policy", "mix"), "policy 'mix' is not known; did you mean 'mixed'?"),
        (("--mesh", "data=2"), "mesh: data is 2, but a prompt has nothing to split"),
        (("--mesh", "tensor=2", "--weights", "int4"), "--weights is for one worker"),
        (("--cache", "int3"), "--cache is 'int3'; did you mean 'int8'?"),
        (("--tier", "cxl=/x:1KiB"), "--tier is given beside --serve"),
    ):
        code, text = said(directory, "--serve", "--traffic", traffic, *words)
        assert code == 2 and text.startswith(f"error: {line}") and text.count("\n") == 1
    code, text = said(directory, "--rate", "2")
    assert code == 2 and "--rate goes with --serve" in text


@pytest.mark.parametrize("collecting", [True, False])
def test_the_collector_is_as_it_was_behind_a_play(collecting: bool) -> None:
    """Also where it fails."""
    before, seen = gc.isenabled(), list[bool]()
    (gc.enable if collecting else gc.disable)()

    def failing(view: View) -> Step:
        seen.append(gc.isenabled())
        raise ZeroDivisionError

    try:
        with pytest.raises(ZeroDivisionError):
            play(ROOM, failing, [Arrival(0.0, 4, 2)])
        assert gc.isenabled() == collecting and seen == [False]
    finally:
        (gc.enable if before else gc.disable)()
