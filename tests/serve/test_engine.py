"""The engine: what a request is told is what it would be told alone, whatever else is asked."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from asking import PRICE, ROOM, ROOMS, VOCAB, Told, Unkept, answered, asks, plainly
from decoders import CONFIGS, SMALL
from torch import Tensor

import outsize
from outsize.data.tokenizer import ByteTokenizer
from outsize.decode.samplers import Sampler, Sampling
from outsize.errors import OutsizeError
from outsize.hardware.disk import OPERATION
from outsize.kernels import native
from outsize.memory.disk import DiskStore
from outsize.memory.store import MemoryStore, Store
from outsize.memory.tiers import disk_tier, host_tier
from outsize.models.build import build
from outsize.models.families import parse
from outsize.serve.asks import Ask, End, Full, Room, Token
from outsize.serve.asks import told as said
from outsize.serve.below import ROUNDS, Below
from outsize.serve.drafts import Drafter, Lookup
from outsize.serve.engine import Engine
from outsize.serve.model import Model
from outsize.serve.policies import POLICIES
from outsize.serve.room import Wanted, served
from outsize.serve.slo import Slo
from outsize.verify.served import Failing

NAMES = [name for name in CONFIGS if name != "experts"]  # which are asked in bfloat16
COMPILED = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Model:
    config = {**CONFIGS[name], "n_positions": 64} if name == "learned" else CONFIGS[name]
    made = build(parse(config), seed=3, dtype=dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return Model(made)


@contextmanager
def paused(
    model: Model,
    room: Room,
    policy: str = "mixed",
    drafter: Callable[[], Drafter] | None = None,
) -> Iterator[Engine]:
    """An engine that has not started, so that what is asked is there before the first step."""
    engine = Engine(model, room, POLICIES.get(policy), drafter=drafter)
    try:
        yield engine
    finally:
        engine.close()


def told(
    model: Model,
    some: Sequence[Ask],
    room: Room,
    policy: str = "mixed",
    drafter: Callable[[], Drafter] | None = None,
) -> list[list[Token]]:
    """What all are told that ask together."""
    with paused(model, room, policy, drafter) as engine:
        return answered(engine, some)


@COMPILED
@pytest.mark.parametrize("name", [*NAMES, "llama in bfloat16", "experts in bfloat16"])
def test_tokens_and_logprobs_do_not_depend_on_others(name: str) -> None:
    """Bit for bit: alone; in slices, interrupted for want of pages, few at once."""
    form, _, half = name.partition(" in ")
    model, some = model_of(form, torch.bfloat16 if half else torch.float32), asks()
    alone = [told(model, [ask], ROOM)[0] for ask in some]
    assert [len(one) for one in alone] == [ask.max_new_tokens for ask in some]
    for room in ROOMS.values():
        assert told(model, some, room) == alone
    heard = [Heard(ask) for ask in some]
    for ask, one in zip(some, heard, strict=True):
        model.generate(ask.ids, ask.max_new_tokens, one)
    assert [one.told for one in heard] == alone
    with Engine(model, ROOMS["slices"], POLICIES.get("mixed")) as engine:
        whole = [*some[2].ids, *(one.id for one in alone[2])]
        scored = engine.logprobs(whole, 2)
    assert scored[len(some[2].ids) - 1 :] == alone[2]


@pytest.fixture(scope="module")
def lone() -> tuple[Model, list[list[Token]]]:
    """A model, and what each is told that asks it alone."""
    model = model_of("llama")
    return model, [told(model, [ask], ROOM)[0] for ask in asks()]


@COMPILED
@pytest.mark.parametrize("policy", POLICIES.names())
def test_no_policy_changes_anything(policy: str, lone: tuple[Model, list[list[Token]]]) -> None:
    """Bit for bit: few at once, in few pages, and in steps as short as is promised."""
    (model, alone), some = lone, asks()
    tight = replace(ROOM, pages=14, slots=2, slo=Slo(ttft=1e9, tpot=0.025))
    for room in (ROOMS["slices"], tight):
        assert told(model, some, room, policy) == alone


TURNED: dict[str, dict[str, Any]] = {
    "longrope": {
        "model_type": "phi3", "original_max_position_embeddings": 16,
        "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4,
                         "long_factor": [1.0, 2.0, 3.0, 4.0]},
    },
    "dynamic": {
        "model_type": "llama", "max_position_embeddings": 16,
        "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
    },
}  # fmt: skip


@COMPILED
@pytest.mark.parametrize("name", TURNED)
def test_texts_that_are_turned_by_their_length_share_none_of_another(name: str) -> None:
    """Whose keys go by 16 tokens: a short prompt, a long one that begins like it, one that gets
    longer; after one another, in slices, and interrupted when they had passed it."""
    model, text = Model(build(parse({**SMALL, **TURNED[name]}), seed=3)), list(range(1, 41))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    some = [
        Ask(tuple(text[:length]), new, Sampling(1.0, seed=length), frozenset(), 2)
        for length, new in ((12, 12), (13, 2), (40, 8), (41, 3), (9, 30), (12, 25))
    ]
    alone = [told(model, [ask], ROOM)[0] for ask in some]
    for ask, one in zip(some[:1], alone[:1], strict=True):
        drawn = [x.id for x in one]
        assert drawn == model.generate(ask.ids, ask.max_new_tokens, ask.sampler)
    with Engine(model, ROOM, POLICIES.get("mixed")) as engine:
        assert [list(engine.tokens(ask)) for ask in some] == alone
        assert engine.line.counts.kept > 0
    for room in ROOMS.values():
        assert told(model, some, room) == alone
    with paused(model, replace(ROOM, slots=1, price=PRICE), "feedback") as engine:
        assert answered(engine, some) == alone
        assert engine.line.counts.interrupted > 0


def test_feedback_interrupts_who_has_had_much() -> None:
    """A short request that comes late is served before a long one that goes."""
    model, each, told_second = model_of("llama"), [Told(), Told()], list[int]()
    some = [Ask((1,) * 20, 30, Sampling()), Ask((2,), 1, Sampling())]
    room = replace(ROOM, slots=1)
    with paused(model, room, "feedback") as engine:

        def deliver(x: Token | End) -> None:
            each[0](x)
            told_second.append(len(each[1].tokens))
            if len(each[0].tokens) == 2:
                engine.submit(some[1], each[1])

        engine.line.clock = lambda: 0.0
        engine.submit(some[0], deliver)
        engine.start()
        assert len(each[0].wait()) == 30 and len(each[1].wait()) == 1
        assert engine.line.counts.interrupted == 1
    assert told_second[:2] == [0, 0] and set(told_second[2:]) == {1}
    assert [x.id for x in each[0].tokens] == model.generate(some[0].ids, 30)


@COMPILED
def test_latents_are_rounded_alike_in_any_company() -> None:
    """Bit for bit, in slices and in few pages."""
    model, some, room = model_of("latent"), asks()[:2], replace(ROOM, cache="int8")
    alone = [told(model, [ask], room)[0] for ask in some]
    assert told(model, some, replace(ROOMS["slices"], cache="int8")) == alone
    assert alone != [told(model, [ask], ROOM)[0] for ask in some]


BELOW = {"llama": ((99, False), (99, True), (9, True), (4, False)), "latent": ((99, True),)}


@COMPILED
@pytest.mark.parametrize("name", BELOW)
def test_pages_that_go_below_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    """Bit for bit, of requests that are interrupted and of beginnings that several share; whatever
    fails is computed again, said once, and no page is lost in the books."""
    model = model_of(name, torch.bfloat16)
    alone = [told(model, [ask], ROOM)[0] for ask in asks()]
    each = 16 + 4 if name == "latent" else 2 * (2 * 8)  # or keys and values, heads and sizes
    page = 4 * 3 * each * 2  # tokens, layers, bytes
    for left, disk in BELOW[name]:
        host = Failing(MemoryStore("host", 5 << 12), left + 2 * ROUNDS)
        stores: list[tuple[Store, int]] = [(host, 5 << 12)]
        if disk:
            stores.append((DiskStore("disk", [tmp_path], 1 << 20, 1), 1 << 20))
        heard = list[str]()
        below = Below(stores, page, heard.append)
        price = replace(PRICE, fetch=0.0)
        room = replace(ROOM, pages=12, price=price, below=below.pages)
        with_below = Engine(model, room, POLICIES.get("feedback"), below=below)
        with_below.line.clock = lambda: 0.0  # nobody is urgent for having waited
        try:
            found = answered(with_below, [*asks(), *asks()[::2]])
            counts = with_below.line.counts
        finally:
            with_below.close()
        assert found == [*alone, *alone[::2]]
        assert len(heard) == (left < 99) == bool(below.fault)
        assert below.fault or counts.fetched >= 2
        assert below.fault or stores[-1][0].bytes_written > ROUNDS * page  # beside what was timed
        assert counts.evicted


class Guess:
    """Drafts that come true now and then."""

    def propose(self, ids: Sequence[int], most: int) -> Sequence[int]:
        return [ids[-1], (ids[-1] + len(ids)) % VOCAB, ids[0]][:most]

    def judged(self, proposed: int, accepted: int) -> None:
        assert 0 <= accepted <= proposed <= 3


@COMPILED
@pytest.mark.parametrize("name", ["latent", "window", "experts"])
def test_drafts_change_nothing(name: str) -> None:
    """Bit for bit, be they right or wrong, drawn or greedy; in few pages; beyond a stop token and
    the last that is asked for."""
    model, some = model_of(name), asks()
    first, longer = some[0], replace(some[0], max_new_tokens=12)
    alone = [told(model, [ask], ROOM)[0] for ask in (longer, *some[1:])]
    text = [*first.ids, *(one.id for one in alone[0])]
    whole = alone[0][: first.max_new_tokens]
    ends = frozenset({whole[4].id})
    some[0], alone[0] = replace(first, stop=ends), until(whole, ends)
    for room, drafter in ((ROOM, Lookup), (replace(ROOM, pages=14, budget=9), Guess)):
        assert told(model, some, room, drafter=drafter) == alone
    knowing = told(model, [some[0], first], ROOM, drafter=lambda: Knows(text))
    assert knowing == [alone[0], whole]


class Knows:
    """Drafts what will come, and what would come behind its end."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text = text

    def propose(self, ids: Sequence[int], most: int) -> Sequence[int]:
        return self.text[len(ids) :][:most]

    def judged(self, proposed: int, accepted: int) -> None:
        pass


