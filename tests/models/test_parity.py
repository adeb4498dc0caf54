"""The native decoder against transformers on random weights, family by family, in float64.

`pytest -k parity -s` prints the table. Three comparisons a row: logits, every gradient, and the
logits of transformers after reading back what the native model wrote. The reference is made
truly float64: transformers asks for float32 in norms, softmax, routers and ropes, and a
TorchFunctionMode answers with float64. Weights and gradients go through transformers' own
save_pretrained, so that their names owe nothing to outsize.models.names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from float64 import Float64
from safetensors.torch import load_file, save_file
from torch import Tensor

from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.models.families import parse
from outsize.models.names import layout

transformers = pytest.importorskip("transformers")

VOCAB, ROWS, LENGTH = 97, 2, 37
LIMIT = 1e-10  # float64 rounds at 1e-16; depth, softmax and caps cost some digits

PLAIN = {"attn_implementation": "eager", "experts_implementation": "eager"}
COMMON = {
    "vocab_size": VOCAB,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = {
    **COMMON,
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 10,
}
PHI3 = {key: LLAMA[key] for key in LLAMA if key != "head_dim"} | {"model_type": "phi3"}
LONG, SHORT = [1.0, 1.5, 2.0, 3.0, 4.5], [1.0, 1.1, 1.2, 1.3, 1.4]


def scaled(kind: str, longest: int = 64, **more: Any) -> dict[str, Any]:
    """Llama with a rope scaling in the old layout."""
    scaling = {"rope_type": kind, **more}
    return {**LLAMA, "max_position_embeddings": longest, "rope_scaling": scaling}


MOE = {
    "hidden_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
}
DEEPSEEK = {
    **COMMON,
    **MOE,
    "model_type": "deepseek_v3",
    "intermediate_size": 72,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 18,
    "q_lora_rank": 22,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 12,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
}
del DEEPSEEK["head_dim"]
GEMMA = {
    **COMMON,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "max_position_embeddings": 64,
    "sliding_window": 9,
    "query_pre_attn_scalar": 10,
}
NEOX = {
    **COMMON,
    "model_type": "gpt_neox",
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
    "rotary_pct": 0.25,
}
GPT2 = {
    **COMMON,
    "model_type": "gpt2",
    "n_embd": 42,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 50,
}
OPT = {
    **COMMON,
    "model_type": "opt",
    "hidden_size": 42,
    "num_hidden_layers": 2,
    "ffn_dim": 70,
    "num_attention_heads": 3,
    "max_position_embeddings": 50,
}

CASES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama, tied, biases": {
        **LLAMA,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama, rope linear": scaled("linear", factor=3.0),
    "llama, rope dynamic": scaled("dynamic", longest=16, factor=2.0),
    "llama, rope dynamic, short": scaled("dynamic", longest=64, factor=2.0),
    "llama, rope yarn": scaled("yarn", factor=4.0, original_max_position_embeddings=16),
    "llama, rope yarn, all keys": scaled(
        "yarn",
        factor=4.0,
        original_max_position_embeddings=16,
        beta_fast=4.0,
        beta_slow=0.5,
        truncate=False,
        attention_factor=1.3,
    ),
    "llama, rope longrope": scaled(
        "longrope", short_factor=SHORT, long_factor=LONG, original_max_position_embeddings=16
    ),
    "llama, rope longrope, short": scaled(
        "longrope",
        short_factor=SHORT,
        long_factor=LONG,
        factor=4.0,
        original_max_position_embeddings=40,
    ),
    "llama, rope llama3": scaled(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
    ),
    "llama, new layout": {
        **LLAMA,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
    },
    "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": 8},
    "qwen2": {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2, windows": {
        **LLAMA,
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "qwen3": {**LLAMA, "model_type": "qwen3", "attention_bias": True},
    "gemma2": {
        **GEMMA,
        "model_type": "gemma2",
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 4.0,
    },
    "gemma2, untied, no caps": {
        **GEMMA,
        "model_type": "gemma2",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": False,
    },
    "gemma3": {
        **GEMMA,
        "model_type": "gemma3_text",
        "sliding_window_pattern": 3,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "final_logit_softcapping": 4.0,
    },
    "gemma3, new layout": {
        **GEMMA,
        "model_type": "gemma3_text",
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 3000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
        },
    },
    "phi3": {**PHI3, "sliding_window": 11},
    "phi3, longrope, partial": {
        **PHI3,
        "hidden_size": 60,
        "partial_rotary_factor": 0.4,
        "original_max_position_embeddings": 16,
        "rope_scaling": {"type": "longrope", "short_factor": SHORT[:2], "long_factor": LONG[:2]},
    },
    "olmo2": {**LLAMA, "model_type": "olmo2"},
    "starcoder2": {**LLAMA, "model_type": "starcoder2", "sliding_window": 13},
    "starcoder2, no biases": {
        **LLAMA,
        "model_type": "starcoder2",
        "use_bias": False,
        "tie_word_embeddings": False,
    },
    "gpt2": GPT2,
    "gpt2, scaled by depth, untied": {
        **GPT2,
        "scale_attn_by_inverse_layer_idx": True,
        "tie_word_embeddings": False,
        "n_inner": 77,
    },
    "gpt_neox": NEOX,
    "gpt_neox, in turn": {**NEOX, "use_parallel_residual": False, "attention_bias": False},
    "opt": OPT,
    "opt, as 350m": {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 26},
    "opt, bare": {**OPT, "enable_bias": False, "layer_norm_elementwise_affine": False},
    "mixtral": {
        **COMMON,
        **MOE,
        "model_type": "mixtral",
        "intermediate_size": 56,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 10,
    },
    "qwen3_moe": {
        **COMMON,
        **MOE,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "intermediate_size": 56,
        "moe_intermediate_size": 26,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "mlp_only_layers": [1],
    },
    "qwen3_moe, normalised": {
        **COMMON,
        **MOE,
        "model_type": "qwen3_moe",
        "intermediate_size": 56,
        "moe_intermediate_size": 26,
        "num_experts": 40,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
    },
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3, full-rank queries": {
        **DEEPSEEK,
        "q_lora_rank": None,
        "rope_interleave": False,
        "rope_scaling": None,
        "attention_bias": True,
        "v_head_dim": 20,
        "n_group": 1,
        "topk_group": 1,
    },
}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """New tensors are float64, reference and native alike."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with Float64():
        yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    transformers.utils.logging.disable_progress_bar()
    rows: list[str] = []
    yield rows
    head = f"{'family':34}{'logits':>12}{'gradients':>12}{'reloaded':>12}   worst gradient"
    print("\n" + "\n".join([head, *rows]))


