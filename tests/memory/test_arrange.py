"""The pool's layout: windows never share bytes, and traffic is that of the best layout there is."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from yardstick import bound

from outsize.errors import OutsizeError
from outsize.memory.arrange import Arrangement, Traffic, arrange, least, traffic
from outsize.memory.residency import Gap, fit, gaps, kept, shortest, windows

POLICIES = ("belady", "lru", "static")


def zigzag(blocks):
    """Forward and backward over equal blocks."""
    forward = [[f"parameters {i}"] for i in range(blocks)]
    return forward + forward[::-1]


def ones(visits):
    return {item: 1 for visit in visits for item in visit}


def step(blocks, parts, table=0):
    """Visits of a training step and the sizes of items: bf16 parameters (2 a block), float32
    gradients (4), master and moments in parts (12 in all); table: a tied embedding that many
    blocks large, needed first and last."""
    visits, sizes = [], {}
    scale = {str(i): 1 for i in range(blocks)} | ({"t": table} if table else {})
    for name, times in scale.items():
        sizes[f"parameters {name}"] = 2 * parts * times
        sizes[f"gradients {name}"] = 4 * parts * times
        sizes |= {f"optimizer {name}#{j}": 12 * times for j in range(parts)}
    first = ["t"] if table else []
    layers = [*first, *map(str, range(blocks)), *first]
    visits += [[f"parameters {name}"] for name in layers]
    visits += [[f"parameters {name}", f"gradients {name}"] for name in reversed(layers)]
    for name in scale:
        for j in range(parts):
            visits.append([f"{kind} {name}" for kind in ("parameters", "gradients")])
            visits[-1].append(f"optimizer {name}#{j}")
    return visits, sizes


def demand(visits, sizes):
    return sum(sizes[item] for visit in visits for item in visit)


def played(visits, sizes, offsets, made=(), cycles=3):
    """The last cycle's fetches of a cache that holds single bytes, one by one."""
    memory, fetched = {}, 0
    for cycle in range(cycles):
        fresh = set(made)
        for visit in visits:
            for item in visit:
                place = range(offsets[item], offsets[item] + sizes[item])
                if any(memory.get(byte) != item for byte in place):
                    fetched += sizes[item] * (cycle == cycles - 1 and item not in fresh)
                    memory |= dict.fromkeys(place, item)
                fresh.discard(item)
    return fetched


def together(visits, ahead, returned):
    """The items that must be present at once, straight from the definition."""
    for v in range(len(visits)):
        first = v - v % returned
        yield {i for w in range(first, first + ahead + 1) for i in visits[w % len(visits)]}


def disjoint(items, sizes, offsets):
    ordered = sorted((offsets[i], offsets[i] + sizes[i]) for i in items if sizes[i])
    return all(a[1] <= b[0] for a, b in pairwise(ordered))


def cheapest(visits, sizes, capacity, ahead, returned, made):
    """Least traffic over every possible layout, None where there is none."""
    items = sorted(ones(visits))
    sets = list(together(visits, ahead, returned))
    costs = []
    for starts in product(*(range(capacity - sizes[i] + 1) for i in items)):
        offsets = dict(zip(items, starts, strict=True))
        if all(disjoint(held, sizes, offsets) for held in sets):
            costs.append(traffic(visits, sizes, offsets, made).fetched)
    return min(costs, default=None)


@st.composite
def problems(draw, items=8, visits=14, largest=9000):
    """visits, sizes, ahead, returned, items made anew in each cycle."""
    names = [f"x{i}" for i in range(draw(st.integers(2, items)))]
    sizes = {name: draw(st.integers(1, largest)) for name in names}
    visit = st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)
    made = draw(st.lists(visit, min_size=2, max_size=visits))
    ahead = draw(st.integers(0, 2))
    anew = frozenset(draw(st.lists(st.sampled_from(names), max_size=2)))
    return made, sizes, ahead, draw(st.integers(1, ahead + 1)), anew


