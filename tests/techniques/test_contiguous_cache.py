"""A contiguous cache: the bits of the one in pages, and never more memory than is said."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import ROOM, Told, answered
from click.testing import CliRunner
from decoders import CONFIGS
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import outsize
from outsize.cli.main import main
from outsize.decode.caches import CACHES, parse
from outsize.decode.samplers import Sampling
from outsize.errors import OutsizeError
from outsize.kernels.pages import FORMS
from outsize.memory.reserved import Reserved
from outsize.memory.tiers import disk_tier
from outsize.models.attention import LocalAttend
from outsize.models.build import build
from outsize.models.decoder import typed
from outsize.models.families import parse as family
from outsize.serve.asks import Ask, End, Room, Token
from outsize.serve.drafts import DRAFTERS
from outsize.serve.engine import Engine
from outsize.serve.lying import page_of
from outsize.serve.model import Model
from outsize.serve.played import Arrival, play
from outsize.serve.policies import POLICIES
from outsize.serve.room import Wanted, served
from outsize.techniques.contiguous_cache import StretchedCache, Stretches

LIES, PAGE, TOKENS, SLOTS = "contiguous", 16, 200, 3
WIDE = replace(ROOM, pages=64, page=16, budget=200, context=TOKENS)


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Model:
    made = build(family({**CONFIGS[name], "num_hidden_layers": 2}), seed=3, dtype=dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return Model(made)


def asks() -> list[Ask]:
    """Prompts shorter and longer than a tile of attention, two of which begin alike."""
    draw = torch.Generator().manual_seed(0)
    text = torch.randint(61, (170,), generator=draw).tolist()
    return [
        Ask(tuple(text[first:stop]), new, Sampling(0.8 * (stop % 2), seed=stop), tops=2)
        for first, stop, new in ((0, 170, 4), (0, 150, 20), (3, 9, 14), (40, 131, 5))
    ]


def lying(model: Model, form: str = "as-stored", pages: int = 99, **said: Any) -> Room:
    """The same room, contiguous, of fewer pages if need be."""
    blocks, dtype = typed(model.blocks), model.prologue.tokens.weight.dtype
    left = [one for block in blocks for one in block.mixer.states(dtype)]
    page = page_of(LIES, left, FORMS[form])
    pages = max(-(-TOKENS // page), pages * 16 // page)
    return replace(WIDE, cache=form, lies=LIES, page=page, pages=pages, **said)


def told(model: Model, some: list[Ask], room: Room, policy: str, draft: str = "") -> list[object]:
    drafter = DRAFTERS.get(draft) if draft else None
    engine = Engine(model, room, POLICIES.get(policy), drafter=drafter)
    try:
        found: list[object] = list(answered(engine, some))
        books = engine.line.pages
        assert not isinstance(books, Stretches) or books.committed <= books.count
        return found
    finally:
        engine.close()


@pytest.mark.parametrize(
    "name", ["llama", "softcap", "latent", "llama in bfloat16", "llama as int8"]
)
def test_what_is_told_is_what_pages_tell_bit_for_bit(name: str) -> None:
    """In pages; contiguous in slices of less and of more than a tile, few at once, interrupted, in
    other policies, and with drafts that are looked at."""
    kind, how, _ = name.partition(" in ")
    kind, _, form = kind.partition(" as ")
    model, form = model_of(kind, torch.bfloat16 if how else torch.float32), form or "as-stored"
    some, pages = asks(), replace(WIDE, cache=form)
    right = told(model, some, pages, "mixed")
    for room, policy, draft in (
        (lying(model, form, budget=50, slots=SLOTS), "mixed", "lookup"),
        (lying(model, form, pages=0, budget=90), "feedback", ""),
    ):
        assert told(model, some, room, policy, draft) == right


def test_attention_of_training_reads_the_cache_where_it_lies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a slice of a prompt behind another one, of a model that is in no run of blocks: nothing is
    gathered, and no kernel of pages runs but for single tokens."""
    model, ask = model_of("softcap"), asks()[0]
    buffers, seen = list[Tensor](), list[int]()
    own, attend = StretchedCache._empty, LocalAttend.__call__

    def made(self: StretchedCache, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        buffers.append(own(self, shape, dtype))
        return buffers[-1]

    def attended(self: LocalAttend, q: Tensor, k: Tensor, v: Tensor, *more: Any) -> Tensor:
        ends = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in buffers]
        if any(first <= k.data_ptr() < last for first, last in ends):
            seen.append(len(q))
        return attend(self, q, k, v, *more)

    monkeypatch.setattr(StretchedCache, "_empty", made)
    monkeypatch.setattr(LocalAttend, "__call__", attended)
    told(model, [ask], lying(model, budget=66), "mixed")
    assert seen == [66, 66] and len(ask.ids) == 66 + 66 + 38


