"""The books of pages: nobody's page is given twice, what is kept is what was written."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.serve.pages import Pages

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


MOVES = st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 19))


@settings(max_examples=100)
@given(st.lists(MOVES, max_size=40), st.booleans())
def test_books_balance(moves: list[tuple[int, int, int]], alike: bool) -> None:
    """Whatever is asked: pages that are found hold the prompt's own tokens, and every page is
    somebody's or nobody's."""
    pages, texts = Pages(9, SIZE), dict[int, list[int]]()
    content = dict[int, list[int]]()  # by page, the tokens that are written there
    for kind, owner, count in moves:
        if owner not in texts:
            texts[owner] = text = [t if alike else 100 * owner + t for t in range(count)]
            kept = pages.begin(owner, text)
            assert [t for page in pages.of(owner) for t in content[page]] == text[:kept]
            assert kept < len(text)
        elif kind == 0:
            pages.end(owner)
            del texts[owner]
        elif pages.missing(owner, len(texts[owner])) <= pages.left:
            text = texts[owner]
            pages.extend(owner, len(text))
            for index, page in enumerate(pages.of(owner)):
                content[page] = text[index * SIZE : (index + 1) * SIZE]
            pages.written(owner, text, len(text))
        used = {page for one in texts for page in pages.of(one)}
        assert len(used) + pages.left == pages.count
