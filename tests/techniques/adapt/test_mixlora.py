"""Low-rank experts: a plain loop over all experts of all tokens, the balancing loss written out;
files, generation, and what is refused. Their plans: test_plans.py."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise
from types import MethodType

import pytest
import streamed
import torch
from click.testing import CliRunner
from plain import batches, loss_of
from subjects import SEQUENCE, VOCAB, base_plan, config_of
from torch import nn
from torch.nn import functional as F
from verifying import fill

import outsize
from outsize.checkpoint import adapters
from outsize.cli.main import main
from outsize.errors import OutsizeError
from outsize.models.build import build, materialise, segments
from outsize.models.linear import linears
from outsize.optim import AdamW
from outsize.plan import Precision
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Recipe
from outsize.search.candidates import candidates
from outsize.search.request import PlanRequest
from outsize.techniques.adapt.lora import Lora
from outsize.techniques.adapt.mixlora import Expert, MixLora
from outsize.techniques.adapt.unipt import UniPT

EXPERTS, CHOSEN, RANK, ALPHA, BALANCE = 4, 2, 3, 5.0, 0.5
ADAPTER = MixLora(EXPERTS, CHOSEN, RANK, ALPHA, BALANCE)
STEPS, RATE = 3, 1e-2


def model_of(family="llama, untied", adapter=ADAPTER):
    model = build(replace(config_of(family), adapter=adapter), dtype=torch.float64)

    def filled(name, parameter):
        out = torch.empty(parameter.shape, dtype=torch.float64)
        fill(name, out)
        return out

    for segment, _ in segments(model):
        materialise(model, segment, filled)
    return model


def written_out(model, balances):
    """Every expert on every token, by whole weights; what each layer's balancing loss is goes to
    `balances`."""

    def weight(one, e):
        return one.weight + one.beside.b[e] @ one.beside.a[e] * (ALPHA / RANK)

    def product(one, x, e):
        return F.linear(x, weight(one, e), one.bias)

    def forward(mlp, x, ctx):
        scores = (x @ mlp.up.beside.router.score.weight.T).softmax(-1)
        best, where = scores.topk(CHOSEN)
        sent = F.one_hot(where, EXPERTS).sum(1).double()
        y = 0
        for e in range(EXPERTS):
            up = product(mlp.up, x, e)
            gate = up if mlp.gate is None else product(mlp.gate, x, e)
            inner = mlp.activation.forward(gate) * (1 if mlp.gate is None else up)
            share = (best * (where == e)).sum(-1) / best.sum(-1)
            y = y + product(mlp.down, inner, e) * share[:, None]
        balances.append(sum(
            (b - a) * EXPERTS * (sent[a:b].mean(0) * scores[a:b].mean(0)).sum()
            for a, b in pairwise(ctx.bounds)
        ))  # fmt: skip
        return y

    for block in model.blocks:
        block.mlp.forward = MethodType(forward, block.mlp)


def by_hand(family, data):
    model, balances, found = model_of(family), [], []
    written_out(model, balances)
    own = {n: p for n, p in model.named_parameters() if p.requires_grad}
    matrices = [p for p in own.values() if p.ndim > 1]
    optimizer = torch.optim.AdamW(matrices, RATE, betas=(0.9, 0.95), weight_decay=0.1, eps=1e-4)
    assert len(matrices) == len(own)
    for batch in data:
        optimizer.zero_grad()
        balances.clear()
        loss = loss_of(model, batch)
        balance = sum(balances) / len(model.blocks) / batch.weight()
        (loss + BALANCE * balance).backward()
        optimizer.step()
        found.append((loss.item(), {n: p.detach().clone() for n, p in own.items()}))
    return found


@pytest.mark.parametrize("family", ["llama, untied", "gpt2"])
def test_a_job_is_a_plain_loop_with_the_balancing_loss(family):
    data = batches(STEPS, 3, SEQUENCE, VOCAB)
    plan = base_plan(microbatch_rows=2)
    recipe = Recipe(AdamW(weight_decay=0.1, eps=1e-4))
    job = Job(NativeFlow(model_of(family), plan), plan, recipe)
    for batch, (loss, weights) in zip(data, by_hand(family, data), strict=True):
        assert float(job.step(batch, RATE)) == pytest.approx(loss, rel=1e-10)
        found = streamed.snapshot(job)[0]
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-10, atol=1e-10)


def test_files_give_the_same_and_tokens_are_those_of_the_whole_sequence(tmp_path):
    outsize.save(build(config_of("llama, untied"), 3), tmp_path / "base")
    model = outsize.load(tmp_path / "base")
    outsize.adapt(model, "mixlora", experts=4, rank=3, attention=["q", "v"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".b", "b.weight")):
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(2))
    outsize.save(model, tmp_path / "adapter")
    again = outsize.load(tmp_path / "adapter")
    assert again.config.adapter == MixLora(4, 2, 3, attention=("attention.q", "attention.v"))
    ids = torch.arange(9)[None]
    assert torch.equal(again(ids), model(ids))
    assert not torch.equal(outsize.load(tmp_path / "base")(ids), model(ids))
    tokens = outsize.generate(model, [1, 2, 3], 5)
    whole = [1, 2, 3]
    for _ in range(5):
        whole.append(int(model(torch.tensor([whole]))[0, -1].argmax()))
    assert [1, 2, 3, *tokens][-5:] == whole[-5:]
    for kind in ("hf", "gguf"):
        words = ["export", str(tmp_path / "adapter"), "--to", kind, "--into", str(tmp_path / "no")]
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 2 and "no weight of the model can take up" in done.output
    plain = adapters.remove(model)
    assert torch.equal(plain(ids), outsize.load(tmp_path / "base")(ids))


def test_rows_that_the_device_alone_counts_go_the_same_ways():
    mlp, sizes = model_of().blocks[0].mlp, [3, 0, 5, 3]
    found = []
    for own in (sizes, torch.tensor(sizes)):
        x = torch.linspace(-1, 1, 11 * 24, dtype=torch.float64).view(11, 24).requires_grad_()
        y = Expert(mlp)(x, own)
        learnt = [p for n, p in mlp.named_parameters() if n.endswith((".a", ".b"))]
        found.append([y, *torch.autograd.grad((y * y).sum(), [x, *learnt])])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("adapter", "whole"),
    [(ADAPTER, True), (replace(ADAPTER, balance=0.0), False), (UniPT(4), True), (Lora(2), False)],
)
def test_a_search_leaves_documents_whole_where_an_adapter_needs_them(adapter, whole):
    config = replace(config_of("llama"), adapter=adapter)
    request = PlanRequest(8, 256, Precision.named("float32"), AdamW(), whole=config.whole_documents)
    plans = list(candidates(request, len(config.layers) + 2))
    parts = [plan.mlp_tile or plan.settings.get("sequence_chunk") for plan in plans]
    assert any(parts) is not whole


def test_what_is_refused():
    data = batches(1, 3, SEQUENCE, VOCAB)[0]
    cut = base_plan(mlp_tile=6, microbatch_rows=3)
    with pytest.raises(OutsizeError, match="balance is summed over whole documents"):
        Job(NativeFlow(model_of(), cut), cut, Recipe(AdamW())).step(data, RATE)
    flow = NativeFlow(model_of(), base_plan(microbatch_rows=3))
    part = flow.part(data, 0, 3)
    others = replace(part, lengths=tuple(2 * n for n in part.lengths))  # as a context axis has them
    assert (flow._context(part, 0.5).factor, flow._context(others, 0.5).factor) == (0.5, None)
    without = model_of(adapter=replace(ADAPTER, balance=0.0))
    whole = base_plan(microbatch_rows=3)
    losses = [
        float(Job(NativeFlow(copy.deepcopy(without), p), p, Recipe(AdamW())).step(data, RATE))
        for p in (cut, whole)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    with pytest.raises(OutsizeError, match="chosen is 5; expected 4 at most"):
        model_of(adapter=MixLora(4, 5, 3))
    with pytest.raises(OutsizeError, match="the model has experts of its own"):
        model_of("mixtral")
    with pytest.raises(OutsizeError, match="rank: 25 is above the width 24"):
        model_of(adapter=MixLora(4, 2, 25))
    with pytest.raises(OutsizeError, match="changes more than layers and branches"):
        outsize.adapt(nn.Sequential(nn.Linear(4, 4)), "mixlora")
    assert all(one.beside is not None for _, one in linears(model_of()))
