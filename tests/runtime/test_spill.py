"""Spilled activations: written once however shared, let go, back in time, nobody else harmed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import streamed
import torch
from streamed import data_of, job_of, memory, plan_of, resting, trained
from subjects import ROWS
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from outsize.memory import Ledger
from outsize.memory.store import MemoryStore
from outsize.optim import SGD
from outsize.plan import Plan, Precision, Rest, Stage
from outsize.plan.plan import per_segment
from outsize.runtime import AdoptedFlow, Job, spill
from outsize.runtime.flow import Record
from outsize.runtime.recipe import Here, Recipe
from outsize.runtime.spill import Handle, Spills, spilling

DATA = data_of(2)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    streamed.small(monkeypatch)


def store() -> MemoryStore:
    return MemoryStore("disk", 1 << 22)


def test_a_storage_is_noted_once_whoever_saves_it():
    spills, tier = Spills(), store()
    first, second = spills.begin(0, 0, tier, False), spills.begin(1, 0, tier, False)
    x = torch.randn(64, 8)
    with first.watching():
        pass
    handles = [first.pack(x), first.pack(x.t()), first.pack(x[3:]), second.pack(x[:, 2])]
    assert all(isinstance(h, Handle) and h.entry is handles[0].entry for h in handles)
    for handle, expected in zip(handles, (x, x.t(), x[3:], x[:, 2]), strict=True):
        assert torch.equal(handle.tensor(), expected)
        assert handle.tensor().stride() == expected.stride()
    first.write()
    second.write()
    assert tier.bytes_written == x.nbytes


def test_what_leaves_is_let_go_and_comes_back_equal():
    spills, tier = Spills(), store()
    here, ledger = spills.begin(0, 0, tier, False), Ledger()
    with ledger:
        x = torch.randn(100, 10)
        expected = x.tolist()
        handle = here.pack(x)
        del x
        assert ledger.total == 4000
        here.write()
        here.release()
        assert ledger.total == 0 and handle.entry.flat is None
        here.read(here.allocate())
        assert ledger.total == 4000
    assert handle.tensor().tolist() == expected
    place = handle.entry.place
    spills.end(0, 0)
    again = spills.begin(0, 0, tier, False)
    again.pack(torch.randn(100, 10))
    again.write()
    assert again.entries[0].place == place, "steps take turns in the same places"


def test_what_somebody_else_holds_is_never_there_twice():
    spills, tier = Spills(), store()
    here, x = spills.begin(0, 0, tier, False), torch.randn(64, 8)
    handle = here.pack(x)
    here.write()
    here.release()
    assert handle.tensor().data_ptr() == x.data_ptr() and not here.allocate()


def test_what_is_asked_for_before_it_has_gone_stays():
    spills, tier = Spills(), store()
    here = spills.begin(0, 0, tier, False)
    handle = here.pack(torch.randn(64, 8))
    here.write()
    assert here.allocate() == []
    here.release()
    assert handle.tensor().shape == (64, 8)


def test_what_is_not_moved():
    """Small tensors, parameters, and tensors whose bytes alone do not say what they are."""
    spills = Spills()
    here, weight = spills.begin(0, 0, store(), False), torch.randn(64, 8)
    spills.kept.add(weight.untyped_storage()._cdata)
    turned = torch.randn(64, 8, dtype=torch.complex64).conj()
    for tensor in (torch.randn(4), weight, weight[1:], turned, turned.imag, weight.to_sparse()):
        assert here.pack(tensor) is tensor
    assert not here.entries


def test_gradients_of_complex_functions_are_exact():
    def f(x):
        y = torch.fft.fft(x)
        return (y * y.conj()).abs().sum() + (y.conj().imag * x).sum()

    x = torch.randn(16, 16, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(f(x), x)
    here = Spills().begin(0, 0, store(), False)
    with here.watching():
        made = f(x)
    here.write()
    here.release()
    here.read(here.allocate())
    (got,) = torch.autograd.grad(made, x)
    assert torch.equal(got, expected)


def test_a_stage_of_several_blocks_lets_all_of_them_go():
    """An adopted module whose one stage holds three blocks: each of them spills."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)]
    model = nn.Sequential(nn.Linear(4, 16), *blocks, nn.Linear(16, 1))
    named = [(str(i + 1), block) for i, block in enumerate(blocks)]

    def run(rest: Rest) -> tuple[list[float], int, list[int]]:
        torch.manual_seed(1)
        for p in model.parameters():
            nn.init.normal_(p, 0, 0.1)
        stages = (Stage(0, 1), Stage(1, 4, rest=rest), Stage(4, 5))
        plan = Plan(5, stages, 16, 2, precision=Precision(), order="layer")
        flow = AdoptedFlow(
            model, named, plan, lambda out, _: out.square().sum(),
            split=lambda x, a, b: x[a:b],
        )  # fmt: skip
        tier, ledger = store(), Ledger()
        job = Job(flow, plan, Recipe(SGD()), Here(ledger=ledger, stores={"disk": tier}))
        x = torch.linspace(-1, 1, 16 * 40 * 4).view(16, 40, 4)
        losses = [float(job.step(x, 1e-3)) for _ in range(3)]
        peak = job.report.trace.peak()
        job.close()
        return losses, peak, [tier.bytes_written]

    losses, peak, _ = run(Rest())
    again, lower, written = run(Rest(activations="disk"))
    assert again == losses
    # Of eight microbatches' three blocks (two hidden states of 64 each at least) most are away.
    one = 2 * 40 * 64 * 4
    assert peak - lower > 4 * (3 * 2 * one)
    assert written[0] >= 3 * 8 * 3 * 2 * one


