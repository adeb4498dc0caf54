"""Classes of transformers, unmodified, on the tensor axis under `prepare`, as torchrun would start
the workers, against transformers' own model with torch.optim.AdamW."""

from __future__ import annotations

import pytest
import torch
from hugging_workers import SIZES, batches, count, loss, model_of, optimizer_of, worker
from threads import play
from torch import nn
from torchrun import free_port, started

import outsize
from outsize.collectives import Mesh
from outsize.errors import OutsizeError


def plain(name):
    model = model_of(name)
    optimizer, losses = optimizer_of(model), []
    torch.manual_seed(0)
    for batch in batches():
        optimizer.zero_grad()
        mean = loss(model(**batch), batch) / count(batch)
        mean.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(mean.detach()))
    batch = next(batches())
    with torch.no_grad():
        evaluated = float(loss(model(**batch), batch) / count(batch))
    return losses, evaluated, dict(model.named_parameters())


def test_two_workers_give_the_numbers_of_transformers():
    said = started(worker, 2, (free_port(), free_port()))
    expected = {name: plain(name) for name in SIZES}
    for told in said():
        for name, (losses, evaluated, parameters) in expected.items():
            here = told[name]
            assert here["losses"] == pytest.approx(losses, rel=1e-10)
            assert here["evaluated"] == pytest.approx(evaluated, rel=1e-10)
            assert set(here["weights"]) == set(parameters)
            for key, parameter in parameters.items():
                mine = torch.tensor(here["weights"][key], dtype=torch.float64)
                torch.testing.assert_close(mine, parameter.detach(), rtol=1e-9, atol=1e-10)
            whole = sum(p.numel() for p in parameters.values())
            assert here["held"] < 0.65 * whole
            assert here["spread"].startswith("tensor=2: ")
            assert 0.9 * here["predicted"] <= here["peak"] <= here["predicted"]


def test_with_a_data_axis_and_microbatches(near):
    """Each pair of neighbours has its own rows."""
    models = [model_of("llama") for _ in range(4)]

    def work(world):
        model, place = models[world.rank], world.rank // 2
        job = outsize.prepare(
            model, optimizer_of(model), loss=loss, count=count, clip=0.5, microbatches=2,
            mesh="data=2,tensor=2", zero=2, recompute=("block",),
        )  # fmt: skip
        mine = [
            {k: v[2 * place : 2 * place + 2] if k != "use_cache" else v for k, v in batch.items()}
            for batch in batches()
        ]
        losses = [float(job.step(batch)) for batch in mine]
        weights = {key: w.clone() for key, w in job.weights()}
        job.close()
        return losses, weights

    losses, _, parameters = plain("llama")
    for mine, weights in play(Mesh(data=2, tensor=2), near(work)):
        assert mine == pytest.approx(losses, rel=1e-10)
        for key, parameter in parameters.items():
            torch.testing.assert_close(weights[key], parameter.detach(), rtol=1e-9, atol=1e-10)


def test_what_cannot_be_is_refused(near):
    """Nothing to cut, other rows than a neighbour's, a module's own forward when it has parts."""

    def work(world):
        def step(model, batch, **more):
            job = outsize.prepare(model, "adamw", mesh="tensor=2", **more)
            return job, job.step(batch)

        batch = next(batches())
        with pytest.raises(
            OutsizeError, match=r"tensor is 2, but nothing of .* can be cut: .*cache"
        ):
            step(model_of("llama"), batch | {"use_cache": True})
        with pytest.raises(OutsizeError, match="set its dropout to 0"):
            step(model_of("gpt2", resid_pdrop=0.1), batch)
        with pytest.raises(OutsizeError, match="different rows"):
            step(model_of("llama"), batch | {"labels": batch["labels"] + world.rank})
        model = model_of("llama")
        first, second = (layer.mlp for layer in model.model.layers)
        second.up_proj.weight = first.up_proj.weight
        with pytest.raises(OutsizeError, match=r"0.mlp.up_proj.weight and .* are one weight"):
            step(model, batch)
        model = model_of("llama")
        job, _ = step(model, batch)
        for refused in (lambda: model(**batch), model.state_dict):
            with pytest.raises(OutsizeError, match="this worker's parts"):
                refused()
        job.close()
        with pytest.raises(OutsizeError, match="this worker's parts"):
            model(**batch)
        with pytest.raises(OutsizeError, match="job is closed"):
            job.step(batch)

    play(Mesh(tensor=2), near(work))


def test_what_is_left_whole_is_said(near):
    """Heads that two workers do not divide: attention stays whole."""
    odd = {"num_attention_heads": 3, "num_key_value_heads": 3}
    models = [model_of("llama", **odd) for _ in range(2)]

    def work(world):
        job = outsize.prepare(models[world.rank], "adamw", mesh="tensor=2")
        job.step(next(batches()))
        return job.spread

    for said in play(Mesh(tensor=2), near(work)):
        assert "\n" not in said and "self_attn.o_proj (" in said and "down_proj (" not in said
