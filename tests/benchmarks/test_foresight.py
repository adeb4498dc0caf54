"""benchmarks/foresight.py saves what is done, goes on from it, stops in time, and judges."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import foresight
from foresight import (
    AGAIN,
    PLANNED,
    QUESTIONS,
    Found,
    Refused,
    again,
    choices,
    made,
    missed,
    read,
    runs,
)

GOOD = Found("q", "a", 1.05, 0.9, 1.0, (104, 100), 0.0)


def test_thirty_varied_runs_and_a_choice_for_each_question() -> None:
    todo = list(runs(QUESTIONS))
    fixed = [name for _, name, _ in todo if name != PLANNED]
    assert (len(fixed), len(todo)) == (30, 30 + len(QUESTIONS))
    assert {question.workers for question in QUESTIONS} == {1, 2, 4, 8}
    assert len({(q.name, name) for q, name, _ in todo}) == len(todo)


def test_what_is_done_is_saved_and_a_later_call_goes_on(tmp_path: Path) -> None:
    """Three runs fit the time, the second fails; the next call makes what is left."""
    todo, path, asked = list(runs(QUESTIONS))[:5], tmp_path / "found.json", []
    now = 0.0

    def run(question, name, sets, seconds) -> Found:
        nonlocal now
        asked.append(name)
        now += 60.0
        if len(asked) == 2:
            raise Refused("no memory")
        return replace(GOOD, question=question.name, name=name)

    found, failed = made(todo, run, path, 3.5, lambda: now)
    names = [name for _, name, _ in todo]
    assert asked == names[:3] and list(failed) == [f"{todo[1][0].name}, {names[1]}"]
    assert read(path) == found and [one.name for one in found] == [names[0], names[2]]
    found, failed = made(todo, run, path, 10.0, lambda: now)
    assert asked == [*names[:3], names[1], *names[3:]] and not failed
    assert sorted(one.name for one in read(path)) == sorted(names)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""), ({"bytes": (99, 100)}, "memory is off by -1.00%"),
        ({"bytes": (106, 100)}, "memory is off by +6.00%"),
        ({"foretold": 0.7}, "at the median, 30.0% at worst"),
    ],
)  # fmt: skip
def test_targets(change: dict[str, object], said: str) -> None:
    found = missed([replace(GOOD, **change)])  # type: ignore[arg-type]
    assert (said in found[0]) if said else not found


def test_a_choice_is_judged_by_the_best_that_was_measured() -> None:
    found = [GOOD, replace(GOOD, name="b", measured=2.0, foretold=2.0),
             replace(GOOD, name=PLANNED, measured=1.1, foretold=1.1),
             replace(GOOD, question="other", name="c")]  # fmt: skip
    assert choices(found) == {"q": pytest.approx(0.1)}
    assert missed(found) == ["q: the choice is 10.0% slower than the best"]
    assert "| q: b" in foresight.shown(found)


def test_the_best_and_the_choice_are_run_again_one_behind_the_other() -> None:
    """A machine that has become slower meanwhile makes no choice worse."""
    question = QUESTIONS[0]
    first, second, *_ = question.alternatives
    found = [replace(GOOD, question=question.name, name=name, measured=spent)
             for name, spent in ((first, 1.2), (second, 1.0), (PLANNED, 1.3))]  # fmt: skip
    assert choices(found) == {question.name: pytest.approx(0.3)}
    todo = [name for _, name, _ in again(QUESTIONS, found)]
    assert todo == [second + AGAIN, PLANNED + AGAIN]
    found += [replace(found[1], name=todo[0], measured=1.3), replace(found[2], name=todo[1])]
    assert choices(found) == {question.name: pytest.approx(0.0)}
