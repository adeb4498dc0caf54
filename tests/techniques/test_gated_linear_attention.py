"""Gated linear attention against its definition, a loop over tokens and heads written here: float64
and 1e-10, outputs, states and all gradients."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from many import Kept, generate_many
from safetensors.torch import load_file
from subjects import VOCAB
from torch import Tensor
from torch.nn import functional as F
from verifying import case_of, fill

import outsize
from outsize.collectives import Mesh
from outsize.decode.generate import direct
from outsize.decode.samplers import Sampling
from outsize.errors import OutsizeError
from outsize.kernels import recurrence
from outsize.models.build import build
from outsize.models.decoder import Decoder, typed
from outsize.models.families import parse
from outsize.plan import Pipelined, Sharding
from outsize.plan.plan import per_segment
from outsize.techniques.mixers.gated_linear_attention import GatedRecurrence
from outsize.verify import Native, verify

HEADS, KEYS, VALUES = 2, 6, 5
BOUNDS = {
    "one document": (0, 150),
    "a token": (0, 1),
    "borders on tiles": (0, 64, 128, 140),
    "packed": (0, 3, 3, 70, 71, 90, 200),
}


def _recurrently(
    inputs: list[Tensor], bounds: tuple[int, ...], state_HKV: Tensor, least: float | None
) -> tuple[Tensor, Tensor]:
    """S <- diag(a) S + k v^T, o = q S / sqrt(K), document by document."""
    q, k, v, z = inputs
    a = F.logsigmoid(z) / 16
    a = (a if least is None else a.clamp_min(least)).exp()
    outputs = []
    for number, (first, last) in enumerate(pairwise(bounds)):
        states = [state_HKV[h] if number == 0 else torch.zeros_like(state_HKV[h]) for h in (0, 1)]
        for t in range(first, last):
            for h in range(HEADS):
                states[h] = a[t, h, :, None] * states[h] + torch.outer(k[t, h], v[t, h])
                outputs.append(q[t, h] @ states[h] * KEYS**-0.5)
    return torch.stack(outputs).view(bounds[-1], HEADS, VALUES), torch.stack(states)


def _inputs(tokens: int, spread: float = 3.0) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = (KEYS, KEYS, VALUES, KEYS)
    made = [torch.randn(tokens, HEADS, size, dtype=torch.float64) for size in sizes]
    made[3] = made[3] * spread - 1
    return [x.requires_grad_() for x in made]


@pytest.mark.parametrize("least", [None, -0.1])
@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_chunked_form(
    bounds: tuple[int, ...], least: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tile at a time, and all together."""
    inputs = _inputs(bounds[-1])
    before = torch.randn(HEADS, KEYS, VALUES, dtype=torch.float64, requires_grad=True)
    expected = _recurrently(inputs, bounds, before, least)
    given = [torch.randn_like(x) for x in expected]
    wanted = torch.autograd.grad(expected, (*inputs, before), given)
    for slab in (1, 1 << 18):
        monkeypatch.setattr(recurrence, "SLAB", slab)
        o, (state,) = GatedRecurrence(KEYS**-0.5, least).whole(tuple(inputs), bounds, (before,))
        found = torch.autograd.grad((o, state), (*inputs, before), given)
        for a, b in zip((o, state, *found), (*expected, *wanted), strict=True):
            torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


def test_recurrent_form() -> None:
    inputs, decay = _inputs(12), GatedRecurrence(KEYS**-0.5, None)
    before = torch.randn(HEADS, KEYS, VALUES, dtype=torch.float64)
    expected, behind = _recurrently(inputs, (0, 12), before, None)
    state: tuple[Tensor, ...] = (before.unsqueeze(0),)
    outputs = []
    for t in range(12):
        o, state = decay.step(tuple(x[t : t + 1] for x in inputs), state)
        outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs), expected, atol=1e-10, rtol=0)
    torch.testing.assert_close(state[0][0], behind, atol=1e-10, rtol=0)


def test_float32_stands_any_decay() -> None:
    """Logits to -2000 fade by exp(-125) a token, exp(-8000) a tile: no exponent is above 0."""
    inputs, decay = _inputs(200, spread=500.0), GatedRecurrence(KEYS**-0.5, None)
    small = [x.detach().float().requires_grad_() for x in inputs]
    wide, _ = decay.whole(tuple(inputs), (0, 200), None)
    o, _ = decay.whole(tuple(small), (0, 200), None)
    given = torch.randn_like(wide)
    torch.testing.assert_close(o.double(), wide, atol=1e-5, rtol=1e-5)
    wanted = torch.autograd.grad(wide, inputs, given)
    for a, b in zip(torch.autograd.grad(o, small, given.float()), wanted, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-4, rtol=1e-4)


