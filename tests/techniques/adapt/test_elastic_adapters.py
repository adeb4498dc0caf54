"""Elastic adapters: a plain loop over slices of A and B, and sub-adapters that peft reads."""

from __future__ import annotations

from dataclasses import replace

import anywhere
import peft
import pytest
import streamed
import torch
from adapting import pretrained
from click.testing import CliRunner
from float64 import Float64
from plain import loss_of
from subjects import config_of
from threads import play
from verifying import fill

import outsize
from outsize.checkpoint import adapters
from outsize.cli.main import main
from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.models.build import build, materialise, segments
from outsize.models.linear import linears
from outsize.optim import AdamW
from outsize.parallel.divide import divide
from outsize.plan import Pipelined, zero
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.techniques.adapt.dora import Dora
from outsize.techniques.adapt.lora import Lora
from outsize.techniques.elastic_adapters import ElasticAdapters

RANKS, STEPS, SEED, RATE = (4, 3, 1), 2, 3, 1e-2
ADAPTER = Lora(4, 6.0, ("attention.q", "mlp"))
SAID = {"elastic-adapters": ElasticAdapters(RANKS)}


def model_of(adapter=ADAPTER):
    model = build(replace(config_of("llama"), adapter=adapter), dtype=torch.float64)

    def filled(name, parameter):
        out = torch.empty(parameter.shape, dtype=torch.float64)
        fill(name, out)
        return out

    for segment, _ in segments(model):
        materialise(model, segment, filled)
    return model


def by_hand(data):
    """The adapters after each step of a loop that slices A and B itself, and all ranks drawn."""
    model, drawn, found = model_of(), [], []
    names = {one.beside: name for name, one in linears(model) if one.beside is not None}

    def sliced(beside, args, _):
        one, x = args
        rank = SAID["elastic-adapters"].rank(SEED, len(found), f"{names[beside]}.beside")
        drawn.append(rank)
        a, b = beside.a.weight[:rank], beside.b.weight[:, :rank]
        return one.plain(x) + x @ a.t() @ b.t() * beside.scale

    for beside in names:
        beside.register_forward_hook(sliced)
    own = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(own.values(), RATE, betas=(0.9, 0.95), weight_decay=0.1)
    for batch in data:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(own.values(), 0.5)
        optimizer.step()
        found.append({n: p.detach().clone() for n, p in own.items()})
    return found, drawn


WAYS = {
    "zero 3": {"mesh": Mesh(2), "shards": zero(3, 2)},
    "tensor": {"mesh": Mesh(tensor=2)},
    "pipeline": {"mesh": Mesh(pipeline=2), "pipeline": Pipelined("1f1b")},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_job_is_a_plain_loop_over_slices(way):
    plan = streamed.plan_of(
        "float64", rows=4, microbatch_rows=1, approximate=("elastic-adapters",), **WAYS[way]
    )
    data = anywhere.data_of(STEPS)

    def run(world):
        model = model_of()
        cuts = divide(model, world, plan)
        recipe = Recipe(AdamW(weight_decay=0.1), 0.5, techniques=SAID, seed=SEED)
        job = Job(NativeFlow(model, plan), plan, recipe, Here(world), cuts=cuts)
        found = []
        for batch in data:
            job.step(batch.rows(*plan.rows_at(job.place)), RATE)
            found.append(streamed.snapshot(job)[0])
        job.close()
        return found

    expected, drawn = by_hand(data)
    assert set(drawn) == set(RANKS)
    for found in play(plan.mesh, run):
        for mine, theirs in zip(found, expected, strict=True):
            for key in theirs:
                torch.testing.assert_close(mine[key], theirs[key], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("stabilised", [False, True])
def test_a_sub_adapter_is_the_slice_and_peft_reads_it(tmp_path, stabilised):
    facts = config_of("llama")
    outsize.save(build(facts, 3, torch.float64), tmp_path / "base")
    model = outsize.load(tmp_path / "base")
    outsize.adapt(model, {"lora": {
        "rank": 4, "alpha": 6.0, "targets": ["q", "mlp"], "rank_stabilised": stabilised,
    }})  # fmt: skip
    with torch.no_grad():
        for _, one in linears(model):
            if one.beside is not None:
                one.beside.b.weight.normal_(std=0.2, generator=torch.Generator().manual_seed(2))
    outsize.save(model, tmp_path / "super")
    words = ["export", str(tmp_path / "super"), "--to", "peft", "--rank", "3"]
    done = CliRunner().invoke(main, [*words, "--into", str(tmp_path / "sub")])
    assert done.exit_code == 0 and "other logits" not in done.output, done.output
    ids = torch.randint(0, facts.vocab, (2, 9), generator=torch.Generator().manual_seed(1))
    model = adapters.load(tmp_path / "super", torch.float64)
    for _, one in linears(model):
        if one.beside is not None:
            one.beside.used = 3
    torch.set_default_dtype(torch.float64)
    try:
        with Float64():
            theirs = peft.PeftModel.from_pretrained(pretrained(tmp_path / "base"), tmp_path / "sub")
            torch.testing.assert_close(model(ids), theirs(ids).logits, rtol=1e-10, atol=1e-10)
    finally:
        torch.set_default_dtype(torch.float32)
    assert theirs.peft_config["default"].r == 3


def test_what_cannot_be_is_refused():
    plan = streamed.plan_of("float64", rows=4, approximate=("elastic-adapters",))

    def job(adapter, ranks):
        recipe = Recipe(AdamW(), techniques={"elastic-adapters": ElasticAdapters(ranks)})
        Job(NativeFlow(model_of(adapter), plan), plan, recipe)

    for ranks in ((3, 2), (5, 4), (4, 0), ()):
        with pytest.raises(OutsizeError, match="of which 4 is the largest"):
            job(Lora(4), ranks)
    for ranks in ((4,), (4, 2, 2)):
        with pytest.raises(OutsizeError, match="expected two or more, each once"):
            job(Lora(4), ranks)
    with pytest.raises(OutsizeError, match="the model has no low-rank adapter"):
        job(Dora(4), (4, 2))
    with pytest.raises(OutsizeError, match="no adapter of which a lower rank is a part"):
        adapters.narrowed(model_of(Dora(4)), 2)
