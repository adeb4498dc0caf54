"""What a step feeds, and what is promised: by foretold seconds, without a model."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from outsize.errors import OutsizeError
from outsize.serve import request as requests
from outsize.serve.asks import Ask, End, Full, Room, Token
from outsize.serve.awaited import full
from outsize.serve.line import Line
from outsize.serve.policies import POLICIES, View, chosen, in_time, parse_policy, unkept_by
from outsize.serve.price import Curve, Price
from outsize.serve.request import Shares
from outsize.serve.slo import NONE, Drift, Fits, Load, Slo, limits, parse_slo, unkept, wait
from outsize.serve.waiting import Queue, Rank, Waiting

# A step of one token takes 10 ms, one of 64 takes 100, each further token a 64th of 64 ms more.
PRICE = Price(
    Curve(((1, 0.010), (16, 0.020), (64, 0.1))), Curve(((1, 0.001), (8, 0.004))), 1e-6, 1e-6
)
ROOM = Room(pages=64, page=4, slots=4, budget=64, queue=10_000, context=128, price=PRICE)

DRAWS = [Waiting(0, 1), Waiting(3, 1)]
SLICED, NEW, LATER = Waiting(1, 9), Waiting(2, 30), Waiting(4, 5)


def view(
    drawing: Sequence[Waiting] = (),
    queue: Iterable[Waiting] = (),
    slicing: Iterable[Waiting] = (),
    budget: int = 64,
    slots: int = 4,
) -> View:
    going = {one.key: one for one in sorted([*drawing, *slicing])}
    keys = [one.key for one in drawing]
    return View(going, keys, Queue(queue), budget, slots, price=PRICE, slo=Slo(1.0, 1.0))


@pytest.mark.parametrize(
    ("policy", "fed"),
    [
        ("mixed", {0: 1, 3: 1, 1: 9, 2: 5}),
        ("prompt-first", {1: 9, 2: 7}),
        ("first-come", {0: 1, 1: 9, 2: 6}),
        ("decode-maximal", {0: 1, 3: 1, 1: 9}),
        ("fixed", {0: 1, 3: 1, 1: 8}),
        ("fair", {0: 1, 3: 1, 1: 9, 2: 5}),
        ("deadline", {0: 1, 3: 1, 1: 9, 2: 5}),
        ("feedback", {0: 1, 1: 9, 2: 5, 3: 1}),
    ],
)
def test_what_each_feeds(policy: str, fed: dict[int, int]) -> None:
    """And all that have begun are named, so that it is known who is behind whom."""
    all_five = view(DRAWS, [NEW, LATER], [SLICED], budget=16)
    found = POLICIES.get(policy)(all_five)
    assert {key: count for key, count in found.items() if count} == fed
    assert {0, 1, 3} <= set(found)
    few = POLICIES.get(policy)(replace(all_five, slots=3))
    assert policy == "feedback" or not {2, 4} & set(few), "no slot is free"
    drawing = POLICIES.get(policy)(view(DRAWS, budget=16))
    assert drawing == {0: 1, 3: 1}


def test_fair_counts_a_prompt_that_is_under_way() -> None:
    """Its owner's next one comes behind another's, though it came before that."""
    under = Waiting(0, 40, owner="a")
    queue = [Waiting(1, 5, owner="a"), Waiting(2, 5, owner="b")]
    assert list(POLICIES.get("fair")(view((), queue, [under]))) == [0, 2, 1]


def test_fixed_is_as_many_tokens_as_bring_something() -> None:
    """The fewest whose tokens a second are within a tenth of the most that was timed."""
    points = np.arange(1, 65)
    best = 64 / PRICE.step(64, 1, 0)
    near = [n for n in points if n / PRICE.step(int(n), 1, 0) >= 0.9 * best]
    flat = Price(Curve(((1, 0.01), (8, 0.01), (64, 0.08))))
    assert PRICE.enough == near[0] and flat.enough == 8
    one = replace(view(queue=[Waiting(0, 60)], slots=1), price=flat)
    assert POLICIES.get("fixed")(one) == {0: 8} and POLICIES.get("mixed")(one) == {0: 60}


def test_feedback_levels() -> None:
    """A prompt as long as four turns joins below a short one; who has had a turn falls; who waits
    rises again; who came first is first among equals."""
    turn = PRICE.token

    def first(*some: Waiting, now: float = 0.0) -> int:
        return next(iter(POLICIES.get("feedback")(replace(view(queue=some, slots=1), now=now))))

    long = Waiting(0, 60, first=PRICE.prompt(60))
    short = Waiting(1, 2, first=PRICE.prompt(2))
    assert PRICE.prompt(60) > 4 * turn and first(long, short) == 1
    assert first(long._replace(first=short.first), short) == 0
    had = short._replace(spent=61 * turn, key=0)
    assert first(had, long._replace(key=2, spent=0.0)) == 2
    assert first(had._replace(spent=59.9 * turn), long._replace(key=2)) == 0
    waited = 10 * 16 * turn  # ten turns of its level, the second
    assert first(long, short._replace(came=waited), now=waited * 0.99) == 1
    assert first(long, short._replace(came=waited), now=waited * 1.01) == 0


def test_deadline_serves_who_can_still_be_in_time() -> None:
    slo, now = Slo(ttft=1.0, tpot=0.1), 2.0
    late = Waiting(0, 8, came=0.5)
    soon, later = Waiting(1, 8, came=1.2), Waiting(2, 8, came=1.1)
    three = replace(view(queue=[late, soon, later]), now=now, slo=slo)
    assert POLICIES.get("deadline")(replace(three, budget=8)) == {2: 8}
    assert list(POLICIES.get("deadline")(three)) == [2, 1, 0]
    drawing = replace(view([Waiting(5, 1, last=1.98), Waiting(6, 1, last=1.95)]), now=now, slo=slo)
    assert list(POLICIES.get("deadline")(drawing)) == [6, 5]
    with pytest.raises(OutsizeError, match="policy deadline goes by what is promised; serve with"):
        chosen("deadline", NONE)
    assert chosen("deadline", slo) is POLICIES.get("deadline")


def test_fair_serves_who_has_had_least() -> None:
    some = [Waiting(n, 10, owner="ab"[n > 2]) for n in range(5)]
    five = replace(view(queue=some, slots=3), shares={"a": 100.0, "b": 85.0})
    assert list(POLICIES.get("fair")(five)) == [3, 4, 0]
    assert list(POLICIES.get("fair")(replace(five, shares={}))) == [0, 3, 1]
    shares = Shares()
    shares.come("a", ())
    shares.take("a", 70)
    shares.come("b", {"a"})  # as if he had had as much: nothing is saved up
    assert shares.had == {"a": 70.0, "b": 70.0}
    shares.come("b", {"a", "b"})
    shares.take("b", 5)
    shares.come("c", {"a", "b"})
    assert shares.had["c"] == 70.0
    shares.come("b", {"a", "c"})  # who had more stays ahead
    assert shares.had["b"] == 75.0
    shares.come("a", ())
    assert shares.had == {"a": 0.0}


def test_a_curve_is_linear_between_points() -> None:
    points = ((2, 1.0), (4, 3.0), (9, 8.0))
    xs, ys = zip(*points, strict=True)
    curve = Curve(points)
    for n in range(1, 10):
        assert curve(n) == pytest.approx(np.interp(n, xs, ys))
    assert curve(0) == 0.0 and curve(11) == pytest.approx(10.0)
    assert Curve(((1, 2.0), (3, 1.0)))(3) == 2.0  # more never take less
    assert Curve(((1, 2.0),))(3) == pytest.approx(6.0)
    assert PRICE.alone(100, 40) == pytest.approx(
        PRICE.prompt(40) + PRICE.prompt(40, 40) + PRICE.prompt(20, 80)
    )
    assert replace(PRICE, reading=9.0).step(64, 1, 0) == 9.0
    assert replace(PRICE, reach=5, load=1.0).past(100, 3) == pytest.approx(15e-6 + 5)


@pytest.mark.parametrize(
    "points", [((1, 1.0), (8, 1.0), (9, 3.0)), ((4, 0.5), (6, 0.5)), ((2, 0.25),)]
)
def test_the_most_within_so_many_seconds_are_found(points: tuple[tuple[int, float], ...]) -> None:
    """Of a rising table, a flat one, and one that goes on rising behind its end."""
    curve = Curve(points)
    for seconds in (0.1, 0.25, 0.5, 1.0, 2.0, 2.9, 3.0, 3.1, 60.0):
        fit = [count for count in range(1, 600) if curve(count) <= seconds]
        found = curve.within(seconds)
        assert (found == max(fit, default=0)) or (fit[-1:] == [599] and found > 599)


def test_steps_keep_what_is_promised() -> None:
    """Whatever goes: the step that the limits allow takes tpot at most, and one token more takes
    longer, unless there is nothing to take away."""
    chance = random.Random(1)
    bound = 0
    for _ in range(200):
        drawing = [chance.randrange(1, 4000) for _ in range(chance.randrange(9))]
        depth, tpot = chance.randrange(900), chance.uniform(0.005, 0.12)
        tokens, slots = limits(PRICE, tpot, drawing, depth, 64, 16)
        if not drawing:
            assert (tokens, slots) == (64, 16)
            continue
        seen = sum(PRICE.past(start, 1) for start in drawing)

        def seconds(
            tokens: int, least: int = len(drawing), seen: float = seen, d: int = depth
        ) -> float:
            return PRICE.step(tokens, least + 1, seen + PRICE.past(d, tokens - least))

        assert len(drawing) <= tokens <= 64 and 1 <= slots <= 16
        assert tokens == len(drawing) or seconds(tokens) <= tpot
        assert tokens == 64 or seconds(tokens + 1) > tpot
        bound += len(drawing) < tokens < 64
        deep = max(drawing)
        assert slots == 1 or PRICE.step(slots, slots, slots * PRICE.past(deep, 1)) <= tpot
        assert (
            slots == 16
            or PRICE.step(slots + 1, slots + 1, (slots + 1) * PRICE.past(deep, 1)) > tpot
        )
    assert bound > 40


def test_a_queue_keeps_its_ranks() -> None:
    """Whoever comes and goes, and however far the clock goes: the lowest are those of a sort by
    what each one's rank is then."""
    chance, queue, now = random.Random(3), Queue(), 0.0

    def ranks(one: Waiting, now: float, slow: float) -> Rank:
        fallen = int((now - one.came) / (slow * one.first))
        until = one.came + (1 + fallen) * slow * one.first
        return Rank(one.tokens - fallen, one.spent, until * (1 - 1e-12))

    key = 0
    for _ in range(400):
        now += chance.choice((0.0, 0.25, 3.0))
        for _ in range(chance.randrange(3)):
            first, spent = chance.choice((0.5, 0.7, 2.0)), chance.choice((0.0, 1.5))
            one = Waiting(key, 9, first=first, came=now, spent=spent, owner=chance.choice("ab"))
            queue.add(one)
            key += 1
        some = list(queue)
        slow = 1.0 if now < 200 else 2.0
        found = queue.lowest(5, now, ranks, slow)
        assert found == sorted((*ranks(one, now, slow)[:2], one.key) for one in some)[:5]
        if some and chance.random() < 0.5:
            gone = chance.choice(some)
            queue.remove(gone.key)
            if chance.random() < 0.3:
                queue.add(gone._replace(spent=gone.spent + 1.0))
        assert queue.tokens == 9 * len(queue) == 9 * sum(map(len, queue.owners.values()))
        assert [one.key for one in queue] == sorted(one.key for one in queue)
    assert len(queue) > 100 and now > 300


