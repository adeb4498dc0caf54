"""A step that fails leaves weights, no gradient, no activation; the next step is exact."""

from __future__ import annotations

import gc

import plain
import pytest
import torch
from engines import intercept
from subjects import MIXED, ROWS, SEQUENCE, VOCAB, base_plan, config_of

from outsize.errors import OutsizeError
from outsize.memory import Ledger, OverBudget
from outsize.models.build import build
from outsize.optim import AdamW
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.schedule import Kind

PLAN = base_plan(
    microbatch_rows=2, split_backward=True, loss_chunk=7,
    stages=MIXED,
)  # fmt: skip


@pytest.fixture(scope="module")
def data():
    return plain.batches(2, ROWS, SEQUENCE, VOCAB)


@pytest.fixture(scope="module")
def reference(data):
    return plain.train(fresh(), data, [1e-2, 1e-2], clip=0.5, decay=0.1)


def fresh():
    return build(config_of("llama"), seed=1, dtype=torch.float64)


def job_of(plan=PLAN, ledger=None) -> Job:
    return Job(
        NativeFlow(fresh(), plan), plan, Recipe(AdamW(weight_decay=0.1), 0.5), Here(ledger=ledger)
    )


def snapshot(job: Job) -> list[torch.Tensor]:
    return [t.clone() for _, t in (*job.weights(), *job.optimizer_state())]


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def check_untouched(job: Job, before) -> None:
    assert same(snapshot(job), before)
    assert not any(chunk.gradients.any() for chunk in job.chunks)
    parts = job.method
    assert not parts.microbatches.under_way and not parts.backward.weight_work
    assert not job.method.gradients.touched


def check_goes_on(job: Job, data, reference) -> None:
    losses, norms, model = reference
    for step, batch in enumerate(data):
        assert abs(float(job.step(batch, 1e-2)) - losses[step]) <= 1e-10 * losses[step]
        assert abs(job.report.norm - norms[step]) <= 1e-10 * norms[step]
    got = dict(job.weights())
    for name, parameter in model.named_parameters():
        far = (got[name] - parameter.detach()).abs().max() / parameter.detach().abs().max()
        assert float(far) <= 1e-10, name


BEFORE_UPDATE = [
    Kind.FORWARD, Kind.LOSS, Kind.RECOMPUTE, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.NORM,
]  # fmt: skip


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", BEFORE_UPDATE)
def test_an_interrupt_in_any_action(kind, when, data, reference):
    job = job_of()
    before, calls = snapshot(job), []

    def interrupted(action, plainly) -> None:
        calls.append(action)
        if when == "after":
            plainly()
        last = kind is Kind.NORM or len(calls) == 5
        if last:
            raise KeyboardInterrupt
        if when == "before":
            plainly()

    plain = intercept(job, kind, interrupted)
    if kind in (Kind.LOSS, Kind.RECOMPUTE):  # one stage, two microbatches: the second time
        calls.extend([None] * 3)
    with pytest.raises(KeyboardInterrupt):
        job.step(data[0], 1e-2)
    job.loaded = plain
    check_untouched(job, before)
    check_goes_on(job, data, reference)


def peaks() -> list[int]:
    """Peak bytes of every action of a step, and the sum of what is always there."""
    ledger = Ledger()
    job = job_of(ledger=ledger)
    static = ledger.total
    job.step(plain.batches(1, ROWS, SEQUENCE, VOCAB)[0], 1e-2)
    return [static, *(event.peak for event in job.report.trace.events)]


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9, 1.0])
def test_out_of_memory_at_any_height(share, data, reference):
    static, *found = peaks()
    budget = static + int((max(found) - static) * share) - 1
    ledger = Ledger(budget)
    job = job_of(ledger=ledger)
    before = snapshot(job)
    with pytest.raises(OverBudget, match=r"bytes? missing") as caught:
        job.step(data[0], 1e-2)
    assert caught.value.missing > 0
    del caught  # its traceback holds the step's tensors
    gc.collect()
    check_untouched(job, before)
    held = {kind: count for kind, count in ledger.live.items() if count}
    held.pop("data", None)
    assert held.pop("activations", 0) <= 16, "the loss's scalars at most"
    assert sum(held.values()) == static and ledger.total <= budget
    ledger.budget = max(found)
    check_goes_on(job, data, reference)
    assert ledger.total <= max(found)


def test_the_measured_peak_is_enough(data, reference):
    check_goes_on(job_of(ledger=Ledger(max(peaks()))), data, reference)


def test_an_interrupt_between_updates_is_not_trained_on(data):
    """Some weights have moved and some have not: nothing can be taken back, so it is said."""
    job = job_of()
    calls = []

    def interrupted(action, plainly) -> None:
        calls.append(action)
        if len(calls) == 3:
            raise KeyboardInterrupt
        plainly()

    plain = intercept(job, Kind.UPDATE, interrupted)
    with pytest.raises(KeyboardInterrupt):
        job.step(data[0], 1e-2)
    job.loaded = plain
    with pytest.raises(OutsizeError, match="cut off while it updated the weights; load"):
        job.step(data[0], 1e-2)
    job.restore_counts({})  # what loading a checkpoint ends with
    job.step(data[0], 1e-2)


def test_close_gives_an_ordinary_module_back(data):
    plan = base_plan(**{"mlp_tile": 6, "stages": MIXED, "loss_chunk": 7})
    job = job_of(plan)
    job.step(data[0], 1e-2)
    model = job.flow.model
    trained = {n: p.clone() for n, p in model.state_dict().items()}
    job.close()
    assert all(p.grad is None for p in model.parameters())
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert all(m.__dict__.get("sink") is None for m in model.modules())

    twin = fresh()
    twin.load_state_dict(trained)
    for one in (model, twin):
        plain.loss_of(one, data[1]).backward()
    chunks = {chunk.gradients.data_ptr() for chunk in job.chunks}
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        assert torch.equal(ours.grad, theirs.grad), name
        assert ours.grad.untyped_storage().data_ptr() not in chunks
    assert not any(chunk.gradients.any() for chunk in job.chunks), "the job hears no more of it"