def test_inputs_that_others_read_are_not_emptied():
    """A record that does not own its inputs leaves them as they are; one that does gives them back
    for the second forward."""
    x = torch.randn(64, 8)
    spills, tier = Spills(), store()
    shared = Record(lambda ts: [ts[0] * 2], [x], spills.begin(0, 0, tier, False), own=False)
    shared.forward(keep=False)
    assert x.abs().sum() > 0
    mine = x.clone().requires_grad_()
    expected = mine.detach().clone()
    here = spills.begin(1, 0, tier, False)
    record = Record(lambda ts: [ts[0] * 2], [mine], here)
    record.forward(keep=False)
    assert not mine.abs().sum() and mine.shape == x.shape
    here.write()
    here.release()
    here.read(here.allocate())
    record.again()
    assert torch.equal(mine.detach(), expected)


def test_named_parts_spill_alone():
    part = nn.Linear(32, 32)
    spills = Spills()
    forward, x = spilling(part, spills), torch.randn(64, 32)
    here = spills.begin(0, 0, store(), True)
    packed: list[int] = []
    with here.watching(), saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t):
        y = forward(x.requires_grad_() * 1)
        y = (y * y).sum()
    assert len(here.uses) >= 1 and packed, "outside the part autograd keeps its tensors itself"
    with torch.no_grad(), here.watching():
        forward(x)
    assert forward(x).shape == (64, 32), "without a stage under way it is the plain part"


@pytest.mark.parametrize("order", ["microbatch", "layer"])
def test_peaks_fall_and_bytes_return_once(order):
    """What leaves comes back once, and less is held at the highest."""
    plan = plan_of(order=order, stages=per_segment(5))
    peaks = {}
    for rest in ("device", "disk"):
        ledger = Ledger()
        with memory() as stores:
            job = job_of(resting(plan, activations=rest), stores, ledger=ledger)
            trained(job, DATA, ROWS)
            peaks[rest] = job.report.trace.peak()
            tier = stores["disk"]
            assert tier.bytes_read <= tier.bytes_written
            assert (tier.bytes_read > 0.9 * tier.bytes_written) or rest == "device"
            assert not list(job.method.spilling.spills._live)
    assert peaks["disk"] < peaks["device"]


def test_steps_reuse_their_places():
    plan = resting(plan_of(order="layer"), activations="disk")
    with memory() as stores:
        job = job_of(plan, stores)
        job.step(DATA[0], 1e-2)
        taken = stores["disk"]._counts._taken
        for _ in range(3):
            job.step(DATA[0], 1e-2)
        assert stores["disk"]._counts._taken == taken > 0


def test_the_least_is_a_size_worth_moving(monkeypatch):
    monkeypatch.setattr(spill, "LEAST", 1 << 40)
    plan = replace(resting(plan_of(), activations="disk"), microbatch_rows=3)
    with memory() as stores:
        trained(job_of(plan, stores), DATA, ROWS)
        assert stores["disk"].bytes_written == 0


def test_what_came_back_goes_piece_by_piece_while_it_is_differentiated():
    """A backward pass over what came back holds no more than one over what stayed."""

    def peak(tier: MemoryStore | None) -> int:
        here = None if tier is None else Spills().begin(0, 0, tier, False)
        with Ledger() as ledger:
            x = torch.randn(1 << 14, requires_grad=True)
            record = Record(lambda ts: [ts[0].exp().exp().exp().exp().sum()], [x], here)
            record.forward(keep=True)
            if here is not None:
                here.write()
                here.release()
                here.read(here.allocate())
            ledger.reset_peak()
            record.backward([torch.ones(())])
        return ledger.peak

    tier = store()
    assert peak(tier) <= peak(None) + 8  # the input's shell
    assert tier.bytes_read >= 4 * (4 << 14)