def until(tokens: list[Token], ends: frozenset[int]) -> list[Token]:
    last = next(i for i, one in enumerate(tokens) if one.id in ends)
    return tokens[: last + 1]


class Heard:
    """A sampler that keeps what `generate` would be told by the engine."""

    def __init__(self, ask: Ask) -> None:
        self.ask, self.told = ask, list[Token]()

    def __call__(self, logits_V: Tensor, index: int) -> int:
        token = self.ask.sampler(logits_V, index)
        self.told.append(said(logits_V, token, self.ask.tops))
        return token


class Recited:
    """A sampler that says a text again and again."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text = text

    def __call__(self, logits_V: Tensor, index: int) -> int:
        return self.text[index % len(self.text)]


@pytest.mark.parametrize("repeated", [True, False])
def test_drafts_that_come_true_spare_steps(repeated: bool) -> None:
    """Most of what is looked up comes true where a text repeats itself; else nothing is drafted."""
    model, text = model_of("llama"), [5, 9, 2, 7, 1, 8] if repeated else list(range(48))
    with Engine(model, ROOM, POLICIES.get("mixed"), drafter=Lookup) as engine:
        found = [one.id for one in engine.tokens(Ask((3,), 48, Recited(text)))]
        assert found == [text[i % len(text)] for i in range(48)]
        counts = engine.line.counts
    assert counts.steps == 48 - counts.accepted and counts.accepted <= counts.drafted
    assert counts.accepted >= 30 if repeated else not counts.drafted


def test_lookup_rests_where_little_comes_true() -> None:
    one = Lookup()
    ids = [1, 2, 3, 4, 1, 2, 3]
    assert one.propose(ids, 9) == [4, 1, 2, 3] and one.propose(ids, 2) == [4, 1]
    for _ in range(6):
        one.judged(6, 0)
    assert not one.propose(ids, 9)
    for _ in range(30):
        one.propose(ids, 9)
    assert one.propose(ids, 9)


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_one_full_pass(name: str) -> None:
    """In float64: what the plain model gives the tokens that were drawn."""
    model, some = model_of(name, torch.float64), asks()
    room = replace(ROOM, budget=5, pages=14)
    for ask, found in zip(some, told(model, some, room), strict=True):
        logs_TV = plainly(model, ask, found, 1e-10)
        for place, one in enumerate(found, len(ask.ids) - 1):
            assert [i for i, _ in one.tops] == logs_TV[place].topk(2).indices.tolist()
    greedy = some[0]
    assert [x.id for x in told(model, [greedy], room)[0]] == model.generate(greedy.ids, 9)


def test_recurrent_states_go_with_their_request() -> None:
    config = {**SMALL, "model_type": "gla", "num_key_value_heads": 4}
    model = Model(build(parse(config), seed=3, dtype=torch.float64))
    some = asks()
    for found in (told(model, some, ROOMS["slices"]), told(model, some, ROOMS["pages"])):
        for ask, one in zip(some, found, strict=True):
            plainly(model, ask, one, 1e-10)


@pytest.mark.parametrize("method", ["prompt", "prefix"])
def test_virtual_tokens_stand_before_each_prompt(method: str) -> None:
    model = outsize.adapt(model_of("llama", torch.float64), {method: {"tokens": 5}})
    some = asks()
    for ask, found in zip(some, told(model, some, ROOMS["slices"]), strict=True):
        drawn = [one.id for one in found]
        assert drawn == model.generate(ask.ids, ask.max_new_tokens, ask.sampler)
        with Engine(model, replace(ROOM, budget=16), POLICIES.get("mixed")) as engine:
            scored = engine.logprobs([*ask.ids, *drawn])
        assert len(scored) == len(ask.ids) + len(drawn) - 1
        for one, other in zip(found, scored[-len(drawn) :], strict=True):
            assert abs(one.logprob - other.logprob) < 1e-10


def test_kept_pages_spare_work_and_are_told_of() -> None:
    model, ask = model_of("llama"), Ask(tuple(range(30)), 3, Sampling())
    with Engine(model, ROOM, POLICIES.get("mixed")) as engine:
        first = [one.id for one in engine.tokens(ask)]
        fed = engine.line.counts.prompt
        assert [one.id for one in engine.tokens(ask)] == first
        assert engine.line.counts.kept == 28 and engine.line.counts.prompt - fed == 2


def test_the_oldest_goes_on_where_pages_are_few() -> None:
    """Room for little more than one: all come to their end, and the first is never interrupted."""
    model = model_of("llama")
    some = [Ask((n,) * 20, 20, Sampling()) for n in range(1, 5)]
    room, each, order = replace(ROOM, pages=14), [Told() for _ in some], list[int]()
    with paused(model, room) as engine:
        for number, (ask, one) in enumerate(zip(some, each, strict=True)):

            def deliver(x: Token | End, number: int = number, one: Told = one) -> None:
                order.extend([number] if isinstance(x, End) else [])
                one(x)

            engine.submit(ask, deliver)
        engine.start()
        assert [len(one.wait()) for one in each] == [20] * 4
        assert order[0] == 0 and engine.line.counts.interrupted > 0


def _no_number(logits_V: Tensor, index: int) -> int:
    return Sampling()(logits_V * float("nan") if index == 2 else logits_V, index)


def _fails(logits_V: Tensor, index: int) -> int:
    if index == 2:
        raise IndexError("index 9 is out of bounds")
    return Sampling()(logits_V, index)


def _beyond(logits_V: Tensor, index: int) -> int:
    return 10**6 if index == 2 else Sampling()(logits_V, index)


@pytest.mark.parametrize(
    ("sampler", "words"),
    [(_no_number, "not finite"), (_fails, "IndexError: index 9"), (_beyond, "IndexError")],
)
def test_what_fails_in_one_requests_drawing_ends_it_alone(sampler: Sampler, words: str) -> None:
    model, good = model_of("llama"), Ask((1, 2, 3), 6, Sampling())
    each = [Told(), Told()]
    with paused(model, ROOM) as engine:
        for ask, one in zip((Ask((4, 5), 6, sampler, tops=1), good), each, strict=True):
            engine.submit(ask, one)
        engine.start()
        assert len(each[0].wait()) == 2 and each[0].end is not None
        assert each[0].end.reason == "error" and words in each[0].end.error
        assert [x.id for x in each[1].wait()] == model.generate([1, 2, 3], 6)


def test_a_prompt_that_lacks_pages_holds_up_nobody_who_has_begun() -> None:
    """Though its policy would have it before anything else."""
    first, second = Ask((1,) * 9, 9, Sampling()), Ask((2,) * 30, 2, Sampling())
    model, room = model_of("llama"), replace(ROOM, pages=9)
    assert [len(one) for one in told(model, [first, second], room, "prompt-first")] == [9, 2]


def test_a_token_whose_weights_are_no_numbers_ends_its_requests_alone() -> None:
    """Drawn and scored; the pages that they had are others' afterwards."""
    model, good = model_of("llama"), Ask((1, 2, 3), 6, Sampling(), tops=1)
    right = told(model, [good], ROOM)[0]
    with torch.no_grad():
        model.prologue.tokens.weight[7] = float("nan")
    with Engine(model, replace(ROOM, pages=5), POLICIES.get("mixed")) as engine:
        for ids in ((7,), (1, 2, 3, 4, 7, 8)):
            with pytest.raises(OutsizeError, match="not finite"):
                list(engine.tokens(Ask(ids, 3, Sampling())))
            with pytest.raises(OutsizeError, match="not finite"):
                engine.logprobs((*ids, 5))
            assert list(engine.tokens(good)) == right