@settings(max_examples=40, deadline=None)
@given(problems(), st.floats(0, 1), st.sampled_from((1, 64, 4096)), st.sampled_from(POLICIES))
def test_layouts_keep_what_they_promise(problem, share, align, policy):
    visits, sizes, ahead, returned, made = problem
    low = least(visits, sizes, ahead, returned, align)
    used = ones(visits)
    capacity = low + int(share * sum(sizes[i] for i in used))
    found = arrange(visits, sizes, capacity, ahead, returned, policy, align, made)
    assert set(found.offsets) == set(used)
    assert all(offset >= 0 and offset % align == 0 for offset in found.offsets.values())
    assert max(found.offsets[i] + sizes[i] for i in used) <= found.extent <= capacity
    for held in together(visits, ahead, returned):
        assert disjoint(held, sizes, found.offsets)
    got = traffic(visits, sizes, found.offsets, made)
    assert got.fetched == played(visits, sizes, found.offsets, made)
    compulsory = max(0, sum(sizes[i] for i in used) - capacity - sum(sizes[i] for i in made))
    assert compulsory <= got.fetched <= demand(visits, sizes)
    assert got.fetches <= sum(map(len, visits))


@settings(max_examples=30, deadline=None)
@given(problems(largest=5), st.floats(0, 1))
def test_belady_is_no_worse_than_lru_nor_lru_than_no_cache(problem, share):
    visits, sizes, ahead, returned, made = problem
    low = least(visits, sizes, ahead, returned, 1)
    capacity = low + int(share * (sum(sizes[i] for i in ones(visits)) - low))
    by = {}
    for policy in POLICIES:
        found = arrange(visits, sizes, capacity, ahead, returned, policy, 1, made)
        by[policy] = traffic(visits, sizes, found.offsets, made).fetched
    assert by["belady"] <= by["lru"] <= by["static"], by


@settings(max_examples=40, deadline=None, derandomize=True)
@given(problems(items=4, visits=8, largest=3), st.floats(0, 1))
def test_no_layout_at_all_is_better_in_small_cases(problem, share):
    visits, sizes, ahead, returned, made = problem
    low = least(visits, sizes, ahead, returned, 1)
    capacity = low + int(share * max(0, sum(sizes[i] for i in ones(visits)) - low))
    found = arrange(visits, sizes, capacity, ahead, returned, align=1, made=made)
    got = traffic(visits, sizes, found.offsets, made).fetched
    assert got == cheapest(visits, sizes, capacity, ahead, returned, made)


@settings(max_examples=60, deadline=None)
@given(problems(largest=5), st.floats(0, 1))
def test_what_is_kept_fits_beside_the_needs(problem, share):
    visits, sizes, ahead, returned, made = problem
    cycle = windows(visits, ahead, returned)
    assert cycle == [frozenset(s) for s in list(together(visits, ahead, returned))[::returned]]
    fullest = max(sum(sizes[i] for i in window) for window in cycle)
    capacity = fullest + int(share * sum(sizes.values()))
    for taken in (
        kept(cycle, sizes, capacity, "belady", made),
        kept(cycle, sizes, capacity, "lru", made),
        shortest(cycle, sizes, capacity, made),
    ):
        held = [sum(sizes[i] for i in window) for window in cycle]
        for gap in taken:
            assert gap.stop < len(cycle) or gap.item not in made
            for w in range(gap.start + 1, gap.stop):
                assert gap.item not in cycle[w % len(cycle)]
                held[w % len(cycle)] += sizes[gap.item]
        assert max(held) <= capacity


