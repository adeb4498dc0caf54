"""Activations of pipelines on the host: every plan of it is proved, faults are refused, and memory
and time are those of a simulation by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from away import bare, spills

from outsize.errors import OutsizeError
from outsize.schedule.action import Action, Kind, State
from outsize.schedule.pipelines import Pipeline, Shape, interleaved, make, one_f_one_b
from outsize.schedule.pipelines.offloaded import MOVED, offloaded
from outsize.schedule.pipelines.uniform import uniform
from outsize.schedule.proof import prove
from outsize.search.pipeline_offload import lives_of, spilled
from outsize.simulate.coarse import MIB, Moving, Times, play

TIMES = Times(1, 1, 1)
NAMES = (
    "gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-v", "v-half", "v-min", "hanayo",
    "chimera", "bitpipe", "dualpipe", "dualpipe-v",
)  # fmt: skip


def pipelines():
    for name in NAMES:
        yield name, make(name, Shape(4, 8))
    yield "uniform", uniform(4, 8)


EVERY = dict(pipelines())


def replayed(made: Pipeline, parts, moving: Moving) -> tuple[float, list[float]]:
    """Makespan and peaks of a pipeline with moves, by a clock that goes in small steps: an
    independent simulation. Times must be multiples of the step."""
    step, share = 1 / 32, made.placement.share
    count = len(made.schedule.workers)
    seconds = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: 1}
    done: set[tuple[Kind, State, int, int]] = set()
    lanes = {(w, lane): [] for w in range(count) for lane in ("compute", "evict", "fetch")}
    for w, actions in enumerate(made.schedule.workers):
        before = None
        for a in actions:
            if a.kind in (*seconds, *MOVED):
                lane = a.lane.value if a.kind in MOVED else "compute"
                lanes[w, lane].append((a, before if a.kind is Kind.FETCH else None))
                before = a if lane == "compute" else before
    last = made.placement.stages - 1

    def ready(a: Action, before: Action | None) -> bool:
        s, m = a.stage, a.microbatch
        been = {(kind, s_, m_) for kind, _, s_, m_ in done}
        back = {(s_, m_) for kind, s_, m_ in been if kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)}
        if a.kind is Kind.EVICT:
            return (Kind.FORWARD, s, m) in been
        if a.kind is Kind.FETCH:
            at = before is None or (before.kind, before.stage, before.microbatch) in been
            return (Kind.EVICT, s, m) in been and at
        if a.kind is Kind.FORWARD:
            return s == 0 or (Kind.FORWARD, s - 1, m) in been
        if a.kind is Kind.BACKWARD_WEIGHT:
            return True
        there = (Kind.EVICT, s, m) not in asked or (Kind.FETCH, s, m) in been
        return there and (s == last or (s + 1, m) in back) and (Kind.FORWARD, s, m) in been

    asked = {(a.kind, a.stage, a.microbatch) for acts in made.schedule.workers for a in acts}
    live, peaks, now, ends = [0.0] * count, [0.0] * count, 0.0, {}
    at = dict.fromkeys(lanes, 0)
    while any(at[key] < len(queue) for key, queue in lanes.items()):
        for w, lane in [key for key, end in ends.items() if end <= now + 1e-9]:
            a, _ = lanes[w, lane][at[w, lane]]
            done.add((a.kind, a.state, a.stage, a.microbatch))
            part = parts.get((w, a.stage), 0.0) * share
            if a.kind is Kind.EVICT:
                live[w] -= part
            elif a.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                live[w] -= share
            at[w, lane] += 1
            del ends[w, lane]
        for (w, lane), queue in lanes.items():
            if (w, lane) in ends or at[w, lane] == len(queue) or not ready(*queue[at[w, lane]]):
                continue
            a, _ = queue[at[w, lane]]
            part = parts.get((w, a.stage), 0.0) * share
            took = {Kind.EVICT: moving.out * part, Kind.FETCH: moving.back * part}
            ends[w, lane] = now + took.get(a.kind, seconds.get(a.kind, 0) * share)
            live[w] += share if a.kind is Kind.FORWARD else part if a.kind is Kind.FETCH else 0.0
            peaks[w] = max(peaks[w], live[w])
        now += step
    return now - step, peaks


@pytest.mark.parametrize(
    ("name", "part"),
    [("1f1b", 1.0), ("interleaved", 0.5), ("uniform", 0.5), ("v-half", 1.0), ("gpipe", 0.5)],
)
def test_memory_and_time_are_those_of_a_clock(name, part):
    moving = Moving(0.5, 0.25)
    found = spilled(EVERY[name], TIMES, moving, part)
    makespan, peaks = replayed(found.made.pipeline, found.made.parts, moving)
    assert found.played.run.makespan == pytest.approx(makespan)
    assert list(found.played.run.peaks) == pytest.approx(peaks)


@pytest.mark.parametrize(
    ("name", "speed"),
    [
        *((name, (0.25, 1.0, 2.0)[i % 3]) for i, name in enumerate(EVERY)),
        *(("interleaved", speed) for speed in (0.25, 1.0)), ("uniform", 2.0),
    ],
)  # fmt: skip
def test_every_pipeline_with_moves_is_proved_and_as_quick_as_without(name, speed):
    made = EVERY[name]
    found = spilled(made, TIMES, Moving(speed, speed, 1.5))
    proof = prove(found.made.pipeline.schedule, paths=made.paths)
    assert proof == prove(made.schedule, paths=made.paths)  # bytes are not annotated here
    assert found.slower <= 1.01
    assert bare(found.made.pipeline) == made
    highest = max(found.kept.run.peaks)
    assert max(found.played.run.peaks) <= highest
    drawn = found.played.trace().peak() / MIB
    assert drawn == pytest.approx(max(found.played.run.peaks), abs=1e-5)
    moved = {(a.stage, a.microbatch) for w in found.made.pipeline.schedule.workers for a in w
             if a.kind is Kind.EVICT}  # fmt: skip
    assert bool(moved) == any(part > 0 for part in found.moved)


def test_with_time_for_all_of_it_the_peak_is_the_same_on_any_number_of_workers():
    """So that bytes of a worker fall with their number: a microbatch of its layers has fewer."""
    peaks = []
    for workers in (4, 10):
        made = uniform(workers, 3 * workers)
        found = spilled(made, TIMES, Moving(0.75, 0.75))
        assert min(found.moved) >= 0.5 and found.slower == pytest.approx(1)
        peaks.append(max(found.played.run.peaks))
        assert max(found.kept.run.peaks) >= 0.75 * workers
    assert max(peaks) <= 2


def test_half_of_the_activations_is_more_than_half_of_the_peak():
    found = spilled(uniform(10, 30), TIMES, Moving(0.75, 0.75), part=0.5)
    assert found.moved == pytest.approx([0.5] * 10)
    assert max(found.played.run.peaks) < 0.45 * max(found.kept.run.peaks)
    # The longer-lived of a worker's two stages is the one that goes.
    assert set(found.made.parts) == {(w, w) for w in range(10)}
    lives = lives_of(found.kept)
    assert all(lives[w, w] > lives[w, w + 10] for w in range(10))


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_uniform_interleaving_runs_and_holds_less_than_groups(workers, chunks):
    made = uniform(workers, 2 * workers + 1, chunks)
    prove(made.schedule)
    run = play(made, TIMES).run
    assert max(run.peaks) <= workers
    if chunks == 2 and workers > 1:
        grouped = play(interleaved(workers, 2 * workers, 2), TIMES).run
        assert max(run.peaks) < 0.7 * max(grouped.peaks)


def test_uniform_passes_never_meet_within_an_interval():
    """In the steady state a worker is never idle: its span has no more waits than the ends have."""
    short, long = (play(uniform(4, m, 2), TIMES).run for m in (24, 48))
    assert long.makespan - short.makespan == pytest.approx(24 * 3)


def test_fine_stages_that_leave_are_the_first_of_each_stage():
    found = spilled(one_f_one_b(2, 4), TIMES, Moving(0.1, 0.1), 0.7, pieces=(3, 4))
    assert found.made.parts == {(0, 0): 2 / 3, (1, 1): 2 / 4}
    assert spills(found.made, (0, 3, 7)) == (frozenset({0, 1}), frozenset({3, 4}))


def moved_schedule() -> Pipeline:
    return spilled(one_f_one_b(3, 6), TIMES, Moving(0.25, 0.25), 1.0).made.pipeline


def changed(made: Pipeline, change) -> None:
    """Prove the schedule with worker 0's list changed."""
    first = list(made.schedule.workers[0])
    change(first)
    workers = (tuple(first), *made.schedule.workers[1:])
    prove(replace(made.schedule, workers=workers))