def test_what_pages_hold_is_in_the_plan() -> None:
    """Bytes of a page of 16 tokens, of 3 layers, 2 heads and twice 8 numbers, or of a latent of 16
    and 4 rotary ones; what is rounded."""
    model = model_of("llama")
    for form, each in (("as-stored", 32), ("bf16", 16), ("int8", 10), ("int4", 6)):
        plan = served(model, Wanted(context=64, requests=4, cache=form))
        assert plan.cache == plan.room.pages * 16 * 3 * 2 * 2 * each and plan.room.cache == form
        said = [note for note in plan.notes if f"held as {form}" in note]
        assert len(said) == (form != "as-stored")
    plan = served(model_of("latent"), Wanted(context=64, requests=4, cache="int8"))
    assert plan.cache == plan.room.pages * 16 * 3 * (20 + 2)
    half = served(model_of("llama", torch.bfloat16), Wanted(context=64, cache="bf16"))
    assert not half.notes
    with pytest.raises(OutsizeError, match=r"cache is 'int5'.*int"):
        Wanted(cache="int5")


def test_who_leaves_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    model, told_, left, fed = model_of("llama"), Told(), threading.Event(), list[object]()
    with Engine(model, ROOM, POLICIES.get("mixed")) as engine:
        feed = engine.steps.feed

        def held(*step: Any) -> None:
            fed.append(step)
            if len(fed) == 2:  # until the one has left that has a token of the first step
                left.wait()
            feed(*step)

        monkeypatch.setattr(engine.steps, "feed", held)
        came = engine.tokens(Ask((1, 2), 60, Sampling()))
        next(came)
        came.close()
        left.set()
        engine.submit(Ask((3,), 2, Sampling()), told_)
        told_.wait()
        assert engine.line.pages.left == ROOM.pages
        assert engine.line.counts.drawn < 60