def test_what_is_promised_is_read() -> None:
    assert parse_slo("ttft=500ms,tpot=50ms") == Slo(0.5, 0.05)
    assert (
        parse_slo(" tpot = 1.5s ") == Slo(math.inf, 1.5)
        and str(Slo(2.0, 0.05)) == "ttft=2s,tpot=50ms"
    )
    for text in ("", "fast", "ttft=5", "ttft=0ms", "ttft=1.2.3s", "ttft=-1s", "tbt=1s", "ttft=1s,"):
        with pytest.raises(OutsizeError, match="is none; expected ttft=500ms,tpot=50ms"):
            parse_slo(text)
    with pytest.raises(OutsizeError, match="tpot is given twice"):
        parse_slo("tpot=1s,tpot=2s")
    assert parse_policy("fair") == ("fair", NONE)
    assert parse_policy("deadline:ttft=500ms") == ("deadline", Slo(ttft=0.5))
    with pytest.raises(OutsizeError, match="policy fast: 'fast' is none; expected ttft=500ms"):
        parse_policy("fair:fast")
    lines = unkept(Slo(0.01, 0.01), PRICE, 64, 64)
    assert "ttft=10ms cannot be kept: alone, a prompt of 64" in lines[0]
    assert "tpot=10ms cannot be kept: alone, a token takes about 11.1ms" in lines[1]
    assert not unkept(Slo(1.0, 0.012), PRICE, 64, 64)


