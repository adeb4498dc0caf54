"""Hugging Face model classes, unmodified, under `prepare`: as in a plain loop, within a budget."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf

from outsize.errors import OutsizeError
from outsize.train.prepare import prepare


def tokens(seed, *names):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randint(3, 40, (3, 9), generator=g) for name in names}


def causal(seed):
    ids = tokens(seed, "input_ids")["input_ids"]
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def pixels(seed):
    g = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(3, 3, 8, 8, generator=g, dtype=torch.float64),
        "labels": torch.randint(0, 4, (3,), generator=g),
    }


CASES = {
    "gpt2": (
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=24, n_layer=3, n_head=2, vocab_size=40)),
        causal,
    ),
    "llama": (
        lambda: hf.LlamaForCausalLM(
            hf.LlamaConfig(
                hidden_size=24,
                intermediate_size=32,
                num_hidden_layers=3,
                num_attention_heads=2,
                num_key_value_heads=1,
                vocab_size=40,
            )
        ),
        causal,
    ),
    "t5": (
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(
                d_model=24,
                d_kv=8,
                d_ff=32,
                num_layers=2,
                num_heads=2,
                vocab_size=40,
                decoder_start_token_id=0,
            )
        ),
        lambda seed: {**tokens(seed, "input_ids", "labels"), "use_cache": False},
    ),
    "vit": (
        lambda: hf.ViTForImageClassification(
            hf.ViTConfig(
                hidden_size=24,
                num_hidden_layers=3,
                num_attention_heads=2,
                intermediate_size=32,
                image_size=8,
                patch_size=4,
                num_labels=4,
            )
        ),
        pixels,
    ),
}


@pytest.mark.parametrize("recompute", [(), ("block",)])
@pytest.mark.parametrize("name", CASES)
def test_a_class_of_transformers_trains_as_in_a_plain_loop(name, recompute):
    make, sample = CASES[name]
    model = make().double().train()
    twin = copy.deepcopy(model)
    data = [sample(seed) for seed in range(2)]
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(3)
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = twin(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    torch.manual_seed(3)
    own = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    job = prepare(model, own, recompute=recompute)
    assert [float(job.step(batch)) for batch in data] == pytest.approx(losses, rel=1e-10)
    for (path, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert float((a - b).detach().abs().max()) <= 1e-10 * float(b.detach().abs().max()), path


@pytest.mark.parametrize("name", CASES)
def test_its_memory_is_predicted(name):
    make, sample = CASES[name]
    model = make().double().train()
    job = prepare(model, "adamw", "1GiB")
    for seed in range(2):
        job.step(sample(seed))
    measured = max(event.peak for event in job.report.trace.events)
    assert 0.95 * job.forecast.peak <= measured <= job.forecast.peak


def test_a_cache_that_would_remember_is_refused_under_recompute():
    model = CASES["llama"][0]()
    batch = causal(0) | {"use_cache": True}
    with pytest.raises(OutsizeError, match="use_cache=False"):
        prepare(model, "adamw", recompute=("block",)).step(batch)


def test_a_loss_that_reads_the_routers_is_that_of_transformers():
    def made():
        torch.manual_seed(0)
        config = hf.MixtralConfig(
            vocab_size=40, hidden_size=16, intermediate_size=8, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, num_local_experts=4,
            output_router_logits=True, router_aux_loss_coef=1.0,
        )  # fmt: skip
        config._experts_implementation = "eager"  # the other ones know no float64
        return hf.MixtralForCausalLM(config).double()

    model, twin = made(), made()
    optimizer = torch.optim.AdamW(twin.parameters(), 0.01)
    job = prepare(model, torch.optim.AdamW(model.parameters(), 0.01))
    for seed in range(2):
        optimizer.zero_grad()
        want = twin(**causal(seed)).loss
        want.backward()
        optimizer.step()
        torch.testing.assert_close(job.step(causal(seed)), want.detach(), rtol=1e-10, atol=0)
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert float((a - b).abs().max()) <= 1e-10, name
    with pytest.raises(OutsizeError, match="output_router_logits is True"):
        prepare(made(), "adamw", recompute=("block",))