def test_of_equally_likely_tokens_the_lowest_are_told() -> None:
    logits_V = torch.tensor([0.0, 2.0, 1.0]).repeat(100)
    for tops in (0, 1, 5, 150, 299, 300):
        found = said(logits_V, 4, tops)
        order = sorted(range(300), key=lambda i: (-logits_V[i], i))
        assert [one for one, _ in found.tops] == order[:tops]
        assert all(value == pytest.approx(float(logits_V.log_softmax(0)[i]), abs=1e-6)
                   for i, value in found.tops)  # fmt: skip


@pytest.mark.parametrize("promised", [None, 0.0325])
def test_a_long_text_that_is_looked_at_holds_up_nobody(promised: float | None) -> None:
    """Whoever draws has a token behind each slice of it, which is as long as a step may be, and
    goes on as if alone."""
    config = {**SMALL, "model_type": "gla", "num_key_value_heads": 4}
    model = Model(build(parse(config), seed=3, dtype=torch.float64))
    order, found = list[str](), list[Tensor]()
    room = replace(ROOM, budget=5)
    if promised is not None:  # a step of all its tokens takes longer than that
        room = replace(ROOM, slo=Slo(tpot=promised))
    with paused(model, room) as engine:
        engine.line.drift.take = lambda times: None  # type: ignore[method-assign]
        beside = threading.Thread(target=engine.look, args=([3] * 23, False, found.append))
        feed, look = engine.steps.feed, engine.steps.look

        def fed(*step: Any) -> None:
            order.append("step")
            feed(*step)

        def seen(*part: Any) -> Tensor:
            order.append("slice")
            return look(*part)

        def draw(logits_V: Tensor, index: int) -> int:
            if index == 1:
                beside.start()
                while not engine.line.beside:
                    pass
            return Sampling()(logits_V, index)

        engine.steps.feed, engine.steps.look = fed, seen  # type: ignore[method-assign]
        (told,) = answered(engine, [ask := Ask((1, 2), 12, draw, tops=0)])
        beside.join()
        plainly(model, ask, told, 1e-10)
        slices = order.count("slice")
        assert order[2 : 2 * slices + 2] == ["slice", "step"] * slices and engine.line.beside == 0
        lengths = [len(one) for one in found]
        assert lengths == [5, 5, 5, 5, 3] if promised is None else 1 < len(lengths) < 5
        assert engine.line.pages.left == engine.room.pages
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(found), model(torch.tensor([3] * 23)))


