"""Zeroth-order steps against the plain loop: whole model, perturbed in place, updated at once."""

from __future__ import annotations

import copy
from dataclasses import replace

import plain
import pytest
import torch
from subjects import ROWS, VOCAB, base_plan, config_of
from torch import nn

from outsize.data import Batch
from outsize.errors import OutsizeError
from outsize.memory import Ledger
from outsize.memory.disk import DiskStore
from outsize.memory.store import MemoryStore
from outsize.models.build import build
from outsize.models.random import normal
from outsize.plan import Precision, Rest, Stream
from outsize.plan.plan import per_segment
from outsize.runtime import AdoptedFlow, Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.runtime.special.forwards import Zeroth

STEPS = 4
SETTINGS = Zeroth(lr=2e-3, epsilon=1e-3, weight_decay=0.1, seed=5)
BF16 = Precision("bfloat16", None, "bfloat16", "bfloat16")
BOTH = ("zeroth-order", "bfloat16-weights")


@pytest.fixture(scope="module")
def data():
    return plain.batches(STEPS, ROWS, 20, VOCAB)


def plan_of(named="float64", **changes):
    return base_plan(named, **{"approximate": ("zeroth-order",), **changes})


def below(plan, tier="host", **stream):
    stages = tuple(replace(stage, rest=Rest(tier)) for stage in plan.stages)
    return replace(plan, stages=stages, stream=Stream(**stream))


RATES = [SETTINGS.lr * factor for factor in (1.0, 0.5, 2.0, 0.25)]  # of a schedule


def mezo(model, batches, loss_of, settings=SETTINGS, rates=None):
    """The plain loop: z of a whole parameter at a time; gives losses and the trained copy."""
    model = copy.deepcopy(model).eval()
    losses, rates = [], rates or [settings.lr] * len(batches)
    for step, (batch, lr) in enumerate(zip(batches, rates, strict=True)):
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        z = {
            n: torch.from_numpy(normal(settings.seed, f"direction {step} {n}", 0, p.numel()))
            .view(p.shape)
            .to(p.dtype)
            for n, p in named
        }
        start, found = {n: p.detach().clone() for n, p in named}, []
        with torch.no_grad():
            for sign in (1, -1):
                for n, p in named:
                    p.copy_(start[n] + sign * settings.epsilon * z[n])
                found.append(float(loss_of(model, batch)))
            slope = (found[0] - found[1]) / (2 * settings.epsilon)
            for n, p in named:
                decay = settings.weight_decay * start[n] if p.ndim > 1 else 0.0
                p.copy_(start[n] - lr * (slope * z[n] + decay))
        losses.append(sum(found) / 2)
    return losses, model


def native(plan, family="llama", stores=None):
    model = build(config_of(family), seed=1, dtype=torch.float64)
    return Job(NativeFlow(model, plan), plan, Recipe(SETTINGS), Here(stores=stores or {}))


def results(job, data, rates=(None,) * STEPS):
    losses = [float(job.step(batch, lr)) for batch, lr in zip(data, rates, strict=True)]
    return losses, {name: weight.clone() for name, weight in job.weights()}


def same(one, other):
    return one[0] == other[0] and all(torch.equal(one[1][n], other[1][n]) for n in one[1])


@pytest.mark.parametrize("family", ["llama", "llama, untied", "gemma2", "deepseek_v3"])
def test_losses_and_weights_equal_the_plain_loop(family, data):
    model = build(config_of(family), seed=1, dtype=torch.float64)
    losses, expected = mezo(model, data, plain.loss_of, rates=RATES)
    got, weights = results(native(plan_of(), family), data, RATES)
    assert got == pytest.approx(losses, rel=1e-10)
    assert abs(got[0] - got[-1]) > 1e-4, "the test must train"
    for name, parameter in expected.named_parameters():
        assert torch.allclose(weights[name], parameter, rtol=1e-10, atol=1e-12), name


@pytest.mark.parametrize(
    ("family", "stream", "changes"),
    [
        ("llama", {}, {}), ("llama", {"resident": 3, "returned": 2}, {"microbatch_rows": 3}),
        ("llama, untied", {"policy": "lru"}, {}),
    ],
)  # fmt: skip
def test_streamed_is_bitwise_resident_and_weights_pass_once(family, stream, changes, data):
    plan = plan_of(**changes)
    resident = native(plan, family)
    store = MemoryStore("host", 1 << 20)
    streamed = native(below(plan, **stream), family, {"host": store})
    before = store.bytes_read, store.bytes_written
    losses = [float(streamed.step(batch)) for batch in data]
    moved = store.bytes_read - before[0], store.bytes_written - before[1]
    total = 8 * sum(table.numel for table in streamed.placement.chunks.tables)
    # Before the first step what the pool begins with is fetched; later steps find it there.
    assert STEPS * total / 2 < moved[0] <= STEPS * total + streamed.placement.pool
    assert moved[1] == STEPS * total
    assert losses == [float(resident.step(batch)) for batch in data]
    pairs = zip(streamed.weights(), resident.weights(), strict=True)
    assert all(n == m and torch.equal(a, b) for (n, a), (m, b) in pairs)
    assert streamed.evaluate(data[0], ROWS) == resident.evaluate(data[0], ROWS)


