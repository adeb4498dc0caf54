"""How many steps a trial makes, and which of their times stand for the run's."""

from __future__ import annotations

import pytest

from outsize.simulate.trial import LEAST, MOST, SECONDS, WARM, counted, lasts, later, middle


def test_short_steps_are_made_often_and_long_ones_three_times():
    assert [counted(each) for each in (100.0, SECONDS / 3, 0.3, 1e-3, 1e-9)] == [
        LEAST, LEAST, 5, MOST, MOST,
    ]  # fmt: skip
    assert lasts(2.0) == 2.0 * (WARM + 3)
    for each in (0.01, 0.4, 3.0):
        assert lasts(each) <= max((WARM + LEAST) * each, SECONDS + 2 * each) + 1e-9


def test_first_steps_tell_nothing_where_there_are_enough():
    assert [len(later(range(count))) for count in (1, 3, 4, 6, 8)] == [1, 3, 3, 4, 6]
    assert later([9.0, 8.0, 1.0, 2.0, 3.0, 1.0]) == [1.0, 2.0, 3.0, 1.0]


def test_the_middle_is_of_both_sorts_and_of_no_single_long_time():
    assert middle([4.0]) == 4.0 and middle([1.0, 2.0]) == 1.5
    assert middle([9.0, 1.0, 2.0]) == 2.0
    assert middle([1.0, 3.0, 2.0, 99.0]) == 2.5
    assert middle([1.0, 1.5] * 4) == pytest.approx(1.25)
    assert middle([1.0] * 7 + [50.0]) == 1.0
