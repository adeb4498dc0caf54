"""Who keeps the others waiting, from what is seen of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from outsize.launch.activity import Activity
from outsize.launch.board import Place, Spot
from outsize.launch.watchdog import Sample, Verdict, Watchdog

QUIET = Activity("S", 1.0, 1000)
WAITS = Sample(QUIET, Place("step 3", (Spot("FORWARD 1 0", "all_reduce", 0.0),)), 0.0)
WORKS = Sample(QUIET, Place("step 3", (Spot("FORWARD 0 0", "", 0.0),)))


def judged(samples: Callable[[float], list[Sample]], seconds: float, every: float = 0.25):
    """The first verdict and when it came, None where there is none."""
    watchdog, now = Watchdog(), 0.0
    while now < seconds:
        verdict = watchdog.look(now, samples(now))
        if verdict is not None:
            return verdict, now
        now += every
    return None


def waits(now: float) -> Sample:
    return replace(WAITS, waited=now)


def test_who_does_nothing_while_others_wait_hangs() -> None:
    verdict, when = judged(lambda now: [waits(now), WORKS, waits(now)], 20)
    assert verdict.culprits == (1,) and 5.0 <= when <= 5.5
    assert verdict.what.startswith("rank 1 (in step 3, FORWARD 0 0) hangs: nothing done for 5.0 s")
    assert verdict.what.endswith("waiting: ranks 0, 2 in all_reduce of FORWARD 1 0")


def test_nobody_hangs_while_nobody_waits() -> None:
    assert judged(lambda now: [WORKS, WORKS], 60) is None


def test_work_is_processor_time_or_bytes_or_a_turn_that_does_not_come() -> None:
    def doing(activity: Callable[[float], Activity]):
        return judged(lambda now: [waits(now), replace(WORKS, activity=activity(now))], 30)

    assert doing(lambda now: Activity("S", 0.05 * now, 0)) is None
    assert doing(lambda now: Activity("S", 1.0, int(1e6 * now))) is None
    assert doing(lambda now: Activity("R", 1.0, 0)) is None  # on a busy machine
    assert doing(lambda now: Activity("D", 1.0, 0)) is None  # a slow disk
    assert doing(lambda now: Activity("S", 0.005 * now, int(1e4 * now))) is not None


def test_a_stopped_worker_is_named_whoever_waits() -> None:
    verdict, when = judged(lambda now: [WORKS, replace(WORKS, activity=Activity("T", 1, 1))], 20)
    assert verdict.culprits == (1,) and 3.0 <= when <= 3.5 and "is stopped" in verdict.what


def test_a_worker_that_is_not_heard_of_is_named() -> None:
    verdict, when = judged(lambda now: [waits(now), replace(WORKS, heard=now)], 20)
    assert verdict.culprits == (1,) and 6.0 <= when <= 6.5
    assert "has not been heard of for 6.0 s" in verdict.what


def test_all_that_wait_for_one_another_end_late() -> None:
    verdict, when = judged(lambda now: [waits(now), waits(now)], 60)
    assert verdict == Verdict(
        (), "all workers wait for one another; waiting: ranks 0, 1 in all_reduce of FORWARD 1 0"
    )
    assert 30.0 <= when <= 31.0


def test_a_watcher_that_was_held_up_itself_begins_anew() -> None:
    assert judged(lambda now: [waits(now), WORKS], 60, every=3.0) is None
