"""precision +invariant: what training computes of each target is what serving says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from decoders import CONFIGS, SMALL
from torch import Tensor

from outsize.data.batch import IGNORE, Batch
from outsize.errors import OutsizeError
from outsize.kernels import native, rows
from outsize.models.build import build
from outsize.models.decoder import Decoder
from outsize.models.families import parse
from outsize.optim import AdamW
from outsize.plan import Plan, Precision
from outsize.plan.plan import per_segment
from outsize.runtime.making import NativeModel, make_job
from outsize.runtime.recipe import Recipe
from outsize.serve.asks import Room
from outsize.serve.engine import Engine
from outsize.serve.model import Model
from outsize.serve.policies import POLICIES
from outsize.techniques.adapt.dora import Dora
from outsize.techniques.adapt.lora import Lora

COMPILED = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")
ROOM = Room(pages=64, page=4, slots=2, budget=7, queue=1000, context=100)
LENGTHS = ((70, 3, 27), (1, 40, 59))  # of the documents of each row
WIDE = {**CONFIGS["llama"], "head_dim": 136, "num_key_value_heads": 1}  # a head in two sums
MLP = {**CONFIGS["learned"], "n_positions": 100, "n_inner": 72}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "llama": (CONFIGS["llama"], "float32"),
    "llama in bfloat16": (CONFIGS["llama"], "bfloat16"),
    "wide": (WIDE, "float32"),
    "softcap": (CONFIGS["softcap"], "float32"),
    "softcap in bfloat16": (CONFIGS["softcap"], "bfloat16"),
    "learned": (MLP, "float32"),
    "latent": (CONFIGS["latent"], "float32"),
    "latent in bfloat16": (CONFIGS["latent"], "bfloat16"),
    "wide latent in bfloat16": ({**CONFIGS["latent"], "kv_lora_rank": 260}, "bfloat16"),
    "wide latent of low rank": ({**CONFIGS["latent"], "kv_lora_rank": 260}, "float32"),
    "experts in bfloat16": (CONFIGS["experts"], "bfloat16"),
    "low rank": (CONFIGS["llama"], "float32"),
}
ADAPTERS = {"low rank": Lora(4), "wide latent of low rank": Lora(4), "alone": Dora()}


class Seen:
    """The cross-entropy itself, and what it was of each target of the last step."""

    columns = ()

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def of(self, entropy_C: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        self.found.append(entropy_C.clone())
        return entropy_C, torch.ones_like(entropy_C)


def model_of(
    config: Mapping[str, Any], dtype: torch.dtype = torch.float32, adapter: str = ""
) -> Decoder:
    facts = replace(parse(dict(config)), adapter=ADAPTERS.get(adapter))
    made = build(facts, seed=3, dtype=dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return made


def plan_of(model: Decoder, precision: str, **changes: Any) -> Plan:
    count = len(model.blocks) + 2
    stages = tuple(
        replace(one, recompute=("block",) if 0 < one.first < 3 else ())
        for one in per_segment(count)
    )
    made = Plan(count, stages, 2, 1, 100, Precision.named(precision), loss_chunk=32)
    return replace(made, **changes)


def batch(seed: int) -> Batch:
    ids = torch.randint(61, (2, 100), generator=torch.Generator().manual_seed(seed))
    targets = torch.full((2, 100), IGNORE)
    bounds = []
    for row, lengths in enumerate(LENGTHS):
        ends = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
        for start, stop in pairwise(ends):
            targets[row, start : stop - 1] = ids[row, start + 1 : stop]
        bounds.append(tuple(ends))
    return Batch(ids, targets, tuple(bounds))


def trained(
    model: Decoder, precision: str, steps: int = 2, **changes: Any
) -> tuple[list[Tensor], list[float]]:
    """What a step at learning rate 0 sees of each target behind some others; norms of gradients."""
    seen, plan = Seen(), plan_of(model, precision, **changes)
    job = make_job(NativeModel(model, loss=seen), plan, Recipe(AdamW(lr=1e-2), 1.0))
    norms = []
    for step in range(steps + 1):
        seen.found.clear()
        job.step(batch(step), 1e-2 if step < steps else 0.0)
        norms.append(job.report.norm)
    found = torch.cat(seen.found).view(2, 100)
    job.close()
    return list(found), norms


@COMPILED
@pytest.mark.parametrize("name", CASES)
def test_what_training_sees_is_what_serving_says(name: str) -> None:
    """Bit for bit, of each sample of packed rows, behind a step of training."""
    config, precision = CASES[name]
    model = model_of(config, getattr(torch, precision), name)
    found, _ = trained(model, f"{precision}+invariant", 1)
    given, told = batch(1), list[float]()
    right = list[float]()
    with Engine(Model(model), ROOM, POLICIES.get("mixed")) as engine:
        for row, bounds in enumerate(given.bounds):
            for start, stop in pairwise(bounds):
                if stop - start > 1:
                    ids = given.ids_BS[row, start:stop].tolist()
                    told += [one.logprob for one in engine.logprobs(ids)]
                    right += (-found[row][start : stop - 1]).tolist()
    assert len(told) == len(right) == 200 - 5 - 1
    assert torch.equal(torch.tensor(told), torch.tensor(right))


@COMPILED
@pytest.mark.parametrize("name", ["llama", "softcap", "learned", "wide latent of low rank"])
def test_gradients_are_those_of_plain_float64(name: str) -> None:
    config, _ = CASES[name]
    model = model_of(config)
    exact = model_of(config, torch.float64)
    exact.load_state_dict({n: x.double() for n, x in model.state_dict().items()})
    _, (norm,) = trained(model, "float32+invariant", 0)
    given = batch(0)
    targets_T = given.targets_BS.flatten()
    context = exact.context(given.positions().flatten(), given.flat_bounds())
    logits_TV = exact.epilogue.logits(exact.hidden(given.ids_BS.flatten(), context))
    torch.nn.functional.cross_entropy(logits_TV, targets_T).backward()
    gradients = [p.grad.square().sum() for p in exact.parameters() if p.grad is not None]
    assert norm == pytest.approx(float(torch.stack(gradients).sum().sqrt()), rel=2e-5)


def test_what_does_not_hold_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(config: Mapping[str, Any] = SMALL, adapted: bool = False) -> str:
        made = model_of({"model_type": "llama", **config}, adapter="alone" if adapted else "")
        with pytest.raises(OutsizeError) as caught:
            trained(made, "float32+invariant")
        return str(caught.value)

    if native.library() is not None:
        large = {**CONFIGS["softcap"], "head_dim": 264}
        assert "heads of 264 numbers, more than 256, and its scores are capped" in refusal(large)
        assert "an adapter (Dora)" in refusal(adapted=True)
    monkeypatch.setattr(native, "library", lambda: None)
    assert "no C++ compiler" in (said := refusal()) and "set precision to float32" in said
    with pytest.raises(OutsizeError, match=r"'float64\+invariant' is not known"):
        Precision.named("float64+invariant")
    assert not rows.here()
