"""The prover: what it accepts runs to the exact result, what it refuses it refuses with a reason.

The judge is a small executor that knows nothing of the prover: it plays a schedule with whole
numbers, a stage being y = weight * x, and adds up the gradients that come out.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from schedule_text import read_schedule

from outsize.errors import OutsizeError
from outsize.plan import Plan
from outsize.plan.plan import per_segment
from outsize.schedule import Action, Kind, Schedule, compile_plan, compile_tokens
from outsize.schedule.action import KINDS, State
from outsize.schedule.pipelines import (
    Pipeline,
    Shape,
    bitpipe,
    chimera,
    dualpipe,
    gpipe,
    hanayo,
    interleaved,
    make,
    one_f_one_b,
    skip_pipe,
    v_half,
    zb_h1,
    zb_v,
)
from outsize.schedule.proof import prove
from outsize.simulate.coarse import Times, play

PIPELINES = {
    "1F1B": one_f_one_b(3, 4),
    "interleaved": interleaved(2, 4, 2),
    "ZB-H1": zb_h1(3, 3),
    "ZB-V": zb_v(2, 3),
    "V-Half": v_half(2, 3),
    "Hanayo": hanayo(2, 3, 1),
    "Chimera": chimera(4, 4),
    "BitPipe": bitpipe(2, 4, 2),
    "DualPipe": dualpipe(2, 4),
    "SkipPipe": skip_pipe(4, 4, 0.25),
}
MUTATIONS = 150  # of each


def mutated(schedule: Schedule, rng: random.Random) -> Schedule:
    """One or two actions removed, swapped, doubled, changed, or moved, to other workers too."""
    workers = [list(actions) for actions in schedule.workers]
    for _ in range(rng.choice((1, 1, 1, 2))):
        w = rng.randrange(len(workers))
        here, there = workers[w], workers[rng.randrange(len(workers))]
        i, j = rng.randrange(len(here)), rng.randrange(len(here))
        match rng.choice(("remove", "swap", "next", "double", "move", "worker", "change")):
            case "remove":
                del here[i]
            case "swap":
                here[i], here[j] = here[j], here[i]
            case "next":
                k = min(i + 1, len(here) - 1)
                here[i], here[k] = here[k], here[i]
            case "double":
                there.insert(rng.randint(0, len(there)), here[i])
            case "move":
                here.insert(j, here.pop(i))
            case "worker":
                there.insert(rng.randint(0, len(there)), here.pop(i))
            case "change":
                action = here[i]
                here[i] = rng.choice((
                    replace(action, stage=rng.randint(-1, schedule.stages)),
                    replace(action, microbatch=rng.randint(-1, schedule.microbatches)),
                    replace(action, kind=rng.choice([*map(Kind, KINDS.names())])),
                    replace(action, state=rng.choice(list(State))),
                ))  # fmt: skip
    return replace(schedule, workers=tuple(map(tuple, workers)))


class Executor:
    """Plays a schedule in whole numbers. Anything missing is a KeyError, any circle a stop."""

    def __init__(self, made: Pipeline, schedule: Schedule) -> None:
        self.schedule = schedule
        self.paths = made.paths or [tuple(range(schedule.stages))] * schedule.microbatches
        count = len(schedule.workers)
        self.weights = [[s + 2 for s in range(schedule.stages)] for _ in range(count)]
        self.store: list[dict[object, int]] = [{} for _ in range(count)]
        self.post: dict[object, int] = {}
        self.gradients: list[Counter[int]] = [Counter() for _ in range(count)]
        self.at_norm: set[int] = set()

    def run(self) -> list[list[int]]:
        """The weights of each worker after the step."""
        at = [0] * len(self.schedule.workers)
        moved = True
        while moved:
            moved = False
            for w, actions in enumerate(self.schedule.workers):
                if at[w] < len(actions) and self.play(w, actions[at[w]]):
                    at[w] += 1
                    moved = True
        assert all(i == len(a) for i, a in zip(at, self.schedule.workers, strict=True)), "stuck"
        return self.weights

    def play(self, w: int, a: Action) -> bool:
        store, s, m = self.store[w], a.stage, a.microbatch
        if a.kind is Kind.SEND:
            self.post[a.state, s, m] = store[a.state, s, m]
        elif a.kind is Kind.RECV:
            if (a.state, s, m) not in self.post:
                return False
            store[a.state, s, m] = self.post.pop((a.state, s, m))
        elif a.kind is Kind.NORM:
            self.at_norm.add(w)
            return len(self.at_norm) == len(self.schedule.workers)
        elif a.kind is Kind.UPDATE:
            assert len(self.at_norm) == len(self.schedule.workers)
            self.weights[w][s] -= sum(each[s] for each in self.gradients)
        else:
            self.compute(w, a, self.paths[m])
        return True

    def compute(self, w: int, a: Action, path: tuple[int, ...]) -> None:
        store, s, m, weight = self.store[w], a.stage, a.microbatch, self.weights[w][a.stage]
        at = path.index(s)
        before = path[at - 1] if at else None
        if a.kind is Kind.FORWARD:
            x = m + 1 if before is None else store[State.ACTIVATIONS, before, m]
            store["kept", s, m], store[State.ACTIVATIONS, s, m] = x, weight * x
            return
        out = 1 if s == path[-1] else store[State.GRADIENTS, s, m]
        if a.kind is not Kind.BACKWARD_WEIGHT:
            store["kept", s, m]
            store["came", s, m] = out
            if before is not None:
                store[State.GRADIENTS, before, m] = weight * out
        if a.kind is not Kind.BACKWARD_INPUT:
            self.gradients[w][s] += store.pop(("kept", s, m)) * store["came", s, m]


@pytest.mark.parametrize("name", PIPELINES)
def test_a_mutation_is_refused_with_its_reason_or_gives_the_exact_result(name):
    made = PIPELINES[name]
    rng = random.Random(name)
    prove(made.schedule, paths=made.paths)
    expected = Executor(made, made.schedule).run()
    held = [w for w, actions in enumerate(made.schedule.workers) for _ in actions]
    assert held and any(row != list(range(2, 2 + made.schedule.stages)) for row in expected)
    accepted, reasons = 0, Counter()
    for _ in range(MUTATIONS):
        schedule = mutated(made.schedule, rng)
        try:
            prove(schedule, paths=made.paths)
        except OutsizeError as error:
            assert "\n" not in str(error) and str(error).startswith("schedule: ")
            reasons[str(error).rpartition(": ")[2]] += 1
            continue
        accepted += 1
        assert Executor(made, schedule).run() == expected
        assert play(replace(made, schedule=schedule), Times(1, 1, 1)).run.makespan > 0
    assert accepted + sum(reasons.values()) == MUTATIONS
    assert len(reasons) > 10 and accepted  # some swaps change nothing that matters


def text(*lines: str, stages: int = 2, microbatches: int = 1, workers: int = 2) -> Schedule:
    return read_schedule(lines, stages, microbatches, workers)


STEP = (
    "0 FORWARD 0 0 compute", "0 SEND.activations 0 0 network", "0 RECV.gradients 0 0 network",
    "0 BACKWARD 0 0 compute", "0 NORM * * compute", "0 UPDATE 0 * compute",
    "1 RECV.activations 0 0 network", "1 FORWARD 1 0 compute", "1 BACKWARD 1 0 compute",
    "1 SEND.gradients 0 0 network", "1 NORM * * compute", "1 UPDATE 1 * compute",
)  # fmt: skip


def test_the_smallest_pipeline_is_proved():
    assert prove(text(*STEP)).peaks == (0, 0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({0: None}, r"worker 0, action 0 \(SEND.activations 0 0 network\): what it sends"),
        ({1: None}, "at its end: SEND of activations 0 0 is missing on worker 0"),
        ({1: None, 6: "1 RECV.activations 0 0 network"}, "SEND of activations 0 0 is missing"),
        ({6: None}, r"worker 0, action 1 .*no worker receives it"),
        ({7: None}, r"worker 1, action 0 \(RECV.activations 0 0 network\): nobody uses it here"),
        ({8: None}, r"worker 1, action 2 \(SEND.gradients .*what it sends was not produced"),
        ({4: None}, "worker 0, action 4 .*comes before NORM"),
        ({5: None}, "at its end: UPDATE of stage 0 is missing on worker 0"),
        ({10: None, 11: None}, "NORM is missing on worker 1"),
        ({3: None}, "gradient of stage 0, microbatch 0 was not produced"),
        ({3: "0 BACKWARD_INPUT 0 0 compute"}, "weight gradient of stage 0"),
        ({3: "1 BACKWARD 0 0 compute"}, "worker 0, action 3 .*gradient of stage 0, microbatch 0"),
        ({0: "0 FORWARD 0 0 compute\n0 FORWARD 0 0 compute"}, "runs a second time"),
        ({0: "0 FORWARD 0 1 compute"}, "microbatch is 1; expected 0 to 0"),
        ({0: "0 FORWARD 7 0 compute"}, "stage is 7; expected 0 to 1"),
        ({4: "0 NORM 0 * compute"}, "is of the whole step"),
        ({1: "0 SEND 0 0 network"}, "moves nothing; expected activations or gradients"),
        ({1: "0 FETCH.parameters 0 * fetch"}, "prove the schedule before the pass that adds it"),
        ({1: STEP[2], 2: STEP[1]}, "waits for worker 1, which does not send it: deadlock"),
        ({5: "0 UPDATE 0 * compute\n0 UPDATE 1 * compute"}, "worker 0, action 6 .*on other"),
    ],
)  # fmt: skip
def test_a_fault_is_named(change, reason):
    lines = [change.get(i, line) for i, line in enumerate(STEP)]
    with pytest.raises(OutsizeError, match=reason):
        prove(text(*(line for line in lines if line is not None)))


def test_tensors_are_received_in_the_order_in_which_they_are_sent():
    made = one_f_one_b(2, 3)
    first, second = (list(actions) for actions in made.schedule.workers)
    receives = [i for i, a in enumerate(first) if a.kind is Kind.RECV]
    i, j = receives[0], receives[1]
    first.insert(i, first.pop(j))
    with pytest.raises(OutsizeError, match="worker 1 sent gradients 0 0 before it"):
        prove(replace(made.schedule, workers=(tuple(first), tuple(second))))


def test_sends_that_fill_their_buffers_are_a_deadlock():
    """Worker 0 receives nothing before it has sent eight, worker 1 answers each at once."""
    first, second = gpipe(2, 8).schedule.workers[0], one_f_one_b(2, 8).schedule.workers[1]
    schedule = replace(one_f_one_b(2, 8).schedule, workers=(first, second))
    prove(schedule, buffers=4)
    with pytest.raises(OutsizeError, match="does not receive what fills the 2 buffers: deadlock"):
        prove(schedule)


def test_bytes_are_counted_worker_by_worker():
    lines = list(STEP)
    lines[0] += " device/activations+100 workspace=50"
    lines[3] += " device/activations-100 host/x+7"
    lines[7] += " device/activations+300"
    assert prove(text(*lines), static=10).peaks == (110, 310)
    with pytest.raises(OutsizeError, match="would hold 310 bytes of a budget of 309: 1 missing"):
        prove(text(*lines), budget=309, static=10)


def test_one_worker_is_proved_too():
    plan = Plan(4, per_segment(4, ("block",)), 2, 1, split_backward=True)
    assert prove(compile_plan(plan)).peaks == (0,)
    assert prove(compile_plan(plan, trainable_from=2)).peaks == (0,)
    assert prove(compile_tokens(3, Kind.PREFILL)).peaks == (0,)
    schedule = compile_plan(plan)
    kept = [a for a in schedule.workers[0] if a.kind is not Kind.RECOMPUTE]
    with pytest.raises(OutsizeError, match="its activations were not computed again"):
        prove(replace(schedule, workers=(tuple(kept),)))


def test_paths_are_checked():
    made = make("skip-pipe", Shape(4, 4))
    for paths, reason in (
        (((0, 1),), "1 paths for 4 microbatches"),
        (((0, 0),) * 4, r"path of microbatch 0 is \(0, 0\)"),
        (((0, 9),) * 4, "expected stages from 0 to 3"),
    ):
        with pytest.raises(OutsizeError, match=reason):
            prove(made.schedule, paths=paths)
