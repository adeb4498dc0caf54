"""Blocks run in chunks of the sequence: the plain loop's numbers, 1e-10 in float64, and less
memory, as predicted."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import plain
import pytest
import torch
from subjects import CONFIGS, VOCAB, base_plan, config_of

from outsize.hardware import catalogue
from outsize.memory import Ledger
from outsize.memory.store import MemoryStore
from outsize.models.build import build
from outsize.models.families import parse
from outsize.optim import AdamW
from outsize.plan import Plan, Precision, Stage
from outsize.plan.plan import Rest, per_segment
from outsize.runtime import Job, NativeFlow, spill
from outsize.runtime.recipe import Here, Recipe
from outsize.search import PlanRequest, predict
from outsize.simulate.counter import Counter

ROWS, SEQUENCE, STEPS, CLIP, CHUNK = 3, 24, 2, 0.01, 7
RATES = [1e-2 / (i + 1) for i in range(STEPS)]
BLOCK = per_segment(5, ("block",))
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
HEADS = {**COMMON, "num_attention_heads": 3}
MORE = {
    "gpt_neox": {**HEADS, "model_type": "gpt_neox", "intermediate_size": 40, "rotary_pct": 0.5},
    "qwen3": {
        **COMMON, "model_type": "qwen3", "intermediate_size": 40, "num_key_value_heads": 2,
        "head_dim": 6, "attention_bias": True,
    },
    "olmo2": {**COMMON, "model_type": "olmo2", "intermediate_size": 40, "num_key_value_heads": 2},
    "opt, norms after": {
        **COMMON, "model_type": "opt", "ffn_dim": 40, "do_layer_norm_before": False,
        "word_embed_proj_dim": 16,
    },
}  # fmt: skip
CONFIG = {
    **{name: config_of(name) for name in CONFIGS if name != "gpt2"},
    "gpt2": config_of("gpt2", n_positions=64),
    **{name: parse(config) for name, config in MORE.items()},
}


def plan_of(**changes) -> Plan:
    base = {"stages": BLOCK, "rows": ROWS, "sequence": SEQUENCE, "sequence_chunk": CHUNK}
    return base_plan(**{**base, **changes})


@pytest.fixture(scope="module")
def data():
    """Documents of uneven lengths, some longer than a chunk, some several in one."""
    return plain.batches(STEPS, ROWS, SEQUENCE, VOCAB)


def built(name: str, frozen: tuple[str, ...] = ()):
    model = build(CONFIG[name], seed=1, dtype=torch.float64)
    for key, parameter in model.named_parameters():
        if frozen and key.startswith(frozen):
            parameter.requires_grad_(False)
    return model


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative; a key's bias has no gradient but noise, as softmax does not see it: it stays 0."""
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-4))


def check(model, plan, data, reference, stores: Any = MappingProxyType({})) -> None:
    losses, norms, expected = reference
    assert any(norm > CLIP for norm in norms), "the test must clip"
    flow, optimizer = NativeFlow(model, plan), AdamW(weight_decay=0.1)
    job = Job(flow, plan, Recipe(optimizer, CLIP), Here(stores=stores))
    for step, (batch, lr) in enumerate(zip(data, RATES[: len(data)], strict=True)):
        assert abs(float(job.step(batch, lr)) - losses[step]) <= 1e-10 * losses[step]
        assert abs(job.report.norm - norms[step]) <= 1e-10 * norms[step]
    got = dict(job.weights())
    for name, parameter in expected.named_parameters():
        assert far(got[name], parameter.detach()) <= 1e-10, name


def trained(model, data):
    return plain.train(model, data, RATES[: len(data)], clip=CLIP, decay=0.1)


@pytest.mark.parametrize("name", ["mistral", *MORE])
def test_families(name, data):
    """Others: tests/verify/test_matrix.py."""
    model = built(name)
    reference = trained(model, data[:1])
    check(model, plan_of(microbatch_rows=2), data[:1], reference)


@pytest.fixture(scope="module")
def llama(data):
    return trained(built("llama"), data)


