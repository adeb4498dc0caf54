"""Small models of transformers, and what automatic tensor parallelism finds in them."""

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

_SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_SHORT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1,
          "eos_token_id": 2}  # fmt: skip
_FALCON = {k: v for k, v in _SIZES.items() if k != "intermediate_size"}
# name: (class of the configuration, its arguments, rows that are found in a block, what is changed)
MODELS = {
    "llama": ("Llama", {**_SIZES, "num_key_value_heads": 2}, ["down_proj", "o_proj"], set()),
    "llama, biases": (
        "Llama", {**_SIZES, "attention_bias": True, "mlp_bias": True}, ["down_proj", "o_proj"],
        set(),
    ),
    "qwen2": ("Qwen2", {**_SIZES, "num_key_value_heads": 2}, ["down_proj", "o_proj"], set()),
    "qwen3": (
        "Qwen3", {**_SIZES, "num_key_value_heads": 2, "head_dim": 8}, ["down_proj", "o_proj"], set()
    ),
    "gpt2": (
        "GPT2", {**_SHORT, "n_positions": 64, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
        ["mlp.c_proj", "attn.c_proj"], {"nf", "split_size"},
    ),
    "gpt-neox": ("GPTNeoX", _SIZES, ["dense_4h_to_h", "attention.dense"], set()),
    "gemma": (
        "Gemma", {**_SIZES, "num_key_value_heads": 1, "head_dim": 8}, ["down_proj", "o_proj"], set()
    ),
    "phi": ("Phi", _SIZES, ["fc2", "dense"], set()),
    "phi3": (
        "Phi3", {**_SIZES, "num_key_value_heads": 2, "pad_token_id": 0}, ["down_proj", "o_proj"],
        {"num_key_value_heads", "config.num_attention_heads"},
    ),
    "opt": (
        "OPT", {**_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0},
        ["fc2", "out_proj"], {"num_heads"},
    ),
    "falcon, groups": (
        "Falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
        ["dense_4h_to_h", "self_attention.dense"], {"num_heads", "num_kv_heads"},
    ),
    "falcon, one key head": (  # its fused weight has a part for all heads: stays whole
        "Falcon", {**_FALCON, "multi_query": True}, ["dense_4h_to_h"], set()
    ),
    "bloom": (  # attention biases are made for all heads, outside the block: stays whole
        "Bloom", {**_SHORT, "hidden_size": 32}, ["dense_4h_to_h"], set()
    ),
}  # fmt: skip
IDS = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(3))


def model_of(name):
    torch.manual_seed(0)
    kind, facts, _, _ = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**facts)
    config.use_cache = False
    config._attn_implementation = "eager" if kind == "Bloom" else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    for parameter in model.parameters():  # biases and norms too
        nn.init.normal_(parameter, std=0.2)
    return model
