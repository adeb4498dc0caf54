"""Claim: one block at a time trains all of an 8B model on a device of 24 GB.

Luo et al., "BAdam: A Memory Efficient Full Parameter Optimization Method for Large Language
Models", 2024 (arXiv 2404.02827): Llama 3-8B in 23.5 GB where Adam needs more than 144 GB (mixed
precision), and scores above LoRA's.

Bytes are foretold of that shape; quality is that of claims/lisa.py, with blocks by turns.
"""

from __future__ import annotations

from lisa import (
    CONFIG,
    GAP,
    LAYERS,
    RATES,
    ROWS,
    SEQUENCE,
    SMALL_RANK,
    STEPS,
    TOKENS,
    compared,
    foretold,
)
from verdict import Figure, conclude

from outsize.models.families import parse
from outsize.plan import Precision
from outsize.techniques.badam import KEY, BAdam

SHAPE = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
HOLDS, ADAM, BATCH = 23.5e9, 144e9, 2  # bytes; rows of a step
MIXED = Precision.named("bfloat16")


def main() -> None:
    config = parse(SHAPE)
    one, whole = (foretold(config, said, MIXED, BATCH, again=True) for said in ({KEY: BAdam()}, {}))
    before, found = compared(KEY, {KEY: BAdam(GAP)})
    kept = found[KEY] / found["LoRA"]
    conclude(
        'Luo et al., "BAdam", 2024',
        "Llama 3-8B in 23.5 GB for Adam's more than 144 GB; scores above LoRA's",
        f"Llama 3-8B {one / 1e9:.1f} GB for {whole / 1e9:.1f} GB, foretold; right bytes"
        f" {found[KEY]:.2%}, LoRA {found['LoRA']:.2%}, all trained {found['full']:.2%}, before"
        f" {before:.2%}",
        f"memory: {BATCH} rows of {TOKENS}, bfloat16 beside weights in float32 of what is trained,"
        f" blocks computed again; quality: {LAYERS} blocks of {CONFIG['hidden_size']}, {STEPS}"
        f" steps of {ROWS} x {SEQUENCE} bytes of e-mail's files, AdamW at the best of {len(RATES)}"
        f" rates, a block for {GAP} steps, LoRA of rank {SMALL_RANK}",
        Figure("GB for Llama 3-8B", one / 1e9, HOLDS / 1e9, "", nothing=whole / 1e9, less=True,
               how="simulated"),
        Figure("less memory than Adam", whole / one, ADAM / HOLDS, how="simulated"),
        Figure("right bytes over LoRA's", kept, 1.0, nothing=before / found["LoRA"],
               other=f"a decoder of {LAYERS} blocks"),
    )  # fmt: skip


if __name__ == "__main__":
    main()
