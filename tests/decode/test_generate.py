"""Generation against `generate` of transformers on the same weights, and against itself in other
batches, slices and pieces."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from heads import watched
from many import generate_many, run
from torch import Tensor

from outsize.checkpoint import hub
from outsize.decode.generate import (
    Request,
    direct,
    drawing,
    generate,
    stream_tokens,
)  # fmt: skip
from outsize.decode.samplers import Sampling
from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.decoder import Decoder
from outsize.models.families import parse
from outsize.models.seams import Past

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "initializer_range": 0.3,  # lively: otherwise one token is repeated
}
PROMPT = [5, 17, 2, 44, 9, 30, 8]


def _model(config: dict[str, Any] = LLAMA) -> Decoder:
    return build(parse(config), seed=1, dtype=torch.float64)


def _reference(model: Any, ids: Sequence[int], count: int, eos: int | None) -> list[int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=0,
        )
    return [int(token) for token in whole[0, len(ids) :]]


CONFIGS = {
    "llama": LLAMA,
    "window": {**LLAMA, "model_type": "mistral", "sliding_window": 6},
    "gemma2": {
        **LLAMA,
        "model_type": "gemma2",
        "sliding_window": 6,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": False,
    },
    "dynamic": {
        **LLAMA,
        "max_position_embeddings": 16,  # passed on the way
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_equals_transformers(tmp_path: Path, name: str) -> None:
    plain = dict(CONFIGS[name])
    kind = plain.pop("model_type")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **plain)
    config._attn_implementation = "eager"
    theirs = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    theirs.save_pretrained(tmp_path)
    ours = hub.load(tmp_path, dtype=torch.float64)
    expected = _reference(theirs, PROMPT, 20, None)
    assert len(set(expected)) > 5
    assert generate(ours, PROMPT, 20) == expected
    if name == "llama":
        eos = expected[12]
        first = expected.index(eos)
        assert _reference(theirs, PROMPT, 20, eos) == expected[: first + 1]
        assert generate(ours, PROMPT, 20, stop=[eos]) == expected[: first + 1]


def test_sampling_with_a_seed_is_the_same_alone_in_a_batch_and_in_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of several prompts at once as many tokens go through the head as there are prompts."""
    model, heads = _model(), watched(monkeypatch)
    prompts = [PROMPT, [3], list(range(40)), PROMPT[:3]]
    samplings = [Sampling(0.9, 20, 0.9, seed) for seed in (1, 2, 3, 1)]
    alone = [
        generate(model, ids, 15, sampling) for ids, sampling in zip(prompts, samplings, strict=True)
    ]
    assert len({tuple(new) for new in alone}) == 4
    assert generate_many(model, prompts, 15, samplings) == alone
    requests = [
        Request(tuple(ids), 15, sampling, frozenset())
        for ids, sampling in zip(prompts, samplings, strict=True)
    ]
    for slice_tokens in (0, 1, 7):
        new: list[list[int]] = [[] for _ in prompts]
        for index, token in run(requests, direct(model), torch.device("cpu"), slice_tokens):
            new[index].append(token)
        assert new == alone, slice_tokens
    assert generate(model, PROMPT, 15, Sampling(0.9, 20, 0.9, seed=7)) != alone[0]
    assert max(heads) == len(prompts)


def test_a_prompt_in_slices_sees_the_rotations_of_its_whole_length() -> None:
    """Rotations that depend on the length go by the prompt's, however it is fed."""
    model = _model(CONFIGS["dynamic"])
    request = Request(tuple(range(30)), 8, Sampling(), frozenset())
    steps = (run([request], direct(model), torch.device("cpu"), most) for most in (100, 3))
    whole, sliced = ([token for _, token in step] for step in steps)
    assert whole == sliced
    assert whole[0] == int(model(torch.arange(30))[-1].argmax())


def test_requests_that_end_early_leave_the_others_going() -> None:
    model = _model()
    alone = generate(model, PROMPT, 12)
    requests = [
        Request(tuple(PROMPT), 12, Sampling(), frozenset()),
        Request(tuple(PROMPT), 3, Sampling(), frozenset()),
        Request(tuple(PROMPT), 12, Sampling(), frozenset([alone[5]])),
        Request(tuple(PROMPT), 0, Sampling(), frozenset()),
    ]
    new: list[list[int]] = [[], [], [], []]
    for index, token in run(requests, direct(model), torch.device("cpu")):
        new[index].append(token)
    assert new == [alone, alone[:3], alone[: alone.index(alone[5]) + 1], []]


class _Counting:
    """A forward that counts the tokens of each step, as the runtime's own would be handed in."""

    def __init__(self, model: Decoder) -> None:
        self.inner = direct(model)
        self.steps: list[int] = []

    def __call__(
        self, ids_T: Tensor, positions_T: Tensor, bounds: tuple[int, ...], past: Past
    ) -> Tensor:
        self.steps.append(len(ids_T))
        assert not torch.is_grad_enabled()
        return self.inner(ids_T, positions_T, bounds, past)


def test_each_token_is_fed_once_and_none_is_computed_in_vain() -> None:
    model = _model()
    forward = _Counting(model)
    seen: list[int] = []
    new = generate(model, PROMPT, 5, on_token=seen.append, step=drawing(forward))
    assert seen == new
    assert forward.steps == [len(PROMPT), 1, 1, 1, 1]
    stream = stream_tokens(model, PROMPT, 5, step=drawing(forward))
    assert [next(stream), next(stream)] == new[:2]
    assert forward.steps[5:] == [len(PROMPT), 1]
    assert torch.is_grad_enabled()


def test_requests_that_cannot_be_served_are_refused() -> None:
    model = _model()
    with pytest.raises(OutsizeError, match="the prompt has no tokens"):
        generate(model, [], 1)
    with pytest.raises(OutsizeError, match="the prompt has token 61; expected 0 to 60"):
        generate(model, [1, 61], 1)
    with pytest.raises(OutsizeError, match="max_tokens is -1"):
        generate(model, [1], -1)
    learned = _model(
        {
            "model_type": "gpt2",
            "vocab_size": 61,
            "n_embd": 32,
            "n_layer": 1,
            "n_head": 4,
            "n_positions": 10,
            "activation_function": "gelu_new",
        }
    )
    assert len(generate(learned, PROMPT, 4)) == 4
    with pytest.raises(OutsizeError, match="has learned 10: ask for at most 4 new tokens"):
        generate(learned, PROMPT, 5)
