"""The books of pages: nobody's page is given twice, what is kept is what was written."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.serve.pages import Pages
from outsize.serve.price import Curve, Price

SIZE = 4


def test_a_prompt_that_begins_alike_finds_what_is_kept() -> None:
    pages, prompt = Pages(8, SIZE), list(range(14))
    assert pages.begin(0, prompt) == 0
    pages.extend(0, 14)
    pages.written(0, prompt, 14)
    mine = pages.of(0)
    assert pages.begin(1, [*prompt, 99]) == 12  # three whole pages of four
    assert pages.of(1) == mine[:3] and pages.left == 4
    assert pages.begin(2, prompt[:12]) == 8  # a token at least is fed
    assert pages.begin(3, [*prompt[:4], 77, *prompt[5:]]) == 4  # all before must be alike
    for owner in range(4):
        pages.end(owner)
    assert pages.left == 8
    assert pages.begin(4, prompt) == 12
    pages.end(4)
    pages.begin(5, [50])
    pages.extend(5, 8 * SIZE)  # all room: what was kept is given up
    pages.end(5)
    assert pages.begin(6, prompt) == 0


def test_nothing_is_shared_where_it_must_not_be() -> None:
    pages = Pages(8, SIZE, sharing=False)
    pages.begin(0, range(9))
    pages.extend(0, 9)
    pages.written(0, range(9), 9)
    assert pages.begin(1, range(9)) == 0


COMPUTED = Price(Curve(((1, 1.0), (2, 2.0))), fetch=0.5)  # a page is sooner back than computed


def _served(pages: Pages, owner: int, ids: list[int], again: bool) -> None:
    pages.begin(owner, ids)
    pages.restore(owner, ids)
    pages.extend(owner, len(ids))
    pages.written(owner, ids, len(ids))
    pages.end(owner, again)


def test_what_is_pushed_out_and_wanted_again_comes_back() -> None:
    """Of who was interrupted, or what two have asked for; where that is quicker; while it can."""
    pages, text = Pages(4, SIZE, below=2, price=COMPUTED), list(range(13))
    _served(pages, 0, text, False)
    _served(pages, 1, [50] * 16, False)
    assert not pages.moved(), "nobody asks for it again, as far as one can see"
    _served(pages, 2, text, True)
    assert not pages.moved()
    _served(pages, 3, [60] * 16, False)
    out = pages.moved()
    assert [move.out for move in out] == [True] * 3 and pages.below == 2, "the last ones first"
    pages.begin(4, text)
    assert pages.restore(4, text) == 2 * SIZE
    back = pages.moved()
    assert [one.slot for one in back if not one.out] == [out[2].slot, out[1].slot]
    pages.lost([back[0].page])
    pages.end(4)
    assert pages.begin(5, text) == 0 and not pages.below and pages.left == 4
    pages = Pages(4, SIZE, below=3, price=COMPUTED)
    _served(pages, 0, text, True)
    _served(pages, 0, [60] * 16, False)
    assert len(pages.moved()) == 3
    pages.begin(1, text)  # computed again, though it lies below
    pages.extend(1, 13)
    pages.written(1, text, 13)
    pages.end(1, again=True)
    _served(pages, 2, [70] * 16, False)
    assert not pages.moved() and pages.below == 3, "it lies there still"
    pages.begin(3, text)
    assert pages.restore(3, text) == 3 * SIZE
    dear = Pages(4, SIZE, below=2, price=replace(COMPUTED, fetch=4.0))
    for ids in (text, [60] * 16):
        _served(dear, 0, ids, True)
    assert not dear.moved() and not dear.below


MOVES = st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 19))


@settings(max_examples=200)
@given(st.lists(MOVES, max_size=60), st.booleans(), st.sampled_from((0, 1, 3, 40)))
def test_books_balance(moves: list[tuple[int, int, int]], alike: bool, below: int) -> None:
    """Whatever is asked: pages that are found, or come back, hold the prompt's own tokens, and
    every page is somebody's or nobody's."""
    pages, texts = Pages(9, SIZE, below=below, price=COMPUTED), dict[int, list[int]]()
    content = dict[int, list[int]]()  # by page, the tokens that are written there
    lies = dict[int, list[int]]()  # by slot
    for kind, owner, count in moves:
        if owner not in texts:
            text = [t if alike else 100 * owner + t for t in range(count)]
            kept = pages.begin(owner, text)
            if pages.missing(owner, len(text)) > pages.left:
                pages.end(owner)
                continue
            texts[owner], kept = text, pages.restore(owner, text)
            for page, slot, out in pages.moved():
                if out:
                    lies[slot] = content[page]
                else:
                    content[page] = lies[slot]
            whole = pages.of(owner)[: kept // SIZE]
            assert [t for page in whole for t in content[page]] == text[:kept]
            assert kept < len(text) and pages.below <= below
        elif kind == 0:
            pages.end(owner, again=count % 2 > 0)
            del texts[owner]
        elif pages.missing(owner, len(texts[owner])) <= pages.left:
            text = texts[owner]
            pages.extend(owner, len(text))
            lies |= {slot: content[page] for page, slot, out in pages.moved() if out}
            for index, page in enumerate(pages.of(owner)):
                content[page] = text[index * SIZE : (index + 1) * SIZE]
            pages.written(owner, text, len(text))
        used = {page for one in texts for page in pages.of(one)}
        assert len(used) + pages.left == pages.count