def test_what_cannot_be_served_is_refused_before_it_waits() -> None:
    model = model_of("llama")
    with paused(model, replace(ROOM, pages=5)) as engine:  # fewer than a context has
        assert engine.limit == 20
    with paused(model, replace(ROOM, queue=10)) as engine:
        for ids, new, words in (
            ((), 1, "no tokens"),
            ((61,), 1, "expected 0 to 60"),
            ((1, 2.0), 1, "has token 2.0"),
            ((1,), 2.5, "max_tokens is 2.5; expected a whole number"),
            ((1,) * 60, 6, "has room for 64"),
        ):
            with pytest.raises(OutsizeError, match=words):
                engine.submit(Ask(ids, new, Sampling()), Told())  # type: ignore[arg-type]
        engine.submit(Ask((1,) * 8, 1, Sampling()), Told())  # one may always wait
        with pytest.raises(Full, match="8 tokens wait in the queue, which holds 10") as refused:
            engine.submit(Ask((1,) * 8, 1, Sampling()), Told())
        # A slot is free: whoever waits goes into the next step.
        assert refused.value.wait == 0.0 and engine.line.counts.refused == 1
        engine.start()
    with pytest.raises(OutsizeError, match="closed"):
        engine.submit(Ask((1,), 1, Sampling()), Told())


