"""The stable embedding: torch's modules in a plain loop, on any mesh and tier; its first values."""

from __future__ import annotations

import math

import anywhere
import plain
import pytest
import streamed
import torch
from subjects import VOCAB, config_of
from threads import play
from torch.nn import functional as F

from outsize.checkpoint import gguf
from outsize.checkpoint.hub import load, save
from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.optim import AdamW
from outsize.parallel.divide import divide
from outsize.plan import zero
from outsize.plan.spread import pipelined
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.serve.export import export
from outsize.techniques.wirings.stable_embedding import StableEmbedding
from outsize.train.model import subject
from outsize.train.resolve import resolve

ON = {"stable_embedding": True}
STEPS, RATE, CLIP, WIDTH = 2, 1e-2, 0.5, 24


def model_of(family="llama, untied", **changes):
    return streamed.model_of(family, "float64", **ON, **changes)


def test_it_is_torchs_embedding_and_layer_norm_with_xaviers_values():
    model = model_of()
    own = dict(model.prologue.named_parameters())
    assert {name: tuple(p.shape) for name, p in own.items()} == {
        "tokens.weight": (VOCAB, WIDTH), "norm.weight": (WIDTH,), "norm.bias": (WIDTH,),
    }  # fmt: skip
    bound = math.sqrt(6 / (VOCAB + WIDTH))
    most = float(own["tokens.weight"].detach().abs().max())
    assert 0.97 * bound < most <= bound
    with torch.no_grad():
        own["norm.weight"].uniform_(0.5, 2)
        own["norm.bias"].uniform_(-1, 1)
    ids = torch.arange(9)
    x_TD = F.layer_norm(
        F.embedding(ids, own["tokens.weight"]), (WIDTH,), own["norm.weight"], own["norm.bias"]
    )
    context = model.context(ids, (0, 9))
    torch.testing.assert_close(model.prologue(ids, context), x_TD, rtol=1e-12, atol=1e-12)
    plainly = streamed.model_of("llama, untied", "float64")
    plainly.prologue.tokens = torch.nn.Embedding.from_pretrained(x_TD.detach())
    for name, parameter in plainly.named_parameters():
        if not name.startswith("prologue"):
            parameter.data = dict(model.named_parameters())[name].data
    torch.testing.assert_close(model(ids[None]), plainly(ids[None]), rtol=1e-12, atol=1e-12)


WAYS = {
    "zero 3, a tier": lambda one: anywhere.tiers(
        anywhere.plan_of(one, mesh=Mesh(2), shards=zero(3, 2)), every=True
    ),
    "tensor, tokens cut": lambda one: anywhere.plan_of(
        one, mesh=Mesh(tensor=2), sequence_parallel=True
    ),
    "pipeline, rows of tables": lambda one: anywhere.plan_of(
        one, mesh=Mesh(pipeline=2), pipeline=pipelined("1f1b+vocabulary:1")
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_job_is_a_plain_loop(way, monkeypatch):
    anywhere.small(monkeypatch)
    given, data = anywhere.Given(AdamW(weight_decay=0.1)), anywhere.data_of(STEPS)
    plan = WAYS[way](given)

    def run(world):
        model = model_of()
        cuts = divide(model, world, plan)
        with streamed.memory() as stores:
            here = Here(world, stores=stores)
            job = Job(NativeFlow(model, plan), plan, Recipe(given.optimizer, CLIP), here, cuts=cuts)
            for batch in data:
                job.step(batch.rows(*plan.rows_at(job.place)), RATE)
            found = streamed.snapshot(job)[0]
            job.close()
        return found

    *_, model = plain.train(model_of(), data, [RATE] * STEPS, CLIP, 0.1)
    for found in play(plan.mesh, run):
        for name, theirs in model.named_parameters():
            torch.testing.assert_close(found[name], theirs.detach(), rtol=1e-10, atol=1e-10)


def test_a_run_says_it_and_a_directory_keeps_it(tmp_path):
    _, found = subject(resolve(None, ["model=tiny", "stable_embedding=true", "train.steps=1"]))
    assert found.config.embed_norm is not None and found.config.source["stable_embedding"] is True
    model = model_of("llama")
    save(model, tmp_path / "it")
    again, ids = load(tmp_path / "it", torch.float64), torch.arange(9)[None]
    assert torch.equal(again(ids), model(ids))
    with pytest.raises(OutsizeError, match="transformers knows no stable_embedding and"):
        export(tmp_path / "it", "hf", tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(OutsizeError, match="the model has a norm behind its embedding, which is"):
        gguf.check(model.config, "F16")
    with pytest.raises(OutsizeError, match=r"gemma2 multiplies its embedding by 4\.89"):
        StableEmbedding().limited(config_of("gemma2"))