def at(actions, kind, microbatch=0):
    return next(i for i, a in enumerate(actions) if (a.kind, a.microbatch) == (kind, microbatch))


def late(actions):
    fetch = actions.pop(at(actions, Kind.FETCH))
    actions.insert(at(actions, Kind.BACKWARD), fetch)


def behind(actions):
    fetch = actions.pop(at(actions, Kind.FETCH))
    actions.insert(at(actions, Kind.BACKWARD) + 1, fetch)


def early(actions):
    actions.insert(0, actions.pop(at(actions, Kind.EVICT)))


def twice(actions):
    actions.insert(at(actions, Kind.FETCH), actions[at(actions, Kind.FETCH)])


def left_out(actions):
    del actions[at(actions, Kind.EVICT)]


def never_back(actions):
    del actions[at(actions, Kind.FETCH)]


def after_use(actions):
    evict = actions.pop(at(actions, Kind.EVICT))
    del actions[at(actions, Kind.FETCH)]
    actions.insert(at(actions, Kind.BACKWARD) + 1, evict)


def of_parameters(actions):
    i = at(actions, Kind.EVICT)
    actions[i] = replace(actions[i], state=State.PARAMETERS)


def of_gradients(actions):
    i = at(actions, Kind.EVICT)
    actions[i] = replace(actions[i], state=State.GRADIENTS)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (behind, "activations are away"),
        (early, "comes before its FORWARD"),
        (twice, "activations are not away"),
        (left_out, "activations are not away"),
        (never_back, "activations are away; expected a FETCH before it"),
        (after_use, "gradient was produced already"),
        (of_parameters, "not of a pipeline"),
        (of_gradients, "gradients"),
    ],
)
def test_faults_of_moves_are_refused(change, reason):
    changed(moved_schedule(), late)  # as late as can be
    with pytest.raises(OutsizeError, match=reason):
        changed(moved_schedule(), change)