def test_evaluation_is_that_of_the_updated_weights(data, tmp_path):
    disk = DiskStore("disk", [tmp_path], 1 << 20)
    job = native(below(plan_of(), "disk"), stores={"disk": disk})
    model = build(config_of("llama"), seed=1, dtype=torch.float64)
    _, expected = mezo(model, data[:2], plain.loss_of)
    job.step(data[0])
    job.step(data[1])
    total, count = job.evaluate(data[2], ROWS)
    want = float(plain.loss_of(expected, data[2]).detach())
    assert total / count == pytest.approx(want, rel=1e-10)
    disk.close()


class Odd(nn.Module):
    """Blocks with glue that computes between them, one weight used at both ends, and dropout."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCAB, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Dropout(0.5), nn.Linear(24, 16))
            for _ in range(3)
        )
        self.gain = nn.Parameter(torch.full((16,), 0.7))

    def forward(self, ids, targets):
        x = self.table(ids)
        for block in self.blocks:
            x = x + self.gain * block(x)
        return nn.functional.cross_entropy(x @ self.table.weight.t(), targets)


def odd_loss(model, batch):
    return model(*batch)


@pytest.mark.parametrize("tier", [None, "host"])
def test_an_adopted_module_equals_the_plain_loop(tier):
    torch.manual_seed(3)
    model = Odd().double()
    model.blocks[1].requires_grad_(False)
    frozen = {n: p.detach().clone() for n, p in model.blocks[1].named_parameters()}
    draw = [(torch.randint(0, VOCAB, (6,)), torch.randint(0, VOCAB, (6,))) for _ in range(STEPS)]
    losses, expected = mezo(model, draw, odd_loss)
    plan = replace(plan_of(), rows=1)
    store = MemoryStore("host", 1 << 20)
    blocks = [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)]
    flow = AdoptedFlow(model, blocks, plan if tier is None else below(plan), lambda out, _: out)
    job = Job(flow, flow.plan, Recipe(SETTINGS), Here(stores={"host": store}))
    start = store.bytes_written
    got, weights = results(job, draw)
    assert got == pytest.approx(losses, rel=1e-10)
    for name, parameter in expected.named_parameters():
        assert torch.allclose(weights[name], parameter, rtol=1e-10, atol=1e-12), name
    assert all(torch.equal(weights[f"blocks.1.{n}"], w) for n, w in frozen.items())
    assert model.training, "the mode is given back"
    if tier:
        moving = sum(p.numel() for p in expected.parameters() if p.requires_grad)
        assert store.bytes_written - start == 8 * moving * (STEPS + 1), "frozen: never written"
    job.close()
    whole = float(odd_loss(model.eval(), draw[0]).detach())
    if tier is None:
        assert whole == pytest.approx(float(odd_loss(expected.eval(), draw[0]).detach()), rel=1e-10)


def test_bfloat16_weights_and_a_float32_master(data):
    """Against a loop that rounds where the precision says: the sum w + eps z, the mirror image, and
    the updated weight, each once. Losses of such short rows agree to a few roundings."""
    for precision, held in ((BF16, torch.bfloat16), (Precision.named("bfloat16"), torch.float32)):
        plan = plan_of(precision=precision, approximate=BOTH, microbatch_rows=ROWS)
        settings = replace(SETTINGS, lr=0.05, epsilon=1e-2, weight_decay=0.0)
        model = build(config_of("llama"), seed=1, dtype=held)
        flow = NativeFlow(copy.deepcopy(model), plan)
        job = Job(flow, plan, Recipe(settings))
        losses, slopes = [], []
        for batch in data[:2]:
            losses.append(float(job.step(batch)))
            slopes.append(job.method.slope)
        weights = dict(job.weights())
        expected, named = [], dict(copy.deepcopy(model).named_parameters())
        twin = copy.deepcopy(model).bfloat16()
        for step, batch in enumerate(data[:2]):
            z = {
                n: torch.from_numpy(normal(5, f"direction {step} {n}", 0, p.numel())).view(p.shape)
                for n, p in named.items()
            }
            found = []
            with torch.no_grad():
                plus = {n: (p.double() + 1e-2 * z[n]).bfloat16() for n, p in named.items()}
                for sign in (1, -1):
                    for n, p in twin.named_parameters():
                        two = 2 * named[n].double() - plus[n].double()
                        p.copy_(plus[n] if sign == 1 else two.bfloat16())
                    found.append(float(loss_bf16(twin, batch)))
                for n, p in named.items():
                    p.copy_((p.double() - 0.05 * slopes[step] * z[n]).to(held))
            expected.append(sum(found) / 2)
            mine = (found[0] - found[1]) / 2e-2
            assert mine == pytest.approx(slopes[step], abs=0.2), "a few roundings of a loss"
        assert losses == pytest.approx(expected, rel=2e-3)
        assert all(torch.equal(weights[n], p) for n, p in named.items()), "bitwise"
        assert all(w.dtype == held for w in weights.values())


def loss_bf16(model, batch: Batch):
    context = model.context(batch.positions().reshape(-1), batch.flat_bounds())
    logits = model.epilogue.logits(model.hidden(batch.ids_BS.reshape(-1), context))
    return nn.functional.cross_entropy(
        logits.float(), batch.targets_BS.reshape(-1), ignore_index=-100
    )


def test_memory_is_the_pool_one_stage_and_no_activations(data):
    ledger, plan = Ledger(), plan_of(microbatch_rows=1)
    model = build(config_of("llama, untied", num_hidden_layers=12), seed=1, dtype=torch.float64)
    plan = replace(plan, segments=14, stages=per_segment(14))
    store = MemoryStore("host", 1 << 22)
    here = Here(ledger=ledger, stores={"host": store})
    job = Job(NativeFlow(model, below(plan)), below(plan), Recipe(SETTINGS), here)
    del model
    job.step(data[0])
    total = 8 * sum(table.numel for table in job.placement.chunks.tables)
    largest = 8 * max(table.numel for table in job.placement.chunks.tables)
    live, peak = ledger.live, job.report.trace.peak()
    assert live["parameters"] == live["gradients"] == live["optimizer"] == 0
    assert live["window"] == job.placement.pool <= 2 * (largest + 4096)
    assert live["workspace"] <= largest + 3 * 4096
    hidden = 2 * ROWS * 20 * 24 * 8  # of every microbatch and sign
    assert peak - live["window"] - live["workspace"] < 6 * hidden
    assert peak < total / 2


def test_it_goes_on_bitwise_from_saved_weights_and_counts(data):
    whole = native(plan_of())
    expected = results(whole, data)
    first = native(plan_of())
    losses = [float(first.step(batch)) for batch in data[:2]]
    saved = {name: weight.clone() for name, weight in first.weights()}
    other = native(plan_of())
    other.load(lambda name, out: out.copy_(saved[name]), lambda name, out: None)
    other.restore_counts(first.update_counts())
    losses += [float(other.step(batch)) for batch in data[2:]]
    assert same((losses, {n: w.clone() for n, w in other.weights()}), expected)


class Broken(MemoryStore):
    """Reads that fail once they are told to."""

    failing = False

    def read(self, place, out, at=0):
        if self.failing:
            raise OutsizeError("tier 'host': no more")
        super().read(place, out, at)


def test_a_step_that_is_cut_off_is_not_gone_on_from(data):
    store = Broken("host", 1 << 20)
    job = native(below(plan_of()), stores={"host": store})
    job.step(data[0])
    store.failing = True
    with pytest.raises(OutsizeError, match="no more"):
        job.step(data[1])
    store.failing = False
    with pytest.raises(OutsizeError, match=r"cut off .* load a checkpoint"):
        job.step(data[1])


def test_losses_that_are_not_finite_leave_the_weights(data):
    job = native(plan_of())
    job.step(data[0])
    before = {name: weight.clone() for name, weight in job.weights()}
    job.load(lambda n, out: out.copy_(before[n]).mul_(float("nan")), lambda n, out: None)
    with pytest.raises(OutsizeError, match="loss is nan and nan on either side"):
        job.step(data[0])
    job.load(lambda n, out: out.copy_(before[n]), lambda n, out: None)
    job.step(data[0])


def test_what_is_refused(data):
    model = build(config_of("llama"), seed=1, dtype=torch.float64)
    exact = base_plan()
    with pytest.raises(OutsizeError, match="name zeroth-order there"):
        Job(NativeFlow(model, exact), exact, Recipe(Zeroth()))
    with pytest.raises(OutsizeError, match=r"epsilon is 0.0; expected a positive"):
        Zeroth(epsilon=0.0)
    for changes, what in (
        ({"stages": per_segment(5, ("block",))}, "recompute"),
        ({"split_backward": True}, "split_backward"),
        ({"update": "behind"}, "update: behind"),
        ({"stages": tuple(replace(s, rest=Rest(optimizer="x")) for s in exact.stages)}, "states"),
    ):
        with pytest.raises(OutsizeError, match=f"the plan has {what}.* do not go together"):
            plan_of(**changes)


def test_what_trains_is_fixed(data):
    """The change that a step has found is made in the next one."""
    job = native(plan_of())
    job.step(data[0])
    head = job.owners["blocks.0.mlp.up.weight"]
    head.requires_grad_(False)
    with pytest.raises(OutsizeError, match=r"up.weight': requires_grad is False, and was True"):
        job.step(data[1])
    head.requires_grad_(True)
    job.step(data[1])


def test_repeated_steps_lower_the_loss(data):
    job = native(plan_of(microbatch_rows=ROWS))
    first = float(job.step(data[0], 0.0))
    for _ in range(40):
        last = float(job.step(data[0], 6e-3))
    assert last < first - 0.15
