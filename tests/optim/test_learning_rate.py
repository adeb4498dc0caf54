"""Learning-rate factors against closed formulas, and against those of transformers."""

from __future__ import annotations

import math

import pytest
import torch

from outsize.errors import OutsizeError
from outsize.optim import LearningRate
from outsize.optim.schedule import SHAPES

STEPS, WARMUP = 40, 7


def factors(rate: LearningRate, steps: int = STEPS) -> list[float]:
    return [rate.factor(i) for i in range(steps)]


def closed(shape: str, step: int, final: float, decay: float = 0.2) -> float:
    """The factor by its formula: step counted from 0, warm-up reaching 1 at its last step."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    share = (step - WARMUP) / (STEPS - WARMUP)
    if shape == "linear":
        return 1 - share * (1 - final)
    if shape == "cosine":
        return final + (1 - final) * (math.cos(math.pi * share) + 1) / 2
    if shape == "wsd":
        falling = decay * STEPS
        return 1 - max(0.0, step - (STEPS - falling)) / falling * (1 - final)
    return 1.0


@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_step_is_the_formula(shape, final):
    got = factors(LearningRate(shape, STEPS, WARMUP, final))
    assert got == pytest.approx([closed(shape, i, final) for i in range(STEPS)], abs=1e-14)
    assert got[WARMUP - 1] == got[WARMUP] == 1.0 or shape == "constant"


def hugging_face(name: str, **specific) -> list[float]:
    """Factors of transformers' schedule at its steps 0, 1, ..., STEPS."""
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = transformers.get_scheduler(
        name, optimizer, num_warmup_steps=WARMUP, num_training_steps=STEPS,
        scheduler_specific_kwargs=specific,
    )  # fmt: skip
    made = []
    for _ in range(STEPS + 1):
        made.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return made


@pytest.mark.parametrize(
    ("rate", "name", "specific"),
    [
        (LearningRate("linear", STEPS, WARMUP, 0.0), "linear", {}),
        (LearningRate("cosine", STEPS, WARMUP, 0.0), "cosine", {}),
        (LearningRate("cosine", STEPS, WARMUP, 0.1), "cosine_with_min_lr", {"min_lr_rate": 0.1}),
        (LearningRate("constant", STEPS, WARMUP), "constant_with_warmup", {}),
        (
            LearningRate("wsd", STEPS, WARMUP, 0.05),
            "warmup_stable_decay",
            {"num_decay_steps": 8, "min_lr_ratio": 0.05, "decay_type": "linear"},
        ),
    ],
)
def test_transformers_gives_the_same_after_the_warm_up(rate, name, specific):
    """Theirs begins its warm-up at 0, so that the first step does nothing; ours is a step ahead
    there, and the same from the first step behind it."""
    theirs = hugging_face(name, **specific)
    assert factors(rate)[WARMUP:] == pytest.approx(theirs[WARMUP:STEPS], abs=1e-12)
    if "min_lr_ratio" in specific:
        return  # which theirs begins its warm-up at
    assert factors(rate)[:WARMUP] == pytest.approx(theirs[1 : WARMUP + 1], abs=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("steps", "warmup"), [(5, 5), (1, 1), (1, 0), (0, 0), (2, 1)])
def test_short_runs_give_finite_factors(shape, steps, warmup):
    rate = LearningRate(shape, steps, warmup)
    got = factors(rate, steps + 3)
    assert all(0.1 - 1e-15 <= factor <= 1 for factor in got)
    assert got[:warmup] == [(i + 1) / warmup for i in range(warmup)]


@pytest.mark.parametrize("shape", ["linear", "cosine", "wsd"])
def test_past_the_end_it_stays_at_the_final_factor(shape):
    rate = LearningRate(shape, STEPS, WARMUP, 0.25)
    assert [rate.factor(STEPS + i) for i in (0, 1, 1000)] == pytest.approx([0.25] * 3, abs=1e-15)


def test_a_decay_longer_than_what_is_left_begins_after_the_warm_up():
    rate = LearningRate("wsd", 10, 4, 0.0, decay=1.0)
    assert factors(rate, 10)[4:] == pytest.approx([1 - i / 6 for i in range(6)])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(shape="cosin"), "schedule 'cosin' is not known; did you mean 'cosine'"),
        (dict(steps=5, warmup=6), r"warmup is 6 steps; expected 0 to steps, 5"),
        (dict(steps=5, warmup=-1), "warmup is -1 steps; expected 0 to steps"),
    ],
)
def test_what_is_refused(values, message):
    with pytest.raises(OutsizeError, match=message):
        LearningRate(**values)
