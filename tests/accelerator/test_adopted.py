"""Models of somebody's own under `prepare`, on the device of the tests: the CPU's numbers in every
order of streams, with dropout from the device's own generator."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import casting
import pytest
import strict
import torch
from cases import CPU, device, on_host, some
from torch import Tensor, nn
from torch.nn import functional as F

from outsize import accelerator, prepare

STEPS, VOCAB = 3, 11


@dataclass(frozen=True)
class Model:
    """make: with the same values each time. batch: of a step. loss: of its output."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], Tensor] | None = None


class Dropping(nn.Module):
    """Blocks with dropout, a residual each."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 24), nn.GELU(), nn.Dropout(0.3))
            for _ in range(3)
        )
        self.back = nn.Linear(24, 16)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = x + self.back(block(x))
        return self.head(x)


def tokens(step: int, count: int = VOCAB) -> Tensor:
    return torch.randint(0, count, (4, 8), generator=torch.Generator().manual_seed(step))


def next_token(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def hugging() -> nn.Module:
    hf = importlib.import_module("transformers")
    config = hf.GPT2Config(
        n_embd=24, n_layer=3, n_head=2, vocab_size=40, n_positions=16,
        attn_implementation="eager", tie_word_embeddings=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config)


def labelled(step: int) -> dict[str, Any]:
    ids = tokens(step, 40)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


MODELS = {
    "dropout": Model(Dropping, tokens, next_token),
    "transformers": Model(hugging, labelled),
}
LOSS_IS_A_MEAN = ("transformers", "in microbatches")
PLANS = {"plain": {}, "again": {"recompute": ("block",)}, "in microbatches": {"microbatches": 2}}


def trained(model: Model, where: torch.device, options: dict[str, Any]) -> dict[str, Tensor]:
    """Losses, norms and weights of three steps, an evaluation after the second."""
    torch.manual_seed(0)
    module = model.make().double().to(where).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    job = prepare(module, optimizer, loss=model.loss, clip=0.5, **options)
    torch.manual_seed(3)
    found = []
    for step in range(STEPS):
        found += [float(job.step(model.batch(step))), job.report.norm]
        if step == 1:
            found += job.evaluate(model.batch(9))
    weights = on_host(dict(job.weights()))
    job.close()
    return weights | {"numbers": torch.tensor(found, dtype=torch.float64)}


RUNS = [(name, plan) for name in MODELS for plan in PLANS if (name, plan) != LOSS_IS_A_MEAN]


@pytest.mark.parametrize(("name", "plan"), RUNS)
def test_it_trains_as_on_the_cpu(name: str, plan: str) -> None:
    model, options = MODELS[name], dict(PLANS[plan])
    if "microbatches" in options:
        options |= {"count": lambda batch: float(batch.shape[0] * (batch.shape[1] - 1))}
        model = Model(model.make, model.batch, summed)
    expected = trained(model, CPU, options)
    first: dict[str, Tensor] | None = None
    for order in some(RUNS.index((name, plan))):
        strict.start(*order, device_bytes=1 << 28)
        found = trained(model, device(), options)
        first = first or found
        assert all(torch.equal(found[n], first[n]) for n in first), order
    assert first is not None and first.keys() == expected.keys()
    for name_ in expected:
        torch.testing.assert_close(first[name_], expected[name_], rtol=1e-10, atol=1e-10)


def summed(logits: Tensor, batch: Any) -> Tensor:
    return next_token(logits, batch) * (batch.shape[0] * (batch.shape[1] - 1))


def test_a_generator_of_the_wrong_device_is_shown() -> None:
    """A planted fault: what is computed again sets the CPU's generator back, not the device's."""
    model, options = MODELS["dropout"], PLANS["again"]
    expected = trained(model, CPU, options)
    strict.start("demand", device_bytes=1 << 28)
    with patch.object(accelerator, "drawing", lambda _: ()):
        found = trained(model, device(), options)
    assert not torch.allclose(found["numbers"], expected["numbers"], rtol=1e-6)


@pytest.mark.parametrize("plan", ["plain", "again"])
def test_autocast_in_a_module_casts_as_in_a_plain_loop(plan: str) -> None:
    strict.start("random", device_bytes=1 << 28)
    casting.Noting.seen.clear()
    found = casting.prepared(device(), **PLANS[plan])
    casting.assert_alike(found, casting.plain(device()))
    assert casting.Noting.seen == {torch.bfloat16}