def reference(config: dict[str, Any]) -> Any:
    """The transformers model with random weights, none of them at a neutral value."""
    generator = torch.Generator().manual_seed(7)
    known = {k: v for k, v in config.items() if k != "model_type"}
    made = transformers.AutoConfig.for_model(config["model_type"], **json.loads(json.dumps(known)))
    model = transformers.AutoModelForCausalLM.from_config(made, **PLAIN)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(tensor.shape, generator=generator)
            if "correction_bias" in name:
                tensor.copy_(noise * 0.2)
            elif isinstance(tensor, torch.nn.Parameter):
                tensor.copy_(noise * 0.25 + (1 if "norm" in name and "gemma" not in name else 0))
    return model.eval()


def stored(model: Any, path: Path) -> dict[str, Tensor]:
    """The model's tensors under the names that its files have."""
    model.save_pretrained(path)
    return load_file(path / "model.safetensors")


def native(config: DecoderConfig, tensors: dict[str, Tensor]) -> Decoder:
    """The native decoder with weights from a Hugging Face file, each stored tensor used once."""
    model = Decoder(config).double()
    parameters = dict(model.named_parameters())
    unused = set(tensors)
    for entry in layout(config):
        unused -= set(entry.theirs)
        parts = entry.split(tuple(tensors[name] for name in entry.theirs))
        for ours, tensor in zip(entry.ours, parts, strict=True):
            parameters.pop(ours).data.copy_(tensor)
    assert not parameters and not unused
    return model


def write(model: Decoder, path: Path) -> None:
    """What a reader of Hugging Face directories finds."""
    path.mkdir()
    parameters = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for entry in layout(model.config):
        merged = entry.merge(tuple(parameters[name].detach() for name in entry.ours))
        tensors.update(zip(entry.theirs, (x.contiguous() for x in merged), strict=True))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(model.config.source))


def distance(ours: Tensor, theirs: Tensor, least: float = 0.0) -> float:
    """The largest difference, relative to the largest magnitude; zeros must be met by zeros."""
    largest, difference = theirs.abs().max().item(), (ours - theirs).abs().max().item()
    largest = max(largest, least)
    return difference / largest if largest else difference


@pytest.mark.parametrize("name", CASES)
def test_parity(name: str, tmp_path: Path, table: list[str]) -> None:
    config = CASES[name]
    theirs = reference(config)
    ours = native(parse(config), stored(theirs, tmp_path / "weights"))
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=generator)
    pull = torch.randn(ROWS, LENGTH, VOCAB, generator=generator)

    expected = theirs(ids).logits
    logits = ours(ids)
    assert logits.dtype == expected.dtype == torch.float64
    far = distance(logits, expected)

    (expected * pull).sum().backward()
    (logits * pull).sum().backward()
    with torch.no_grad():
        for parameter in theirs.parameters():  # saved as if the gradients were the weights
            parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    gradients = stored(theirs, tmp_path / "gradients")
    parameters = dict(ours.named_parameters())
    # Without a rope a key's bias moves all scores of a query alike, which softmax does not see:
    # its gradient is rounding noise around zero and has no magnitude to be relative to.
    least = 1e-3 * max(x.abs().max().item() for x in gradients.values())
    worst, where = 0.0, "none"
    for entry in layout(ours.config):
        parts = entry.split(tuple(gradients[x] for x in entry.theirs))
        for ours_name, gradient in zip(entry.ours, parts, strict=True):
            if not parameters[ours_name].requires_grad:
                continue
            got = parameters[ours_name].grad
            assert got is not None, f"{ours_name} has no gradient"
            worst, where = max((worst, where), (distance(got, gradient, least), ours_name))

    write(ours, tmp_path / "written")
    reread = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "written", dtype=torch.float64, **PLAIN
    )
    back = distance(reread.eval()(ids).logits.detach(), expected.detach())
    table.append(f"{name:34}{far:12.1e}{worst:12.1e}{back:12.1e}   {where}")
    assert far < LIMIT, f"logits differ by {far:.1e}"
    assert worst < LIMIT, f"gradient of {where} differs by {worst:.1e}"
    assert back < LIMIT, f"logits after reloading differ by {back:.1e}"