def test_a_wait_is_foretold() -> None:
    """Prompts in whole steps one after another, beside those before them, to the end of a step;
    behind full slots, when the first of them ends, by steps that feed no prompt."""
    flat = Price(Curve(((1, 0.01), (10, 0.01), (20, 0.02))))
    me = Load(20, 1.0)
    assert wait(flat, [me], Fits(20, 4)) == pytest.approx(0.02)
    assert wait(flat, [Load(40, 5.0), me], Fits(20, 4)) == pytest.approx(0.08)
    going = Load(0, 30.0, 100, True)
    full = flat.step(20, 2, 0)
    assert wait(flat, [going, me], Fits(20, 1)) == pytest.approx(30 * 0.01 + flat.step(20, 1, 0))
    assert wait(flat, [going, me], Fits(20, 2)) == pytest.approx(2 * full)
    assert wait(flat, [going, me], Fits(20, 2, 0.0155)) == pytest.approx(2 * flat.step(15, 2, 0))
    # Apart from who draws: he comes no further beside prompts, which are whole where there is room.
    slots = [Load(0, 3.0, 100, True), Load(20, 9.0, 0, True), Load(10, 1.0), me]
    assert wait(flat, slots, Fits(40, 4, apart=True)) == pytest.approx(flat.step(40, 1, 0) * 2)
    behind = flat.step(40, 1, 0) / 2 + 3 * 0.01 + flat.step(10, 1, 0) + 0.01 + flat.step(20, 1, 0)
    assert wait(flat, slots, Fits(40, 2, apart=True)) == pytest.approx(behind)


