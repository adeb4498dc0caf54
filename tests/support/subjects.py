"""Small decoders of several families, and the plans under which they are trained."""

from __future__ import annotations

from dataclasses import replace

from outsize.models.config import DecoderConfig
from outsize.models.families import parse
from outsize.plan import Plan, Precision, Stage
from outsize.plan.plan import per_segment

VOCAB, SEQUENCE, ROWS = 53, 20, 3

_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {
    "llama": {**_SIZES, "model_type": "llama", "tie_word_embeddings": True},
    "llama, untied": {**_SIZES, "model_type": "llama", "tie_word_embeddings": False},
    "mistral": {**_SIZES, "model_type": "mistral", "sliding_window": 5},
    "gemma2": {
        **_SIZES, "model_type": "gemma2", "head_dim": 8, "query_pre_attn_scalar": 10,
        "sliding_window": 5, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0,
    },
    "gpt2": {
        "model_type": "gpt2", "vocab_size": VOCAB, "n_embd": 24, "n_layer": 3, "n_head": 3,
        "n_positions": 32,
    },
    "mixtral": {
        **_SIZES, "model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "deepseek_v3": {
        **_SIZES, "model_type": "deepseek_v3", "moe_intermediate_size": 16,
        "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4,
        "topk_group": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "kv_lora_rank": 10,
        "q_lora_rank": 12, "qk_rope_head_dim": 6, "qk_nope_head_dim": 8, "v_head_dim": 6,
    },
}  # fmt: skip


def config_of(name: str, **changes: object) -> DecoderConfig:
    """The configuration of a family, some of its keys changed."""
    return parse({**CONFIGS[name], **changes})


def base_plan(named: str = "float64", **changes: object) -> Plan:
    """A plan for the models above: a row a microbatch, a stage a segment."""
    base = Plan(5, per_segment(5), ROWS, 1, SEQUENCE, Precision.named(named))
    return replace(base, **changes)  # type: ignore[arg-type]


MIXED = (Stage(0, 1), Stage(1, 2, ("attention",)), Stage(2, 4, ("block",)), Stage(4, 5))
PLANS = {
    "plain": {"microbatch_rows": 3},
    "accumulate": {},
    "uneven-microbatches": {"microbatch_rows": 2},
    "recompute-block": {"stages": per_segment(5, ("block",))},
    "recompute-parts": {"stages": per_segment(5, ("mlp", "attention"))},
    "split-recompute": {"split_backward": True, "stages": per_segment(5, ("block",))},
    "one-stage": {"stages": (Stage(0, 5),)},
    "two-stages": {"stages": (Stage(0, 2), Stage(2, 5)), "split_backward": True},
    "loss-chunk": {"loss_chunk": 7},
    "mlp-tile": {"mlp_tile": 6, "microbatch_rows": 2},
    "everything": {
        "mlp_tile": 6, "loss_chunk": 7, "split_backward": True, "microbatch_rows": 2,
        "stages": MIXED,
    },
}  # fmt: skip