# -- a whole model -------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "model_type": "gla",
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_heads": 4,
    "expand_k": 0.5,
    "expand_v": 1,
    "hidden_act": "swish",
    "norm_eps": 1e-2,
    "initializer_range": 0.2,
}
VARIANTS = {
    "gated": {},
    "gated by gelu, norms apart": {"hidden_act": "gelu", "expand_v": 2},
    "swish, norms apart": {"fuse_norm": False, "clamp_min": -0.1},
    "no gate": {"use_output_gate": False, "expand_k": 1.0, "tie_word_embeddings": True},
}


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + SMALL["norm_eps"]).sqrt() * weight


def _by_the_paper(files: dict[str, Tensor], config: dict[str, Any], ids: Tensor) -> Tensor:
    """Logits of one document, of tensors under the authors' names."""
    act = F.silu if config["hidden_act"] == "swish" else F.gelu
    fused = config["hidden_act"] == "swish" and config.get("fuse_norm", True)
    gate = config.get("use_output_gate", True)
    norm = "g_norm_swish_gate" if fused and gate else "g_norm"
    heads, x = config["num_heads"], files["model.embeddings.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        own = {k.removeprefix(f"model.layers.{i}."): v for k, v in files.items()}
        h = _norm(x, own["attn_norm.weight"])
        q, k, v = (h @ own[f"attn.{n}_proj.weight"].T for n in "qkv")
        z = h @ own["attn.gk_proj.0.weight"].T @ own["attn.gk_proj.1.weight"].T
        a = F.logsigmoid(z + own["attn.gk_proj.1.bias"]) / 16
        a = a.clamp_min(config["clamp_min"]) if "clamp_min" in config else a
        q, k, v, a = (y.view(len(ids), heads, -1) for y in (q, k, v, a))
        state = torch.zeros(heads, k.shape[-1], v.shape[-1], dtype=x.dtype)
        outputs = []
        for t in range(len(ids)):
            state = a[t].exp()[..., None] * state + k[t][..., None] * v[t][:, None]
            outputs.append((q[t][:, None] @ state)[:, 0] / k.shape[-1] ** 0.5)
        o = _norm(torch.stack(outputs), own[f"attn.{norm}.weight"]).flatten(1)
        o = o * act(h @ own["attn.g_proj.weight"].T) if gate else o
        x = x + o @ own["attn.o_proj.weight"].T
        h = _norm(x, own["mlp_norm.weight"])
        inner = act(h @ own["mlp.gate_proj.weight"].T) * (h @ own["mlp.up_proj.weight"].T)
        x = x + inner @ own["mlp.down_proj.weight"].T
    head = "lm_head" if "lm_head.weight" in files else "model.embeddings"
    return _norm(x, files["model.norm.weight"]) @ files[f"{head}.weight"].T


def _model(**changes: Any) -> Decoder:
    return build(parse({**SMALL, **changes}), seed=3, dtype=torch.float64)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_files_of_the_authors(changes: dict[str, Any], tmp_path: Path) -> None:
    """Saved under the authors' names, and by these and their formula the logits; read again."""
    model = _model(**changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill(name, parameter)
    outsize.save(model, tmp_path / "gla")
    files = load_file(tmp_path / "gla" / "model.safetensors")
    ids = torch.randint(VOCAB, (70,), generator=torch.Generator().manual_seed(1))
    expected = _by_the_paper(files, {**SMALL, **changes}, ids)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), expected, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(outsize.load(tmp_path / "gla")(ids), model(ids), atol=0, rtol=0)


def test_initial_values_are_the_authors() -> None:
    """Matrices normal, the bias of the decay zeros, norms ones."""
    model = _model(hidden_size=64)
    layer = model.blocks[0].attention
    assert not layer.decay.bias.any() and (layer.norm.weight == 1).all()
    for one in (layer.q, layer.k, layer.v, layer.decay_down, layer.decay, layer.gate, layer.o):
        assert float(one.weight.detach().std()) == pytest.approx(0.2, rel=0.1)


@pytest.mark.parametrize("slices", [(1,) * 90, (64, 13, 1, 12), (90,)])
def test_step_by_step_is_all_at_once(slices: tuple[int, ...]) -> None:
    model = _model()
    ids = torch.randint(VOCAB, (90,), generator=torch.Generator().manual_seed(1))
    cache, found, first = Kept(1, 90), [], 0
    forward = direct(model)
    with torch.no_grad():
        for count in slices:
            past = cache.extend([0], [count])
            here = ids[first : first + count]
            found.append(forward(here, past.positions(), past.bounds, past))
            first += count
        ends = torch.tensor(slices).cumsum(0) - 1
        torch.testing.assert_close(torch.cat(found), model(ids)[ends], atol=1e-10, rtol=1e-10)


def test_requests_of_different_lengths_take_the_same_bytes_each() -> None:
    """Greedy tokens of three requests together are those that the whole model gives one by one."""
    model = _model()
    prompts = [[1, 2, 3, 4, 5] * 15, [7], [9, 8, 7]]
    together = generate_many(model, prompts, 6, [Sampling()] * 3)
    for prompt, found in zip(prompts, together, strict=True):
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(6):
                ids.append(int(model(torch.tensor(ids))[-1].argmax()))
        assert found == ids[len(prompt) :]


def test_memory_does_not_grow_with_tokens() -> None:
    model = _model()
    sizes = []
    for tokens in (4, 400):
        cache, forward = Kept(2, tokens), direct(model)
        past = cache.extend([0, 1], [tokens, 1])
        ids = torch.zeros(tokens + 1, dtype=torch.int64)
        with torch.no_grad():
            forward(ids, past.positions(), past.bounds, past)
        sizes.append(cache.cache.bytes)
    heads_keys_values = 4 * 3 * 6 * 8
    assert sizes == [2 * 3 * heads_keys_values] * 2
    declared = [b.mixer.states(torch.float64) for b in typed(model.blocks)]
    assert sum(s.bytes(10**9) for states in declared for s in states) * 2 == sizes[0]


def test_a_slot_is_cleared_for_another() -> None:
    model, cache = _model(), Kept(1, 10)
    forward, ids = direct(model), torch.tensor([3, 1, 4])
    found = []
    with torch.no_grad():
        for _ in range(2):
            past = cache.extend([0], [3])
            found.append(forward(ids, past.positions(), past.bounds, past))
            cache.clear(0)
    assert torch.equal(*found)


BLOCK = per_segment(5, ("block",))
PLANS: dict[str, dict[str, Any]] = {
    "data, tensor and pipeline": {
        "mesh": Mesh(2, 2, 2), "rows": 4, "pipeline": Pipelined("1f1b"),
        "shards": Sharding(2, 2, 2), "steps": 1,
    },
    "tokens cut": {
        "mesh": Mesh(1, 2), "sequence_parallel": True, "loss_chunk": 7, "overlap": 2, "steps": 1,
    },
    "chunks of a sequence, tensor": {
        "stages": BLOCK, "sequence_chunk": 7, "microbatch_rows": 3, "loss_chunk": 5, "mlp_tile": 3,
        "mesh": Mesh(1, 2), "steps": 1,
    },
    "chunks of a token": {
        "stages": BLOCK, "sequence_chunk": 1, "rows": 2, "microbatch_rows": 1,
        "steps": 1,  # of 20 chunks each, through all layers
    },
    "recomputed apart, weight gradients apart": {
        "stages": per_segment(5, ("mlp", "attention")), "split_backward": True, "resume_at": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_plans_give_the_plain_numbers(plan: dict[str, Any]) -> None:
    """A plain run goes through the recurrence a token at a time: verify/naive.py."""
    case = replace(case_of(**plan), subject=Native(parse(SMALL), lambda: fill))
    found = verify(case)
    assert found.exact.worst <= 1e-10


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn", {"layers": [0]}), ("num_kv_heads", 2), ("use_short_conv", True), ("use_gv", True),
        ("feature_map", "relu"), ("expand_k", 0.3), ("clamp_min", 0.5), ("hidden_act", "sine"),
        ("elementwise_affine", False), ("kraken_ways", 2),
    ],
)  # fmt: skip
def test_refused(key: str, value: object) -> None:
    with pytest.raises(OutsizeError, match=key):
        parse({**SMALL, key: value})