def test_no_policy_leaves_out_whom_that_makes_late() -> None:
    """Whoever draws is in the step where it, and one behind it, would end too late for him; and
    nobody who draws is interrupted. Where nothing of it is promised the policy says."""
    here = [Waiting(key, 1, 3, 0.0, 0.0, 0.95, 1.0) for key in (0, 1)]
    now = replace(view(here, [Waiting(2, 40)], budget=30), now=1.0)
    first, mixed = POLICIES.get("prompt-first"), POLICIES.get("mixed")
    fed = {0: 0, 1: 0, 2: 30}
    for some in (replace(now, slo=Slo(1.0)), replace(now, slo=Slo(tpot=0.3))):
        assert in_time(first, some) == first(some) == fed
    for some in (replace(now, slo=Slo(tpot=0.1)), replace(now, slo=Slo(tpot=0.2), slowest=3.0)):
        assert in_time(first, some) == mixed(some) != first(some) == fed
    full, levels = replace(now, slots=2), POLICIES.get("feedback")
    assert in_time(levels, replace(full, slo=Slo(1.0))) == {2: 29, 0: 1, 1: 0}
    assert in_time(levels, replace(full, slo=Slo(tpot=9.0))) == {0: 1, 1: 1}
    assert unkept_by("feedback", Slo(1.0))[0].startswith("ttft=1s is not kept by feedback for long")
    assert not [*unkept_by("feedback", Slo(1.0, 1.0)), *unkept_by("mixed", Slo(1.0))]


def step(line: Line) -> None:
    """One without a model, as it is foretold."""
    feeds = line.feeds()
    for feed in feeds:
        if not feed.part.ahead:
            feed.request.told = [Token(1)]
    line.take(feeds)
    line.ran(feeds, line.said)


def go(line: Line, now: list[float]) -> None:
    step(line)
    now[0] += line.said


def line_of(room: Room, policy: str = "mixed") -> Line:
    return Line(room, POLICIES.get(policy), True, clock=lambda: 0.0)


def ask(length: int, new: int, owner: str = "") -> Ask:
    def sampler(logits_V: torch.Tensor, index: int) -> int:
        raise AssertionError("nothing is drawn")

    return Ask(tuple(range(length)), new, sampler, owner=owner)


def test_who_would_wait_too_long_is_refused() -> None:
    """The first always may; and the wait is over when it is said to be."""
    line = line_of(replace(ROOM, slo=Slo(ttft=0.3)))
    ends = list[End]()
    line.add(ask(100, 4), lambda one: ends.append(one) if isinstance(one, End) else None)
    line.add(ask(20, 4), lambda _: None)
    assert line.wait(100) > 0.3
    with pytest.raises(
        Full, match=r"the first token would come in about .*, and 300ms is promised"
    ) as full:
        line.add(ask(100, 4), lambda _: None)
    assert full.value.wait == pytest.approx(line.wait(100) - 0.3) and line.counts.refused == 1
    line.drift.mean = 0.01  # than foretold, so that there is time
    line.add(ask(100, 4), lambda _: None)
    assert len(line.requests) == 3