def test_a_fault_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model, one = model_of("llama"), Told()
    engine = Engine(model, ROOM, POLICIES.get("mixed"))

    def broken(*_: object) -> None:
        raise RuntimeError("the disk is gone")

    monkeypatch.setattr(engine, "_step", broken)
    with engine:
        engine.submit(Ask((1,), 3, Sampling()), one)
        one.wait()
        assert one.end == End("error", "the disk is gone") and engine.stuck(1e9)
        with pytest.raises(OutsizeError, match="has failed: the disk is gone"):
            engine.logprobs([1, 2])


def test_room_is_what_the_memory_leaves(tmp_path: Path) -> None:
    model = model_of("llama")
    wide = served(model, Wanted(context=64, requests=4))
    assert wide.room.pages == 16 and wide.room.context == 64  # 4 requests, 4 pages of 16 each
    each = 3 * 2 * 2 * 8 * 4 * 16  # layers, keys and values, heads, size, bytes, tokens
    assert wide.cache == 16 * each
    weights = sum(x.nbytes for x in model.parameters())
    assert wide.weights == weights
    price = wide.room.price
    assert [n for n, _ in price.blocks.points] == [1, 4, 16, 64] and price.reach == 64
    assert 0 < price.token <= price.step(64, 8, 0) < price.step(64, 8, 10**9) or not price.visit
    wide = served(model, Wanted(context=64, requests=4, slo=Slo(1e-9, 1e-9)))
    assert any("tpot=1e-06ms cannot be kept" in line for line in wide.lines())
    with pytest.raises(OutsizeError, match="this model has 64 positions"):
        served(model, Wanted(context=65))
    ladder = Model(build(parse({**CONFIGS["llama"], "ladder_from": 1}), seed=3))
    low = served(model, Wanted(context=64, requests=4, below=(disk_tier(f"{tmp_path}:1MiB"),)))
    assert low.below is not None and low.room.below == 1 << 20 >> 13, "in whole pages of a disk"
    assert low.work == wide.work + 3 * 2 * 2 * 16 * 32 + OPERATION
    assert any("room for 2,048 tokens: one takes" in line for line in low.lines())
    low.below.close()
    with pytest.raises(OutsizeError, match="the cache is in the host's memory already"):
        served(model, Wanted(context=64, below=(host_tier("1MiB"),)))
    assert served(ladder, Wanted(context=16, requests=1)).room.price.step(1, 1, 0) > 0
    assert served(model_of("llama", torch.float64), Wanted()).notes[0].startswith("approximate")


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose blocks are most of it."""
    config = {**SMALL, "model_type": "llama", "num_hidden_layers": 8, "intermediate_size": 512}
    path = tmp_path_factory.mktemp("larger") / "hf"
    outsize.save(build(parse(config), seed=3), path)
    return path


@pytest.mark.parametrize("share", [0.4, 2.0])
def test_weights_that_stay_in_files(
    larger: Path, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a budget, to the byte, with the tokens of the whole model in memory."""
    prompts = [[n] * (5 * n) for n in range(1, 5)]
    whole = outsize.load(larger)
    weights = sum(x.nbytes for x in whole.parameters())
    memory = int(share * weights) + 300_000
    with outsize.engine(larger, memory=memory, context=64, requests=3) as engine:
        session, home = engine.plan.session, engine.engine.model.home
        assert session is not None and home is not None
        session.count(home.buffers)  # and goes on counting
        monkeypatch.setattr(session, "forget", lambda: None)
        monkeypatch.setattr(session, "seconds", defaultdict(Unkept))
        found = engine.generate(prompts, 9)
        plan = engine.plan
        assert 0 < session.peak <= plan.weights + plan.cache + plan.work <= memory
        assert any("stay in their files" in line for line in plan.lines()) == (share < 1)
    assert found == [whole.generate(prompt, 9) for prompt in prompts]
    with pytest.raises(OutsizeError, match="bytes missing"):
        outsize.engine(larger, memory=200_000, context=64, requests=3)


