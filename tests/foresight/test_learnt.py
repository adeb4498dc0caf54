"""Costs learnt from operators' text, against refitting by hand and a law that is known."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from outsize.foresight import learnt
from outsize.foresight.learnt import LEAST, Learnt, better, fit, held_out
from outsize.foresight.sources import Roofline, Table, source_of
from outsize.hardware import catalogue
from outsize.hardware.hardware import Device, Matmul, Measured, Rate

BARE = replace(catalogue("H100-SXM").devices[0], cores=0)


def entry(m: int, n: int, k: int, seconds: float) -> Matmul:
    rate = Rate(2.0 * m * n * k / seconds, "FLOP/s", "test", "2026-11-26")
    return Matmul(m, k, n, "bf16", rate)


def law(m: int, n: int, k: int) -> float:
    """Seconds: far from what tiles have, and no mean of near shapes."""
    return 1e-6 + 2.0 * m * n * k / (4e14 * math.sqrt(m / (m + 300)) * n / (n + 500))


def device(count: int, seed: int = 0) -> Device:
    draw = random.Random(seed)
    sizes = [(2 ** draw.randrange(4, 11), 64 * draw.randrange(1, 48), 64 * draw.randrange(1, 48))
             for _ in range(count)]  # fmt: skip
    return replace(BARE, measured=Measured(tuple(entry(*s, law(*s)) for s in sizes)))


def test_errors_held_out_are_those_of_fits_without_each_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(learnt, "WIDTHS", (2.0,))
    monkeypatch.setattr(learnt, "RIDGES", (1e-2,))
    texts = tuple(f"mm bf16 {m} {n} 512" for m in (64, 128, 300) for n in (256, 1000))
    logs = tuple(float(v) for v in np.random.default_rng(0).normal(size=len(texts)))
    whole = fit(texts, logs)
    for at, (text, log) in enumerate(zip(texts, logs, strict=True)):
        others = fit(texts[:at] + texts[at + 1 :], logs[:at] + logs[at + 1 :])
        assert abs(others(text) / math.exp(log) - 1) == pytest.approx(whole.off[at], rel=1e-8)


def test_a_law_is_learnt_and_taken_where_it_errs_less() -> None:
    made = device(60)
    off = held_out(made, learnt.learnt(made))
    assert off["learnt"] < 0.1 and off["learnt"] < min(off["table"], off["roofline"]) / 2
    taken = source_of(made)
    assert isinstance(taken, Table) and isinstance(taken.other, Learnt)
    source = taken.other
    table, off = Table(made, Roofline(made)), {"learnt": 0.0, "table": 0.0}
    for one in device(30, seed=1).measured.matmul:
        size, seconds = (one.tokens, one.d_out, one.d_in), one.flops / one.rate.value
        for name, each in (("learnt", source), ("table", table)):
            off[name] += abs(each.product(*size, "bf16").seconds / seconds - 1) / 30
    assert off["learnt"] < 0.1 and off["learnt"] < off["table"] / 2
    assert source.product(64, 64, 64, "fp8") == Roofline(made).product(64, 64, 64, "fp8")
    assert source.traffic(1e6) == Roofline(made).traffic(1e6)


def test_few_samples_and_noise_about_the_roofline_are_no_reason() -> None:
    assert better(device(LEAST - 1)) is None
    draw = random.Random(2)

    def noisy(one: Matmul) -> Matmul:
        size = one.tokens, one.d_out, one.d_in
        seconds = Roofline(BARE).product(*size, "bf16").seconds * draw.uniform(0.8, 1.2)
        return entry(*size, seconds)

    made = Measured(tuple(map(noisy, device(30).measured.matmul)))
    taken = source_of(replace(BARE, measured=made))
    assert isinstance(taken, Table) and isinstance(taken.other, Roofline)