def test_what_the_front_end_took_is_counted() -> None:
    """Who had come long before the engine hears of him waits since then, and is refused by it; what
    he is told counts it too."""
    line = line_of(replace(ROOM, slo=Slo(ttft=1.0)))
    line.add(ask(100, 4), lambda _: None)
    wait = line.wait(60)
    assert 0.1 < wait < 0.5
    line.add(replace(ask(60, 4), came=wait - 0.999), lambda _: None)
    assert line.requests[1].came == wait - 0.999  # by which he is due
    wait = line.wait(60)
    with pytest.raises(Full) as full:
        line.add(replace(ask(60, 4), came=wait - 1.001), lambda _: None)
    assert full.value.wait == pytest.approx(0.001)


def test_who_is_interrupted_waits_with_all_tokens() -> None:
    now = [0.0]
    line = Line(replace(ROOM, pages=8), POLICIES.get("mixed"), False, clock=lambda: now[0])
    key = line.add(ask(10, 9), lambda _: None)
    for _ in range(3):
        go(line, now)
    line.lent(30)
    assert line.queue.tokens == len(line.requests[key].ids) == 13


def test_texts_that_are_looked_at_wait_in_the_queue_too() -> None:
    line = Line(replace(ROOM, queue=100), POLICIES.get("mixed"), False, clock=lambda: 0.0)
    line.beside = 60
    line.refuse_if_full(40)
    with pytest.raises(Full, match="60 tokens wait in the queue, which holds 100"):
        line.refuse_if_full(41)


@pytest.mark.parametrize("seed", range(6))
def test_who_is_refused_may_come_when_he_was_told(seed: int) -> None:
    """With a clock that steps move there is room in the queue by then, and not far sooner. A prompt
    for which there never is any is told when nobody waits."""
    chance, now = random.Random(seed), [0.0]
    room = replace(ROOM, queue=200, pages=400, budget=32)
    line = Line(room, POLICIES.get("mixed"), False, clock=lambda: now[0])

    def add(tokens: int) -> None:
        line.add(ask(tokens, chance.randrange(5, 30)), lambda _: None)

    for _ in range(4):
        add(chance.randrange(10, 40))
    for _ in range(9):
        go(line, now)
    with pytest.raises(Full) as full:
        while True:
            add(tokens := chance.randrange(10, 60))
    with pytest.raises(Full) as never:
        add(201)
    begun = now[0]
    while line.queue.tokens + tokens > 200:
        go(line, now)
    took = now[0] - begun
    assert 0 < took <= 1.25 * full.value.wait + line.said and full.value.wait < 1.25 * took
    while line.queue:
        go(line, now)
    assert full.value.wait < never.value.wait
    assert now[0] - begun == pytest.approx(never.value.wait, rel=0.25)


def test_steps_that_take_longer_than_foretold_become_smaller() -> None:
    room = replace(ROOM, slo=Slo(tpot=0.05))
    sizes = []
    for slower in (1.0, 2.0):
        line = line_of(room)
        line.drift.mean = slower
        line.add(ask(4, 9), lambda _: None)
        step(line)
        line.add(ask(100, 9), lambda _: None)
        sizes.append(sum(feed.part.tokens for feed in line.feeds()))
    assert 64 > sizes[0] > sizes[1] > 1
    before = line.drift.mean
    line.ran(line.feeds(), 1e9)  # says that it was far slower, and no more than that
    assert line.drift.mean == pytest.approx(0.9 * before + 0.1 * 4 * before)
    assert line.counts.foretold > 0
    for _ in range(100):  # and steps that always take fifty times as long are reckoned with
        line.ran(feeds := line.feeds(), 50 * line.said)
    assert feeds and line.drift.mean == pytest.approx(50, rel=0.01)


