"""Local learning against a plain loop: groups by hand, detached between, an optimizer each."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import plain
import pytest
import torch
from subjects import ROWS, VOCAB, base_plan, config_of
from torch import nn
from torch.nn import functional as F

from outsize.errors import OutsizeError
from outsize.memory import Ledger
from outsize.memory.ledger import OverBudget
from outsize.models.build import build
from outsize.optim import AdamW
from outsize.plan import Local, Precision, Rest, Stage
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.making import NativeModel, make_job
from outsize.runtime.recipe import Here, Recipe

STEPS, LR, CLIP = 4, 1e-2, 0.3
UNTIED = {"tie_word_embeddings": False}


@pytest.fixture(scope="module")
def data():
    return plain.batches(STEPS, ROWS, 20, VOCAB)


def plan_of(kind="momentum", groups=2, **changes):
    local = Local(groups, kind, 0.9)
    return base_plan(**{"approximate": ("local-learning",), "local": local, **changes})


def model_of(family="llama", layers=3):
    key = "n_layer" if family == "gpt2" else "num_hidden_layers"
    return build(config_of(family, **UNTIED, **{key: layers}), seed=1, dtype=torch.float64)


def job_of(plan, family="llama", layers=3, **changes):
    fill = changes.pop("fill", None)
    model = NativeModel(model_of(family, layers), fill=fill)
    return make_job(model, plan, Recipe(AdamW(weight_decay=0.1), CLIP), Here(**changes))


def cuts_of(layers, groups):
    return {(3, 2): [0, 2, 3], (5, 3): [0, 2, 4, 5], (3, 3): [0, 1, 2, 3]}[layers, groups]


def optimizer_of(parameters):
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))


class Twin:
    """The plain loop. Whole batches, autograd, a list of modules and one optimizer a group."""

    def __init__(self, model, kind, cuts, momentum=0.9):
        self.model, self.kind, self.momentum = copy.deepcopy(model), kind, momentum
        blocks = self.model.blocks
        self.groups = [blocks[a:b] for a, b in itertools.pairwise(cuts)]
        self.ends, self.learned, self.means = [], [], []
        for group in self.groups[1:]:
            self.ends.append(copy.deepcopy(self.model.epilogue))
            self.learned.append(copy.deepcopy(group[0]) if kind != "head" else None)
            mean = copy.deepcopy(group[0]) if kind == "momentum" else None
            self.means.append(None if mean is None else mean.requires_grad_(False))
        self.ends.append(self.model.epilogue)
        self.trained = []
        for i, group in enumerate(self.groups):
            parts = [group, self.ends[i]]
            parts += [self.model.prologue] if i == 0 else []
            parts += [m for m in self.learned[i : i + 1] if m is not None]
            self.trained.append([p for part in parts for p in part.parameters()])
        self.optimizers = [optimizer_of(parameters) for parameters in self.trained]

    def local_loss(self, i, x, context, targets):
        for block in self.groups[i]:
            x = block(x, context)
        y = x
        if i < len(self.learned):
            branches = [m for m in (self.learned[i], self.means[i]) if m is not None]
            y = sum(m(x, context) for m in branches) if branches else x
        logits = self.ends[i].logits(self.ends[i](y, context))
        return F.cross_entropy(logits, targets, ignore_index=-100), x.detach()

    def step(self, batch):
        context = self.model.context(batch.positions().reshape(-1), batch.flat_bounds())
        targets, losses = batch.targets_BS.reshape(-1), []
        x = self.model.prologue(batch.ids_BS.reshape(-1), context)
        before = [{n: p.detach().clone() for n, p in g[0].named_parameters()} for g in self.groups]
        for i, optimizer in enumerate(self.optimizers):
            optimizer.zero_grad()
            loss, x = self.local_loss(i, x, context, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(self.trained[i], CLIP)
            optimizer.step()
            losses.append(float(loss.detach()))
        for mean, block in zip(self.means, before[1:], strict=True):
            for name, p in mean.named_parameters() if mean is not None else ():
                p.data = self.momentum * p.data + (1 - self.momentum) * block[name]
        return losses


def run(job, data):
    losses = []
    for batch in data:
        job.step(batch, LR)
        losses.append(job.method.losses)
    return losses


@pytest.mark.parametrize(
    ("kind", "family", "layers", "groups", "changes"),
    [
        ("momentum", "llama", 3, 2, {"microbatch_rows": ROWS}),
        ("momentum", "llama", 5, 3, {"order": "layer"}),
        ("momentum", "gpt2", 3, 3, {"microbatch_rows": 2}),
        ("momentum", "gemma2", 3, 2, {"split_backward": True, "loss_chunk": 7}),
        ("block", "llama", 3, 2, {}),
        ("head", "llama", 3, 2, {}),
    ],
)
def test_steps_equal_the_plain_loop(kind, family, layers, groups, changes, data):
    stages = per_segment(layers + 2, ("block",) if family == "gpt2" else ())
    plan = plan_of(kind, groups, segments=layers + 2, stages=stages, **changes)
    job = job_of(plan, family, layers)
    twin = Twin(model_of(family, layers), kind, cuts_of(layers, groups))
    expected = [twin.step(batch) for batch in data]
    got = run(job, data)
    assert torch.allclose(*(torch.tensor(x).double() for x in (got, expected)), rtol=1e-10)
    assert min(abs(a - b) for a, b in zip(expected[0], expected[-1], strict=True)) > 1e-3
    weights, states = dict(job.weights()), dict(job.optimizer_state())
    assert weights.keys() == dict(twin.model.named_parameters()).keys()
    for name, parameter in twin.model.named_parameters():
        assert torch.allclose(weights[name], parameter, rtol=1e-9, atol=1e-11), name
    for i, mean in enumerate(twin.means):
        for name, p in mean.named_parameters() if mean is not None else ():
            mine = states[f"auxiliary.{i}.average.{name}.value"]
            assert torch.allclose(mine, p, rtol=1e-9, atol=1e-11), name
            begin = model_of(family, layers).blocks[cuts_of(layers, groups)[i + 1]]
            assert not torch.equal(p, begin.get_parameter(name)), "the average must move"


def test_an_evaluation_is_the_whole_model_s(data):
    job = job_of(plan_of())
    job.step(data[0], LR)
    total, count = job.evaluate(data[1], ROWS)
    model = model_of()
    with torch.no_grad():
        for name, weight in job.weights():
            model.get_parameter(name).copy_(weight)
        want = float(plain.loss_of(model, data[1]))
    assert total / count == pytest.approx(want, rel=1e-10)


def test_an_evaluation_is_within_the_budget(data):
    ledger = Ledger()
    job = job_of(plan_of(), ledger=ledger)
    job.step(data[0], LR)
    ledger.budget = ledger.total
    with pytest.raises(OverBudget):
        job.evaluate(data[1], ROWS)
    ledger.budget = None
    before = job.evaluate(data[1], ROWS)
    assert job.evaluate(data[1], ROWS) == before and ledger.live["data"] == 0


def test_it_goes_on_bitwise_from_saved_weights_states_and_counts(data):
    for named in ("float64", "bfloat16"):
        plan = plan_of(precision=Precision.named(named))
        whole = job_of(plan)
        expected = run(whole, data)
        first = job_of(plan)
        losses = run(first, data[:2])
        weights = {n: w.clone() for n, w in first.weights()}
        states = {n: s.clone() for n, s in first.optimizer_state()}
        assert set(states) == set(first.state_names())
        other = job_of(plan, fill=lambda name, out, kept=weights: out.copy_(kept[name]))
        other.load(None, lambda name, out, kept=states: out.copy_(kept[name]))
        other.restore_counts(first.update_counts())
        assert losses + run(other, data[2:]) == expected
        for one, two in ((whole.weights(), other.weights()),
                         (whole.optimizer_state(), other.optimizer_state())):  # fmt: skip
            assert all(
                n == m and torch.equal(a, b) for (n, a), (m, b) in zip(one, two, strict=True)
            )


def test_a_small_step_moves_an_average_of_bfloat16(data):
    plan = plan_of(precision=Precision.named("bfloat16"), local=Local(2, "momentum", 0.995))
    job = job_of(plan)
    name = "auxiliary.0.average.mlp.up.weight.value"
    before = dict(job.optimizer_state())[name].clone()
    next_block = dict(job.weights())["blocks.2.mlp.up.weight"]
    next_block.mul_(1.01)
    job.step(data[0], 0.0)
    moved = dict(job.optimizer_state())[name] - before
    assert moved.dtype == torch.float32
    assert torch.allclose(moved, before * 0.01 * 0.005, rtol=1e-2, atol=1e-9)


def test_activations_of_one_group_exist_at_once(data):
    layers, ledger, other = 8, Ledger(), Ledger()
    stages = per_segment(layers + 2)
    plan = plan_of("head", 4, segments=layers + 2, stages=stages, microbatch_rows=ROWS)
    job = job_of(plan, layers=layers, ledger=ledger)
    exact = replace(plan, approximate=())
    end_to_end = Job(
        NativeFlow(model_of(layers=layers), exact), exact, Recipe(AdamW()), Here(ledger=other)
    )
    for each in (job, end_to_end):
        each.step(data[0], LR)
    own, whole = (
        j.report.trace.peak() - sum(j.report.trace.events[-1].live.values())
        for j in (job, end_to_end)
    )
    assert own < 0.45 * whole
    kept = job.report.trace.events[-1].live
    assert kept["device/activations"] <= 4 * 8, "four losses; what is handed on is let go"
    stages_seen = {event.stage for event in job.report.trace.events}
    assert stages_seen == {*range(layers + 2 + 3)}


def test_a_cut_off_step_is_not_gone_on_from(data):
    job = job_of(plan_of())
    head = job.flow.model.epilogue
    head.norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        job.step(data[0], LR)
    head.norm._forward_hooks.clear()
    with pytest.raises(OutsizeError, match=r"cut off .* load a checkpoint"):
        job.step(data[0], LR)
    assert not job.method.microbatches.under_way


def test_what_is_refused():
    with pytest.raises(OutsizeError, match=r"no auxiliary networks; make its job with"):
        Job(NativeFlow(model_of(), plan_of()), plan_of(), Recipe(AdamW()))
    with pytest.raises(OutsizeError, match="the head is tied"):
        make_job(NativeModel(build(config_of("llama"), seed=1)), plan_of(), Recipe(AdamW()))
    with pytest.raises(OutsizeError, match="groups is 4, but the model has 3 blocks"):
        job_of(plan_of(groups=4))
    cut = (Stage(0, 1), Stage(1, 2), Stage(2, 4), Stage(4, 5))
    with pytest.raises(OutsizeError, match=r"segments \[2, 4\).* cuts the model at 3"):
        job_of(plan_of(stages=cut))
    below = tuple(replace(s, rest=Rest(optimizer="disk")) for s in per_segment(5))
    with pytest.raises(OutsizeError, match=r"the plan has states below the device.* do not go"):
        plan_of(stages=below)
    with pytest.raises(OutsizeError, match="local-learning and sequence_chunk both change how a"):
        plan_of(stages=per_segment(5, ("block",)), sequence_chunk=4)
    for wrong, what in (({"groups": 1}, "groups is 1"), ({"momentum": 1.0}, "momentum is 1.0"),
                        ({"auxiliary": "heads"}, "auxiliary is 'heads'")):  # fmt: skip
        with pytest.raises(OutsizeError, match=f"local.{what}"):
            Local(**wrong)
