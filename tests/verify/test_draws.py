"""Six random models under random plans hold; more of them: outsize verify --random 300."""

from __future__ import annotations

import signal
import threading
from collections import Counter

import pytest
from click.testing import CliRunner

from outsize.cli.main import main as command_line
from outsize.errors import OutsizeError
from outsize.memory.store import MemoryStore
from outsize.runtime import Job
from outsize.schedule.pipelines import NAMES
from outsize.verify import many, verify
from outsize.verify.compare import Comparison
from outsize.verify.draw import Drawn, draws
from outsize.verify.draw_pipeline import SCHEDULES
from outsize.verify.many import ROUNDED, command, features, outcomes, summary
from outsize.verify.verify import own_rounding

WORKERS = 8
ODD = ("model", "workers", "optimizer", "schedule")


# Of the first fourteen those that take a second or two and have, together, other features each
# than rows of the matrix; one of them below float64.
@pytest.mark.parametrize(
    ("workers", "seeds", "precision"),
    [(4, (2, 3, 5, 8, 12), None), (WORKERS, (13,), "float64")],
    ids=["few", "many"],
)
def test_draws_hold(workers, seeds, precision):
    found = list(outcomes(seeds, workers, precision=precision))
    assert not [f"{one.fault}\n{one.drawn}" for one in found if not one.holds]
    total = summary(found)
    assert total.held == len(seeds) and 0 < total.worst <= 1e-10


@pytest.fixture
def interruptible():
    """A process that was started in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_as_it_does_elsewhere(monkeypatch, interruptible):
    main, step, at_work = threading.main_thread().ident, Job.step, list[threading.Thread]()

    def interrupted(job, *words):
        at_work.append(threading.current_thread())
        if at_work == [threading.current_thread()]:
            signal.pthread_kill(main, signal.SIGINT)
        return step(job, *words)

    monkeypatch.setattr(Job, "step", interrupted)
    words = ["verify", "--random", "2", "--seed", "2", "--workers", str(WORKERS)]
    result = CliRunner().invoke(command_line, words)
    assert result.exit_code == 130
    assert result.output == "interrupted; nothing had begun that could be saved\n"
    assert at_work and not [thread for thread in at_work if thread.is_alive()]


def first_of(seed: int, precision: str | None = None) -> Drawn:
    return next(one for one in draws(seed, WORKERS, precision) if isinstance(one, Drawn))


def test_a_seed_is_one_draw():
    one, same = first_of(7), first_of(7)
    assert str(one) == str(same)
    assert one.case.batch(1).ids_BS.equal(same.case.batch(1).ids_BS)
    same = "outsize verify --random 1 --seed 7 --workers 8"
    assert command(one, WORKERS) == same
    assert command(one, WORKERS, device="cpu") == f"{same} --device cpu"


def test_everything_is_drawn():
    """Of a few hundred draws, each feature comes up, alone and on many workers; precisions, which
    are drawn apart, of the first hundred."""
    drawn = (first_of(seed, None if seed < 100 else "float64") for seed in range(300))
    seen = Counter(name for one in drawn for name in features(one))
    names = {name for name in seen if not name.startswith(ODD)}
    assert names == {
        "precision float64", "precision float32", "precision bfloat16",
        "mesh data x tensor", "mesh pipeline x data", "mesh pipeline x tensor", "loss_chunk",
        "mesh data x context", "mesh context x tensor", "mesh pipeline x context",
        "mesh data x expert", "mesh pipeline x expert", "mesh expert x tensor",
        "mlp_tile", "split_backward", "sequence_chunk", "sequence_parallel",
        "shards of parameters", "shards of gradients", "shards of optimizer states", "recompute",
        "order layer", "update behind", "uneven rows", "tied", "clip", "masked rows", "frozen",
        "shares of rows", "updates on the host", "stream.over",
        "label smoothing", "z-loss", "dropout", "resumed", "overlap", "blocks_by_rows",
            "ladder_from", "kraken_ways",
        "uneven stages", "below: parameters", "below: gradients", "below: optimizer",
        "below: activations", "vocabulary 1", "vocabulary 2",
    }  # fmt: skip
    assert min(seen[name] for name in names) >= 5
    assert sum(name.startswith("model") for name in seen) == 16
    assert {f"workers {n}" for n in range(1, 9)} <= seen.keys()
    schedules = {name.removeprefix("schedule ") for name in seen if name.startswith("schedule")}
    assert schedules <= set(SCHEDULES) and len(schedules) >= len(SCHEDULES) - 1
    assert {f"optimizer {name}" for name in ("adamw", "adamw8bit", "sgd", "muon")} <= seen.keys()


def test_every_schedule_may_be_drawn():
    assert {name.partition(":")[0] for name in SCHEDULES} == set(NAMES)


def test_activations_of_draws_do_leave_the_device(monkeypatch):
    """They must be large enough to be moved."""
    written, close = [], MemoryStore.close

    def counted(self):
        written.append(self.bytes_written)
        close(self)

    monkeypatch.setattr(MemoryStore, "close", counted)

    def spills(drawn) -> bool:
        plan = getattr(drawn, "case", None) and drawn.case.plan
        if plan is None or plan.rests_below("parameters", "gradients", "optimizer"):
            return False
        deep = len(plan.stages) > 3  # few stages have little to move
        return deep and {s.rest.activations for s in plan.stages} == {"host"}

    every = (drawn for seed in range(2, 500) for drawn in draws(seed, 3))  # 1: many tiles
    drawn = next(filter(spills, every))
    assert verify(drawn.case, own=False).holds
    assert sum(written) > 0


def test_what_fails_in_a_step_is_no_refusal(monkeypatch):
    def step(self, batch, rate):
        raise OutsizeError("message 3: its tensors are others")

    monkeypatch.setattr(Job, "step", step)
    (found,) = outcomes([3], 2)
    assert not found.holds and found.fault == "message 3: its tensors are others"


def test_what_is_refused_is_drawn_again():
    refusals = []

    def judge(case):
        if len(refusals) < 2:
            refusals.append(case)
            raise OutsizeError("pool: too small by 3 bytes")
        raise RuntimeError("a worker is gone")

    (found,) = outcomes([3], 2, judge)
    assert found.refused.count("pool: too small by") == 2
    assert found.fault.startswith("RuntimeError: a worker is gone")
    assert summary([found]).refused["pool: too small by"] == 2


class Judged:
    """A verdict by its distance alone."""

    def __init__(self, worst: float) -> None:
        self.exact = Comparison("float64", (), ((1.0 + worst, 1.0),), ((1.0, 1.0),))
        self.sent, self.holds = None, False


def test_a_difference_is_excused_by_the_plain_run_alone(monkeypatch):
    """A draw whose plain run comes as far from itself, to three figures, is drawn again; a larger
    difference, one of a draw that is well conditioned, and one that is no number are faults."""
    moved, asked = 3e-8, []

    def rounding(case):
        asked.append(case)
        return moved

    monkeypatch.setattr(many, "own_rounding", rounding)
    verdicts = iter([2e-8, 3.0002e-8, 3.01e-8])
    (found,) = outcomes([3], 2, lambda case: Judged(next(verdicts)))
    assert found.refused.count(ROUNDED) == 2 and not found.holds and len(asked) == 3
    (found,) = outcomes([3], 2, lambda case: Judged(float("inf")))
    assert not found.holds and len(asked) == 3


def test_a_plain_run_moves_by_little_more_than_its_first_values():
    """...where it is well conditioned, as these draws are."""
    assert all(0 < own_rounding(first_of(seed).case) < 1e-11 for seed in (5, 11))