@pytest.mark.parametrize(("blocks", "rooms", "ahead"), [(6, 3, 1), (13, 5, 2), (32, 8, 1)])
def test_forward_and_backward_reach_the_optimum(blocks, rooms, ahead):
    # A room that m blocks share is fetched into 2m - 2 times a step: the first and the last of
    # them turn round in it. Over all rooms 2 (blocks - rooms), however they are shared.
    visits = zigzag(blocks)
    got = traffic(
        visits, ones(visits), arrange(visits, ones(visits), rooms, ahead, align=1).offsets
    )
    assert got == Traffic(2 * (blocks - rooms), 2 * (blocks - rooms))
    assert bound(visits, ones(visits), rooms) == 2 * (blocks - rooms)


@pytest.mark.parametrize(("blocks", "rooms", "ahead"), [(12, 4, 1), (12, 5, 2), (32, 8, 1)])
def test_forward_alone_pins_what_the_window_leaves(blocks, rooms, ahead):
    visits = zigzag(blocks)[:blocks]
    sizes = ones(visits)
    got = {
        policy: traffic(
            visits, sizes, arrange(visits, sizes, rooms, ahead, policy=policy, align=1).offsets
        ).fetched
        for policy in POLICIES
    }
    assert got == {"belady": blocks - (rooms - ahead - 1), "lru": blocks, "static": blocks}
    assert bound(visits, sizes, rooms, "lru") == blocks


def test_pins_lie_between_fetches():
    # Every other block pinned: one room is enough for the rest, though one is fetched ahead.
    visits = zigzag(12)[:12]
    found = arrange(visits, ones(visits), 7, 1, align=1)
    assert traffic(visits, ones(visits), found.offsets).fetched == 6


@pytest.mark.parametrize(("table", "share"), [(0, 0.15), (3, 0.3), (0, 0.6)])
def test_training_steps_come_near_to_free_placement(table, share):
    visits, sizes = step(14, 6, table)
    low = least(visits, sizes, align=1)
    capacity = max(low, int(share * sum(sizes.values())))
    got = {
        policy: traffic(
            visits, sizes, arrange(visits, sizes, capacity, policy=policy, align=1).offsets
        ).fetched
        for policy in POLICIES
    }
    assert got["belady"] <= 1.05 * bound(visits, sizes, capacity)
    assert got["belady"] < 0.95 * got["lru"] < got["static"]


def test_a_tied_embedding_stays_over_both_ends():
    # Needed at the first and the last visit, and nothing else is: one fetch saved of two.
    visits = [["table"], *zigzag(8)[:8], ["table"]]
    sizes = ones(visits) | {"table": 5}
    for capacity, fetched in ((6, 5 + 8), (7, 8), (8, 7)):
        # 6: kept from the end to the beginning; 7: pinned, two rooms for blocks; 8: a block too.
        found = arrange(visits, sizes, capacity, align=1)
        assert traffic(visits, sizes, found.offsets).fetched == fetched


def test_gradients_made_anew_are_not_kept_over_the_end():
    visits, sizes = step(8, 3)
    made = [item for item in sizes if item.startswith("gradients")]
    capacity = sum(sizes.values()) // 3
    known = arrange(visits, sizes, capacity, align=1, made=made)
    blind = arrange(visits, sizes, capacity, align=1)
    got, other = (traffic(visits, sizes, a.offsets, made).fetched for a in (known, blind))
    assert got < other
    assert got <= 1.05 * bound(visits, sizes, capacity, made=made)
    assert bound([["a"], ["b"]], {"a": 1, "b": 1}, 1, made=["b"]) == 1
    # What is used up lies in nobody's way: only b, for which a must not go.
    around, alike = [["a"], ["g"], ["b"], ["a"]], {"a": 1, "g": 1, "b": 1}
    assert bound(around, alike, 2, "lru") == 3
    assert bound(around, alike, 2, "lru", made=["g"]) == 1
    backward = visits[8:16]
    assert traffic(backward, sizes, known.offsets, sizes).fetched == 0, "all made anew"


def test_everything_fits_then_nothing_moves():
    visits, sizes = step(3, 2)
    for policy in ("belady", "lru"):
        found = arrange(visits, sizes, sum(sizes.values()), policy=policy, align=1)
        assert traffic(visits, sizes, found.offsets) == Traffic(0, 0)
        assert found.extent == sum(sizes.values())