def test_tokens_in_float64_are_those_of_pages() -> None:
    """By PyTorch's kernels, which know neither."""
    model, some = model_of("llama", torch.float64), asks()[1:3]
    pages = told(model, some, WIDE, "mixed")
    for here, there in zip(told(model, some, lying(model), "mixed"), pages, strict=True):
        for one, other in zip(here, there, strict=True):  # type: ignore[call-overload]
            assert one.id == other.id and abs(one.logprob - other.logprob) < 1e-10


def test_who_is_cancelled_leaves_memory_to_the_next() -> None:
    """At once: the one that waited for it is told what it would be alone."""
    model = model_of("llama")
    first, second = asks()[1], asks()[0]
    room = lying(model, pages=0)
    (alone,) = told(model, [second], room, "mixed")
    with Engine(model, room, POLICIES.get("mixed")) as engine:
        heard = Told()

        def deliver(one: Token | End) -> None:
            heard(one)
            if len(heard.tokens) == 3:
                engine.cancel(0)

        engine.submit(first, deliver)
        waited = Told()
        engine.submit(second, waited)
        assert waited.wait() == alone
        assert heard.end == End("cancelled") and len(heard.tokens) < first.max_new_tokens
        assert engine.line.pages.left == room.pages
        again = second.ids + tuple(one.id for one in waited.tokens)
        scored = [one.logprob for one in engine.logprobs(again)][len(second.ids) - 1 :]
    assert scored == [one.logprob for one in waited.tokens]


DOINGS = st.tuples(st.integers(0, 5), st.integers(1, 70))


