"""Families: what is read, what is refused, and what holds for the decoder of every one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from outsize.errors import OutsizeError
from outsize.models.decoder import Decoder
from outsize.models.families import FAMILIES, parse
from outsize.models.linear import Embedding, Linear
from outsize.models.mlp import ACTIVATIONS, gated
from outsize.models.names import alternatives, ignorable, layout, stays_float32
from outsize.models.norm import Norm
from outsize.models.presets import PRESETS
from outsize.models.rope import rotate
from outsize.serve.room import context_of

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
EXPERTS = {"moe_intermediate_size": 20, "num_experts_per_tok": 2}
GEMMA = {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": {**LLAMA, "sliding_window": 5},
    "qwen2": {**LLAMA, **WINDOWS},
    "qwen3": {**LLAMA, **WINDOWS, "head_dim": 8},
    "phi3": {
        **LLAMA,
        "original_max_position_embeddings": 8,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4},
    },
    "olmo2": LLAMA,
    "starcoder2": {**LLAMA, "sliding_window": 5},
    "gemma2": {**LLAMA, **GEMMA},
    "gemma3_text": {**LLAMA, **GEMMA, "sliding_window_pattern": 2},
    "gpt2": {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 30},
    "gpt_neox": LLAMA,
    "opt": {**LLAMA, "ffn_dim": 44, "max_position_embeddings": 30},
    "mixtral": {**LLAMA, "num_local_experts": 4, "sliding_window": 5},
    "qwen3_moe": {**LLAMA, **WINDOWS, **EXPERTS, "num_experts": 12, "head_dim": 8},
    "deepseek_v3": {
        **LLAMA,
        **EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 10,
        "q_lora_rank": 14,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 6,
        "v_head_dim": 8,
    },
}
for kind, shape in SHAPES.items():
    shape_with_kind = {**shape, "model_type": kind}
    SHAPES[kind] = shape_with_kind
DYNAMIC = {**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}


def filled(config: Mapping[str, Any], dtype: torch.dtype = torch.float64) -> Decoder:
    model = Decoder(parse(config)).to(dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * 0.3 + (parameter.dim() == 1))
    return model


def test_every_family_is_here() -> None:
    own = {"gla"}  # a technique's, with a test of its own
    assert SHAPES.keys() == set(FAMILIES.names()) - own


@pytest.mark.parametrize("config", [*SHAPES.values(), DYNAMIC], ids=lambda c: c["model_type"])
def test_packed_documents_are_as_if_alone(config: dict[str, Any]) -> None:
    """Logits and gradients; documents shorter and longer than windows and trained lengths."""
    model = filled(config)
    bounds = (0, 5, 10, 33, 34, 46)
    ids_T = torch.randint(0, 61, (46,))
    pull = torch.randn(46, 61, dtype=torch.float64)
    alone = torch.cat([model(ids_T[start:stop]) for start, stop in pairwise(bounds)])
    trained = [x for x in model.parameters() if x.requires_grad]
    wanted = torch.autograd.grad((alone * pull).sum(), trained)

    positions_T = torch.cat([torch.arange(stop - start) for start, stop in pairwise(bounds)])
    ctx = model.context(positions_T, bounds)
    packed = model.epilogue.logits(model.hidden(ids_T, ctx))
    torch.testing.assert_close(packed, alone, rtol=1e-10, atol=1e-10)
    got = torch.autograd.grad((packed * pull).sum(), trained)
    # Gradients of key biases without rope are zero but for rounding: measured by the largest.
    largest = max(x.abs().max().item() for x in wanted)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12 * largest)


@pytest.mark.parametrize("kind", SHAPES)
def test_sinks_get_what_autograd_would(kind: str) -> None:
    """Every weight under a sink gets one gradient; the rest goes its usual way."""
    model = filled(SHAPES[kind])
    ids = torch.randint(0, 61, (2, 20))
    names = [name for name, x in model.named_parameters() if x.requires_grad]
    parameters = dict(model.named_parameters())
    wanted = torch.autograd.grad(model(ids).square().sum(), [parameters[n] for n in names])
    collected: dict[int, Tensor] = {}

    def sink(weight: Tensor, compute: Callable[[Tensor], None]) -> None:
        compute(collected.setdefault(id(weight), torch.zeros_like(weight)))

    for module in model.modules():
        if isinstance(module, Linear | Embedding) or module.__class__.__name__ == "Experts":
            module.sink = sink
    model(ids).square().sum().backward()
    for name, gradient in zip(names, wanted, strict=True):
        parameter = parameters[name]
        got = collected.get(id(parameter), parameter.grad)
        assert got is not None, name
        assert (parameter.grad is None) == (id(parameter) in collected), name
        torch.testing.assert_close(got, gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", SHAPES)
def test_shapes_without_values(kind: str) -> None:
    torch.set_default_dtype(torch.bfloat16)
    with FakeTensorMode():
        model = Decoder(parse(SHAPES[kind]))
        logits = model(torch.zeros((2, 20), dtype=torch.int64))
        logits.sum().backward()
        assert logits.shape == (2, 20, 61) and logits.dtype == torch.bfloat16
        for name, parameter in model.named_parameters():
            assert not parameter.requires_grad or parameter.grad is not None, name


@pytest.mark.parametrize("kind", SHAPES)
def test_half_precision_is_near_and_repeats_bitwise(kind: str) -> None:
    """bfloat16 keeps 8 bits; two layers lose a few more. Expert choices may flip: skipped."""
    half = filled(SHAPES[kind], torch.bfloat16)
    exact = Decoder(half.config).double()
    exact.load_state_dict(half.state_dict())
    ids = torch.randint(0, 61, (2, 16))
    logits = half(ids)
    assert logits.dtype == torch.bfloat16 and torch.equal(logits, half(ids))
    if half.config.experts is None:
        error = (logits.double() - exact(ids)).norm() / exact(ids).norm()
        assert error < 0.05


def test_one_row_or_many() -> None:
    model = filled(LLAMA)
    ids = torch.randint(0, 61, (3, 9))
    torch.testing.assert_close(model(ids)[1], model(ids[1]), rtol=1e-12, atol=1e-12)
    assert model(ids[:, :0]).shape == (3, 0, 61)
    with pytest.raises(OutsizeError, match=r"input_ids has shape \(1, 3, 9\)"):
        model(ids[None])


def test_lengths_say_what_positions_cannot() -> None:
    """The last tokens of a long document get the rope of the whole document."""
    for config in (DYNAMIC, SHAPES["phi3"]):
        model = filled(config)
        whole = model.context(torch.arange(40), (0, 40)).rope["main"]
        last = model.context(torch.arange(38, 40), (0, 2), lengths=(40,)).rope["main"]
        for table, rows in zip(whole, last, strict=True):
            assert torch.equal(table[38:], rows)


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_documents_longer_than_learned_positions(kind: str) -> None:
    model = filled(SHAPES[kind])
    assert model(torch.zeros(30, dtype=torch.int64)).isfinite().all()
    assert context_of(model, 30) == 30
    with pytest.raises(OutsizeError, match="--context 31; this model has 30 positions"):
        context_of(model, 31)
    with pytest.raises(OutsizeError, match="31 tokens is longer than the 30 positions"):
        model(torch.zeros(31, dtype=torch.int64))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": "lama"}, r"model_type = 'lama'.*did you mean 'llama'"),
    ("llama", {"model_type": None}, "model_type = None"),
    ("llama", {"hidden_act": "mish"}, r"hidden_act = 'mish'.*gelu"),
    ("llama", {"hidden_size": "32"}, "hidden_size = '32'; expected a positive integer"),
    ("llama", {"hidden_size": True}, "hidden_size = True"),
    ("llama", {"vocab_size": None}, "vocab_size is missing"),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers = 0"),
    ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps = 'small'; expected a finite number"),
    ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings = 1; expected true or false"),
    ("llama", {"num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple"),
    ("llama", {"num_attention_heads": 6}, "hidden_size = 32 is not a multiple"),
    ("llama", {"head_dim": 7}, "rotated features of a head = 7"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder = True"),
    ("llama", {"rope_scaling": {"rope_type": "spiral"}}, "rope_type = 'spiral'.*yarn"),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "fctor": 2}}, "fctor = 2.*'factor'"),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling = 'linear'; expected an object"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    (
        "llama",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4}},
        "short_factor has 1 numbers; expected a list of 4",
    ),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
    ("qwen2", {"layer_types": ["full_attention", "chunked"]}, "layer_types = 'chunked'"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    ("gemma2", {"final_logit_softcapping": -1}, "final_logit_softcapping = -1"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
    ("gpt2", {"activation_function": "xielu"}, "activation_function = 'xielu'"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention = True"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads = 2"),
    ("mistral", {"sliding_window": 0}, "sliding_window = 0"),
]


@pytest.mark.parametrize(("kind", "change", "message"), REFUSED)
def test_what_cannot_be_honoured_is_refused(
    kind: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(OutsizeError, match=message) as caught:
        parse({**SHAPES[kind], **change})
    assert "\n" not in str(caught.value)


# What transformers keeps in a config and what is no fact about the logits of a decoder: token ids
# (the tokenizer's), caches, losses beside the logits, training noise (off in Outsize), heads of
# other tasks, and facts that follow from others.
NO_FACTS = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "pretraining_tp"),
    *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
    *("attention_dropout", "hidden_dropout", "residual_dropout", "embedding_dropout", "dropout"),
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "layerdrop", "classifier_dropout"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    *("summary_first_dropout", "reorder_and_upcast_attn", "is_decoder"),
    *("output_hidden_states", "return_dict", "dtype", "chunk_size_feed_forward", "architectures"),
    *("id2label", "label2id", "problem_type", "transformers_version", "output_attentions"),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_every_key_that_transformers_knows_is_read(kind: str) -> None:
    """A value of no sense is refused under its name, so none is passed over; and a key that is
    left out means the same here and there."""
    transformers = pytest.importorskip("transformers")
    declared = {f.name: f.default for f in dataclasses.fields(transformers.CONFIG_MAPPING[kind])}
    assert "vocab_size" in declared
    shape = {key: value for key, value in SHAPES[kind].items() if key != "rope_scaling"}
    for key in declared.keys() - NO_FACTS:
        with pytest.raises(OutsizeError, match=key):
            parse({**shape, key: "nonsense"})
    defaults = FAMILIES.get(kind).defaults
    assert {key: defaults[key] for key in defaults.keys() & declared.keys()} == {
        key: declared[key] for key in defaults.keys() & declared.keys()
    }


def test_old_and_new_layouts_say_the_same() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    old = parse({**LLAMA, "rope_theta": 500.0, "rope_scaling": scaling})
    new = parse({**LLAMA, "rope_parameters": {**scaling, "rope_theta": 500.0}})
    assert old.ropes == new.ropes and old.ropes["main"].theta == 500.0
    gemma = {**SHAPES["gemma3_text"], "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    both = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert parse(gemma).ropes == parse({**SHAPES["gemma3_text"], "rope_parameters": both}).ropes


def test_source_is_kept_as_it_was() -> None:
    config = {**LLAMA, "unheard_of": [1, 2]}
    assert parse(config).source == config


@pytest.mark.parametrize("kind", SHAPES)
def test_layout_covers_each_parameter_once_and_inverts(kind: str) -> None:
    model = filled(SHAPES[kind])
    parameters = dict(model.named_parameters())
    entries = layout(model.config)
    assert [name for entry in entries for name in entry.ours] == sorted(
        parameters, key=[n for e in entries for n in e.ours].index
    )
    stored = [name for entry in entries for name in entry.theirs]
    assert len(set(stored)) == len(stored)
    for entry in entries:
        tensors = tuple(parameters[name].detach() for name in entry.ours)
        merged = entry.merge(tensors)
        assert len(merged) == len(entry.theirs)
        for before, after in zip(tensors, entry.split(merged), strict=True):
            assert torch.equal(before, after)


def test_names_in_the_wild() -> None:
    gpt2, neox = parse(SHAPES["gpt2"]), parse(SHAPES["gpt_neox"])
    deepseek = parse(SHAPES["deepseek_v3"])
    assert alternatives(gpt2, "transformer.wte.weight") == ("wte.weight",)
    assert alternatives(neox, "embed_out.weight") == ("lm_head.weight",)
    assert ignorable(gpt2, "h.0.attn.bias") and ignorable(gpt2, "lm_head.weight")
    assert not ignorable(gpt2, "h.0.attn.c_attn.bias")
    assert not ignorable(neox, "embed_out.weight")
    assert ignorable(neox, "gpt_neox.layers.0.attention.masked_bias")
    assert ignorable(deepseek, "model.layers.2.eh_proj.weight")  # its prediction layer
    assert not ignorable(deepseek, "model.layers.1.mlp.gate.weight")
    kept = [n for n, _ in Decoder(deepseek).named_parameters() if stays_float32(n)]
    assert kept == ["blocks.1.mlp.router.correction"]


def test_presets() -> None:
    def size(name: str) -> int:
        with torch.device("meta"):
            return sum(x.numel() for x in Decoder(parse(PRESETS[name])).parameters())

    assert 3e6 < size("small") < 6e6
    assert size("25m") == 25_172_352
    assert size("llama-1.1b") == 1_100_048_384  # as TinyLlama-1.1B states
    assert size("llama-7b") == 6_738_415_616  # as Llama-2-7B states
    assert size("tiny") < 200_000


@pytest.fixture
def small() -> Iterator[Callable[..., Tensor]]:
    def make(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    yield make


def test_backward_passes_written_by_hand(small: Callable[..., Tensor]) -> None:
    """Against finite differences."""
    check = torch.autograd.gradcheck
    for kind in ("llama", "gemma2"):
        norm = Norm(5, parse(SHAPES[kind]).norm).double()
        nn.init.normal_(norm.weight)  # type: ignore[arg-type]
        assert check(lambda x, _, norm=norm: norm(x), (small(3, 2, 5), norm.weight))
    cos, sin = small(4, 2).detach(), small(4, 2).detach()
    for interleaved in (False, True):
        turn = lambda x, way=interleaved: rotate(x, (cos, sin), way)  # noqa: E731
        assert check(turn, (small(4, 3, 7),))
    for activation in ACTIVATIONS.values():
        assert check(lambda g, u, a=activation: gated(g, u, a), (small(4, 3), small(4, 3)))


def test_norms_round_once() -> None:
    """A bfloat16 norm is the float64 norm, rounded at the end."""
    for kind in ("llama", "gemma2", "gpt2"):
        norm = Norm(64, parse(SHAPES[kind]).norm).to(torch.bfloat16)
        with torch.no_grad():
            for parameter in norm.parameters():
                parameter.normal_()
        x = torch.randn(40, 64, dtype=torch.bfloat16)
        wide = Norm(64, norm.facts).double()
        wide.load_state_dict(norm.state_dict())
        expected = wide(x.double())
        assert ((norm(x).double() - expected).abs() <= expected.abs() * 2**-8 + 1e-6).all()