@pytest.mark.parametrize("window", [2, 3, 4])
@pytest.mark.parametrize("blocks", [5, 7, 8, 11, 23, 30])
def test_the_least_round_a_cycle_is_its_colouring(blocks, window):
    # Blocks less than `window` apart differ in room: the power of a cycle, whose chromatic number
    # is ceil(blocks / floor(blocks / window)).
    visits = zigzag(blocks)[:blocks]
    rooms = -(-blocks // (blocks // window)) if blocks >= window else blocks
    assert least(visits, ones(visits), window - 1, align=1) == rooms


def test_small_parts_share_few_rooms():
    visits = [[f"optimizer 0#{j}"] for j in range(64)]
    sizes = dict.fromkeys((i for v in visits for i in v), 100)
    assert least(visits, sizes, 1, align=1) == 200
    assert least(visits, sizes, 1, align=64) == 256
    assert arrange(visits, sizes, 256, policy="static", align=64).extent == 256
    assert arrange(visits, dict.fromkeys(sizes, 40), 140, align=64).extent == 128


def test_thousands_of_visits_are_arranged():
    """benchmarks/planning.py says how long it takes."""
    visits, sizes = step(64, 12, table=3)
    capacity = sum(sizes.values()) // 4
    found = arrange(visits, sizes, capacity, align=1)
    assert traffic(visits, sizes, found.offsets).fetched <= 1.02 * bound(visits, sizes, capacity)


def test_refusals_name_the_missing_bytes():
    visits, sizes = step(4, 2)
    low = least(visits, sizes, align=1)
    assert arrange(visits, sizes, low, align=1).extent <= low
    with pytest.raises(OutsizeError, match=rf"is 1 byte short of {low:,} bytes"):
        arrange(visits, sizes, low - 1, align=1)
    for options, said in (
        ({"ahead": -1}, "ahead is -1"),
        ({"ahead": 1, "returned": 3}, "returned is 3; expected 1 to 2"),
        ({"policy": "fifo"}, "policy is 'fifo'"),
    ):
        with pytest.raises(OutsizeError, match=said):
            arrange(visits, sizes, low, align=1, **options)


def test_a_gap_over_the_end_counts_at_both_ends():
    # x from window 3 over the end to 1; y at 0 and 2 would need a second byte at 1.
    cycle = [{"y"}, {"x"}, {"y"}, {"x"}]
    for order in (gaps(cycle), gaps(cycle)[::-1]):
        assert len(fit(order, cycle, {"x": 1, "y": 1}, 1)) == 0
        assert len(fit(order, cycle, {"x": 1, "y": 1}, 2)) == 4
    cycle = [{"y"}, {"z"}, {"x"}, {"y"}, {"x"}]
    over, inside = Gap("x", 4, 7), Gap("y", 0, 3)
    assert {over, inside} < set(gaps(cycle))
    for order in ([over, inside], [inside, over]):
        assert fit(order, cycle, dict.fromkeys("xyz", 1), 2) == order[:1], "both lie over 1"


def test_nothing_to_place():
    assert arrange([], {}, 0) == Arrangement({}, 0)
    assert least([], {}) == 0
    assert traffic([], {}, {}) == Traffic(0, 0)
    assert bound([], {}, 0) == 0


def test_an_item_of_which_nothing_is_said_is_named():
    """...instead of a KeyError out of the arranger."""
    for work in (
        lambda: arrange([{"a"}, {"b"}], {"a": 5}, 1 << 20),
        lambda: least([{"a"}, {"b"}], {"a": 5}),
        lambda: traffic([{"a"}, {"b"}], {"a": 5, "b": 5}, {"a": 0}),
    ):
        with pytest.raises(OutsizeError, match=r"pool: b is visited and has no (size|offset)"):
            work()