@settings(max_examples=150)
@given(st.lists(DOINGS, max_size=50), st.integers(4, 17))
def test_books_balance_and_never_commit_more_than_there_is(
    doings: list[tuple[int, int]], count: int
) -> None:
    books, size = Stretches(count, PAGE, SLOTS, 70), dict[int, int]()  # by owner, tokens
    memory, had = [0] * SLOTS, dict[int, int]()
    for owner, tokens in doings:
        if owner in size and tokens % 3 == 0:
            books.end(owner, again=tokens % 2 > 0)
            del size[owner]
            had.pop(owner, None)
        elif owner in size or len(size) < SLOTS:
            if owner not in size:
                assert books.begin(owner, (1,) * tokens) == 0 and not books.of(owner)
                size[owner] = 0
            if books.missing(owner, tokens) <= books.left:
                books.extend(owner, tokens)
                size[owner] = max(size[owner], -(-tokens // PAGE) * PAGE)
        changed, books.changed = books.changed, {}
        for place, pages in changed.items():
            memory[place] = pages
        assert sum(memory) == books.committed <= count
        assert books.left == count - sum(size.values()) // PAGE
        places = {owner: books.of(owner)[0] for owner in size if books.of(owner)}
        assert len(set(places.values())) == len(places)
        for owner, place in places.items():
            assert had.setdefault(owner, place) == place, "nobody is moved"
            assert memory[place] * PAGE >= size[owner] == books.room(owner)


def resident(one: Reserved) -> int:
    """Pages of the system that are memory."""
    count = one.bytes // mmap.PAGESIZE
    found = (ctypes.c_ubyte * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    place = ctypes.c_void_p(one.tensor.data_ptr())
    assert libc.mincore(place, ctypes.c_size_t(one.bytes), found) == 0
    return sum(flag & 1 for flag in found)


def test_memory_is_what_is_held_and_content_stays() -> None:
    """Of the system itself: committed as asked, given back at once, what goes before what comes."""
    page = CACHES.get(LIES).page((2 * 8 * 4, 2 * 8 * 4))
    cache = StretchedCache(page, 4, 3 * page, "as-stored")
    like = torch.zeros(0, 2, 8)
    cache.hold({0: 1})  # before the layer is there
    keys, values = cache.layer(0, like, like)
    each = page * 2 * 8 * 4 // mmap.PAGESIZE
    assert keys.data.shape == (4, 3 * page, 2, 8) and each > 0

    def held() -> list[int]:
        return [resident(one) for one in cache._reserved]

    assert held() == [each] * 2 and cache.bytes == 2 * each * mmap.PAGESIZE
    keys.data[0, :page], values.data[0, :page] = 5.0, 6.0
    seen, most = list[int](), 3 * each
    own = Reserved.commit

    def watched(self: Reserved, first: int, stop: int) -> None:
        own(self, first, stop)
        seen.append(resident(self))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reserved, "commit", watched)
        cache.hold({0: 3})
        cache.hold({2: 1, 3: 1, 0: 1})
    assert max(seen) == most and held() == [3 * each] * 2
    assert (keys.data[0, :page] == 5).all() and (values.data[0, :page] == 6).all()
    cache.hold({0: 0, 2: 0, 3: 0})
    assert held() == [0, 0] and cache.bytes == 0


def test_a_page_fills_pages_of_the_system_in_every_buffer() -> None:
    for rows in ((64, 64), (1152,), (4096, 2048), (24, 40), (7,)):
        page = CACHES.get(LIES).page(rows)
        assert page % 16 == 0 and all(page * row % mmap.PAGESIZE == 0 for row in rows)
    assert CACHES.get(LIES).page((512, 512)) == 16  # of 8 heads of 32 numbers in bfloat16


def test_it_is_played_as_it_is_served() -> None:
    """The simulator's books are the engine's: who waits for memory is interrupted there too."""
    room = Room(5, 64, 4, 96, 1000, 200, ROOM.price, lies=LIES)
    some = [Arrival(0.0, 60, 130), Arrival(0.0, 70, 120), Arrival(0.1, 50, 60)]
    played = play(room, POLICIES.get("mixed"), some)
    assert played.interrupted > 0 and all(fate.last > 0 for fate in played.fates)


def test_the_plan_says_it_and_what_it_cannot_do(tmp_path: Path) -> None:
    model = model_of("llama")
    plan = served(model, Wanted(context=64, requests=4, cache="int8+contiguous"))
    room, each = plan.room, 2 * 2 * 2 * 10  # layers, keys and values, heads, bytes of one
    assert (room.cache, room.lies) == ("int8", LIES) and room.page == 1024
    assert plan.cache == room.pages * room.page * each and room.pages == 4
    plan = served(model, Wanted(64, 4, cache=LIES, below=(disk_tier(f"{tmp_path}:1MiB"),)))
    assert plan.room.page == 64 and plan.below is None and not plan.room.below
    said = "\n".join(plan.lines())
    assert "for 256 tokens in pages of 64, contiguous" in said
    assert "prompts that begin alike share nothing" in said and "none that go below" in said
    assert f"{5 * 64 * 2 * 2 * 2 * 8 * 4 / 1024:.2f} KiB of reserved addresses" in said
    for said in ("contigous", "int5+contiguous", "int8+", "contiguous+int8", "int8+pages"):
        with pytest.raises(OutsizeError, match=f"cache is {said!r}".replace("+", r"\+")):
            Wanted(cache=said)
    assert parse("bf16") == ("bf16", "") and parse("bf16+contiguous") == ("bf16", LIES)


def test_it_is_switched_on_by_cache(tmp_path: Path) -> None:
    """From Python as on the command line, where several workers are refused by a line."""
    path = tmp_path / "hf"
    outsize.save(build(family({**CONFIGS["llama"], "num_hidden_layers": 1}), seed=3), path)
    texts = []
    for cache in ("as-stored", "contiguous"):
        with outsize.engine(path, context=60, requests=2, cache=cache) as engine:
            texts.append(engine.generate([(1, 2, 3), (4,), (1, 2, 3, 5)], max_tokens=9))
            assert isinstance(engine.engine.line.pages, Stretches) == (cache == LIES)
    assert texts[0] == texts[1]
    words = ["plan", str(path), "--serve", "--context", "60", "--cache", "contiguous"]
    shown = CliRunner().invoke(main, words)
    assert shown.exit_code == 0 and "reserved addresses" in shown.output, shown.output
    refused = CliRunner().invoke(main, [*words, "--mesh", "tensor=2"])
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: a contiguous cache is for one worker")


def test_addresses_that_cannot_be_had_are_said_with_the_plan() -> None:
    with pytest.raises(OutsizeError, match=r"cannot reserve .* bytes of addresses"):
        CACHES.get(LIES).notes(16, 1 << 20, 1 << 30, 4096)