def test_moves_on_another_worker_are_refused():
    made = spilled(EVERY["gpipe"], TIMES, Moving(0.25, 0.25), 1.0).made.pipeline
    rng = random.Random(0)
    for _ in range(40):
        workers = [list(actions) for actions in made.schedule.workers]
        here, there = rng.sample((0, 1), 2)
        i = rng.choice([i for i, a in enumerate(workers[here]) if a.kind in MOVED])
        workers[there].insert(rng.randint(0, len(workers[there])), workers[here].pop(i))
        with pytest.raises(OutsizeError, match=r"away|FORWARD was on|before its|produced already"):
            prove(replace(made.schedule, workers=tuple(map(tuple, workers))))


def test_bytes_that_leave_count():
    made = moved_schedule()

    def priced(a: Action) -> Action:
        sign = {Kind.FORWARD: 1, Kind.FETCH: 1, Kind.EVICT: -1, Kind.BACKWARD: -1}.get(a.kind, 0)
        return replace(a, allocates=(("device/activations", 100 * sign),)) if sign else a

    workers = tuple(tuple(map(priced, actions)) for actions in made.schedule.workers)
    schedule = replace(made.schedule, workers=workers)
    assert prove(schedule, budget=200).peaks[0] == 200
    assert prove(bare(replace(made, schedule=schedule)).schedule).peaks[0] == 300
    with pytest.raises(OutsizeError, match="100 missing"):
        prove(schedule, budget=100)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda: Moving(-1, 0), "not negative"),
        (lambda: Moving(1, 1, 3), "expected 1 to 2"),
        (lambda: spilled(EVERY["1f1b"], TIMES, Moving(1, 1), 1.5), "expected 0 to 1"),
        (lambda: offloaded(EVERY["1f1b"], {(0, 0): 1.0}, {(0, 0): 0}), "expected a later one"),
    ],
)
def test_wrong_numbers_are_refused(wrong, reason):
    with pytest.raises(OutsizeError, match=reason):
        wrong()


def test_a_link_that_is_too_slow_shows_in_the_step():
    found = spilled(EVERY["gpipe"], TIMES, Moving(0.5, 0.5), 1.0)
    assert found.slower == pytest.approx(1)
    slow = play(found.made.pipeline, TIMES, Moving(5, 5), found.made.parts)
    assert slow.run.makespan >= 8 * 5 + 5  # the last leaves behind all others, and comes back
    assert max(spilled(EVERY["gpipe"], TIMES, Moving(5, 5)).moved) <= 24 / (
        8 * 5
    )  # computing, moving