def test_weights_that_are_overwritten_while_they_are_served(larger: Path, tmp_path: Path) -> None:
    """No token is told of what is no model any more: all end with a line."""
    path, one = Path(shutil.copytree(larger, tmp_path / "hf")), Told()
    memory = int(0.4 * (path / "model.safetensors").stat().st_size) + 300_000
    with outsize.engine(path, memory=memory, context=64, requests=3) as engine:
        assert len(engine.generate([[1, 2]], 3)) == 1
        (file,) = path.glob("*.safetensors")
        file.write_bytes(bytes(file.stat().st_size))
        found = file.stat()
        os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns + 1))
        engine.engine.submit(Ask((1, 2), 3, Sampling()), one)
        one.wait()
        assert one.end is not None and one.end.reason == "error" and not one.tokens
        assert one.end.error.startswith(f"{file} has been written since it was opened")
        with pytest.raises(OutsizeError, match=r"has failed: .* has been written since"):
            engine.generate([[1, 2]], 3)


@COMPILED
@pytest.mark.parametrize("form", ["int4:16", "q4_k"])
def test_weights_as_codes(larger: Path, form: str) -> None:
    """Codes that are multiplied by as they lie, and those that are decoded first."""
    path = larger if form != "q4_k" else larger.parent / "wide"
    if not path.exists():
        config = {**SMALL, "model_type": "llama", "hidden_size": 256, "head_dim": 64}
        config |= {"intermediate_size": 256, "num_hidden_layers": 1}
        outsize.save(build(parse(config), seed=3), path)
    model, some = outsize.load(path, weights=form), asks()
    alone = [told(model, [ask], ROOM)[0] for ask in some]
    assert told(model, some, ROOMS["slices"]) == alone
    for ask, found in zip(some, alone, strict=True):
        plainly(model, ask, found, 1e-4)