PLANS = {
    "as long as a row": {"sequence_chunk": SEQUENCE},
    "one short of two rows": {"sequence_chunk": 2 * SEQUENCE - 1, "microbatch_rows": 2},
    "longer than all": {"sequence_chunk": 1000, "microbatch_rows": 3},
    "stages of several blocks": {
        "stages": (Stage(0, 1), Stage(1, 4, ("block",)), Stage(4, 5)), "microbatch_rows": 3,
    },
    "some blocks only": {
        "stages": (Stage(0, 1), Stage(1, 2, ("mlp",)), Stage(2, 3, ("block",)), Stage(3, 5)),
    },
    "with tiles and chunks of logits": {"mlp_tile": 3, "loss_chunk": 4, "microbatch_rows": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_plans(name, data, llama):
    check(built("llama"), plan_of(**PLANS[name]), data, llama)


def test_chunks_of_one_token():
    rows = plain.batches(1, 2, 9, VOCAB)  # a chunk for each token of a block is many
    plan = plan_of(sequence_chunk=1, rows=2, sequence=9)
    check(built("llama"), plan, rows, trained(built("llama"), rows))


@pytest.mark.parametrize("stages", [BLOCK, PLANS["stages of several blocks"]["stages"]])
def test_inputs_that_rest_below_the_device(stages, data, llama, monkeypatch):
    """Checkpoints off the device, as in ALST."""
    monkeypatch.setattr(spill, "LEAST", 1)
    rest = Rest(activations="host")
    stages = tuple(replace(s, rest=rest) if s.whole else s for s in stages)
    host = MemoryStore("host", 1 << 20)
    plan = plan_of(stages=stages, order="layer", microbatch_rows=1)
    check(built("llama"), plan, data, llama, {"host": host})
    assert host.bytes_written > 0
    host.close()


FROZEN = {
    "first blocks": ("prologue", "blocks.0", "blocks.1"),
    "a block in the middle": ("blocks.1",),
    "all but the head": ("prologue", "blocks", "epilogue.norm"),
    "the head": ("epilogue.head",),
    "keys and values": ("prologue", "blocks.0.attention.k", "blocks.0.attention.v"),
}


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_parameters(name, data):
    model = built("llama, untied", FROZEN[name])
    stages = PLANS["stages of several blocks"]["stages"]
    plan = plan_of(stages=stages, microbatch_rows=2)
    check(model, plan, data[:1], trained(model, data[:1]))


def test_evaluation_runs_in_chunks_too(data):
    job = Job(NativeFlow(built("llama"), plan_of()), plan_of(), Recipe(AdamW()))
    total, count = job.evaluate(data[0], ROWS)
    expected = float(plain.loss_of(job.flow.model, data[0]).detach())
    assert abs(total / count - expected) <= 1e-12 * expected


def test_bitwise_equal_run_to_run(data):
    runs = []
    for _ in range(2):
        job = Job(NativeFlow(built("mixtral"), plan_of()), plan_of(), Recipe(AdamW()))
        losses = [job.step(data[0], RATES[0])]
        runs.append([*losses, *(w.clone() for _, w in job.weights())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


# -- memory and operations ---------------------------------------------------------------------

WIDE = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
LONG = 512


def request() -> PlanRequest:
    return PlanRequest(1, LONG, Precision.named("float32"), AdamW(), clip=1.0, documents=(0, LONG))


def long_plan(chunk: int) -> Plan:
    stages = per_segment(4, ("block",))
    return Plan(4, stages, 1, 1, LONG, request().precision, loss_chunk=16, sequence_chunk=chunk)


def peak_above_static(chunk: int) -> int:
    made = predict(config_of("llama", **WIDE), request(), long_plan(chunk), catalogue("H200"))
    return made.peak - sum(made.static.values())


def test_what_a_block_needs_is_that_of_a_chunk():
    """Beside a chunk's own there are the inputs of two blocks, two hidden states and two keys and
    values with their gradients: of T x D, D = 64, with keys and values of half that together."""
    row = LONG * 64 * 4
    whole, small = peak_above_static(0), peak_above_static(32)
    assert whole > 14 * row
    assert small < (2 + 2 + 2 * 0.5 * 2 + 2) * row


@pytest.mark.parametrize("chunk", [100, 512])
def test_predicted_is_measured(chunk):
    config, plan = config_of("llama", **WIDE), long_plan(chunk)
    made = predict(config, request(), plan, catalogue("H200"))
    ledger = Ledger(made.peak)
    job = Job(
        NativeFlow(build(config, seed=0), plan), plan, Recipe(AdamW(), 1.0), Here(ledger=ledger)
    )
    ids = torch.randint(0, VOCAB, (1, LONG))
    batch = plain.Batch(ids, torch.roll(ids, -1, 1), ((0, LONG),))
    peaks = []
    for _ in range(2):
        job.step(batch)
        peaks.append(job.report.trace.peak())
    assert peaks[0] == peaks[1] and made.peak - peaks[0] <= 8


def attended(chunk: int) -> float:
    """Operations of attention in a step."""
    plan = long_plan(chunk)
    job = Job(NativeFlow(build(config_of("llama", **WIDE), seed=0), plan), plan, Recipe(AdamW()))
    ids = torch.randint(0, VOCAB, (1, LONG))
    with Counter() as counter:
        job.step(plain.Batch(ids, ids, ((0, LONG),)))
    return sum(counter.work.attention.values())


def test_chunks_leave_out_what_causality_hides():
    """Forward twice, back once at 2.5: 4.5 times two products over half of the scores, with a
    chunk's own square counted as half too; two layers, 64 features of all heads."""
    half = LONG * LONG / 2 * 64 * 2 * 2
    assert attended(64) == pytest.approx(2 * 4.5 * half, rel=1e-12)
    assert attended(0) == pytest.approx(2 * 4.5 * half, rel=1e-12)