def test_draws_that_take_longer_are_reckoned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a sampler does, its next draw is foretold by what those before took: in a step, in
    what a step may hold, and in what who comes next would wait."""
    now, room = [0.0], replace(ROOM, price=replace(PRICE, draw=2**-12), slo=Slo(tpot=0.05))
    monkeypatch.setattr(requests, "time", SimpleNamespace(thread_time=lambda: now[0]))

    def slow(logits_V: torch.Tensor, index: int) -> int:
        now[0] += 2**-5
        return 1

    said, fits, waits = list[float](), list[int](), list[float]()
    for sampler in (lambda logits_V, index: 1, slow):
        line = line_of(room)
        line.add(replace(ask(4, 9), sampler=sampler), lambda _: None)
        for _ in range(2):
            for feed in (feeds := line.feeds()):
                feed.request.draw(torch.zeros(8), feed.request.drawn)
            line.take(feeds)
        line.feeds()
        said.append(line.said)
        fits.append(line.limits()[0])
        waits.append(line.wait(60))
    more = 2**-5 - 2**-12
    assert said[1] == pytest.approx(said[0] + more) and waits[1] > waits[0] + more
    assert fits[0] > fits[1] > 1


def test_fair_shares_where_one_asks_far_more() -> None:
    """Of two who always wait, one has had no more than the other, but for what two requests are:
    first come, first served gives the second nothing while the first one's go."""
    had = {}
    for policy in ("mixed", "fair"):
        line = line_of(replace(ROOM, slots=2, queue=10**6), policy)
        drawn = {"a": 0, "b": 0}

        def deliver(one: Token | End, owner: str, drawn: dict[str, int] = drawn) -> None:
            drawn[owner] += isinstance(one, Token)

        for owner in itertools.chain("a" * 20, "b" * 5):
            line.add(ask(8, 8, owner), lambda one, o=owner: deliver(one, o))
        for _ in range(30):
            step(line)
        had[policy] = drawn
    assert had["mixed"]["b"] == 0 and had["mixed"]["a"] > 32
    assert abs(had["fair"]["a"] - had["fair"]["b"]) <= 16 < had["fair"]["b"]


def test_fair_refuses_who_asks_far_more() -> None:
    """Who asks little is refused neither since another has filled the queue nor for the time that
    the other's requests take, which come behind his."""

    def nobody(one: Token | End) -> None:
        pass

    for policy, queue in itertools.product(("mixed", "fair"), (300, 10**6)):
        line = line_of(replace(ROOM, slots=2, queue=queue, slo=Slo(ttft=1.0)), policy)
        with pytest.raises(Full, match="wait in the queue" if queue == 300 else "is promised"):
            for _ in range(100):
                line.add(ask(40, 8, "greedy"), nobody)
        refused = 0
        for _ in range(2):
            try:
                line.add(ask(40, 8, "modest"), nobody)
            except Full:
                refused += 1
        assert refused == (0 if policy == "fair" else 2)
        with pytest.raises(Full):
            line.add(ask(40, 8, "greedy"), nobody)
    crowd = line_of(replace(ROOM, queue=100), "fair")
    for _ in range(3):
        crowd.add(ask(30, 8, "a"), nobody)
    assert full(crowd, 51, "b") and not full(crowd, 50, "b") and full(crowd, 11, "a")


def test_drift_is_what_few_steps_exceed() -> None:
    """Steps that vary by chance: their mean is found, and some in a hundred take longer than what
    is reckoned with."""
    chance, drift, over, means = random.Random(2), Drift(), 0, list[float]()
    for _ in range(4000):
        times = chance.uniform(1.0, 1.6)
        over += times > drift.slowest
        drift.take(times)
        means.append(drift.mean)
    assert sum(means[100:]) / len(means[100:]) == pytest.approx(1.3, rel=0.02)
    assert over < 0.08 * 4000
    even = Drift()
    even.take(1.0)
    assert even == Drift()


def test_next_tokens_come_before_drafts() -> None:
    """Of four pages of four tokens two requests have one each, full: the draft of the first would
    take the last page, behind its own token's, which the second's next token needs."""

    class Four:
        def propose(self, ids: Sequence[int], most: int) -> Sequence[int]:
            return (7, 7, 7, 7)[:most]

        def judged(self, proposed: int, accepted: int) -> None:
            pass

    room = replace(ROOM, pages=4, slots=2)
    line = Line(room, POLICIES.get("mixed"), False, Four, clock=lambda: 0.0)
    for _ in range(2):
        line.add(ask(4, 9), lambda _: None)
    step(line)
    found = [(feed.request.key, feed.part.start, tuple(feed.ids)) for feed in line.feeds()]
    first = [(0, 4, (1,)), *((0, 4 + n, (7,)) for n in range(1, 4))]
    assert found == [*first, (1, 4, (1,)), *((1, 4 + n, (7,)) for n in range(1, 4))]
    assert [start for start, _, _ in line._pieces] == [start for _, start, _ in found]
    assert [one.key for one in line.order] == [0, 1] and line.pages.left == 0