def test_many_texts_at_once(tmp_path: Path) -> None:
    config = parse({**SMALL, "model_type": "llama", "vocab_size": 257})
    outsize.save(build(config, seed=3), tmp_path / "hf")
    model = outsize.load(tmp_path / "hf")
    prompts: list[str | list[int]] = ["one", "two", "three and more", [5, 6, 7]]
    with outsize.engine(tmp_path / "hf", requests=2) as e:
        found = e.generate(prompts, 8)
        assert found == [model.generate(prompt, 8) for prompt in prompts]
        assert "".join(e.stream("one", 8)) == found[0]
        drawn, stop = e.engine.line.counts.drawn, str(found[1])[0]
        assert e.generate(["two"], 40, stop=[stop]) == [""]
        assert e.engine.line.counts.drawn < drawn + 20  # nothing is drawn behind it
        with pytest.raises(OutsizeError, match="2 samplings for 1 prompts"):
            e.generate(["one"], 8, [outsize.Sampling(), Sampling()])
        with pytest.raises(OutsizeError, match="prompt is 5; expected a text, or token ids"):
            e.generate([5, 6], 8)  # type: ignore[list-item]
        with pytest.raises(OutsizeError, match="prompts is 'one'; expected a list"):
            e.generate("one", 8)
        wrong: Any
        for wrong, words in (
            ({"prompts": 5}, "prompts is 5; expected a list"),
            ({"stop": [5]}, r"stop strings are \[5\]; expected a list of strings"),
            ({"stop": None}, "stop strings are None"),
            ({"stop": ["a"], "prompts": ["a", [7]]}, "a prompt of token ids is answered by"),
            ({"sampling": None}, "sampling is None; expected an outsize.Sampling"),
        ):
            with pytest.raises(OutsizeError, match=words):
                e.generate(**{"prompts": ["one"], **wrong})
        with pytest.raises(OutsizeError, match="embed: prompts is 'one'; expected a list"):
            e.embed("one")
        broken: Any = ByteTokenizer()
        broken.stream = lambda: SimpleNamespace(push=[].index)
        e.text, text = broken, e.text
        with pytest.raises(OutsizeError, match=r"prompt 0: ValueError: .* is not in list"):
            e.generate(["one"], 8, stop=["!"])  # nobody else's fault
        e.text = text
        assert e.generate(prompts, 8) == found
    with pytest.raises(OutsizeError, match="is closed"), e:
        pass
    with pytest.raises(OutsizeError, match="requests is 0; expected 1 or more"):
        outsize.engine(tmp_path / "hf", requests=0)
    third = model.generate([256, *b"one"], 3)[2]
    ends = json.dumps({"eos_token_id": [256, third]})
    (tmp_path / "hf" / "generation_config.json").write_text(ends, encoding="utf-8")
    with outsize.engine(model, requests=2) as e:  # of several end tokens any ends
        (said,) = e.generate(["one"], 8)
        assert said == "".join(e.stream("one", 8)) == outsize.generate(model, "one", 8)
        assert said == ByteTokenizer().decode(model.generate([256, *b"one"], 2))  # type: ignore[arg-type]
        outsize.adapt(model, "lora", rank=2)
        with pytest.raises(OutsizeError, match=r"an adapter more or less.*; expected the same"):
            e.generate(["one"], 8)
    (tmp_path / "hf" / "generation_config.json").unlink()
    with outsize.engine(tmp_path / "hf", requests=2, policy="deadline:ttft=9000s,tpot=500s") as e:
        assert e.plan.room.slo == Slo(9000, 500)
        assert any(line.startswith("promised ttft=9e+03s,tpot=500s") for line in e.plan.lines())
        assert e.generate(prompts, 8) == found
    with pytest.raises(OutsizeError, match="policy deadline goes by what is promised"):
        outsize.engine(tmp_path / "hf", policy="deadline")
