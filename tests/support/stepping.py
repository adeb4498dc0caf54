"""Steps of decoding through the blocks of a model."""

from __future__ import annotations

import torch

from outsize.decode.paged import PagedCache, PagedPast, Part
from outsize.decode.runs import Run
from outsize.kernels import rows
from outsize.models.decoder import Decoder

TABLES, FED = ([7, 2], [0], [4, 5]), ((17, 0, 3), (1, 4, 20), (1, 1, 1))
LLAMA = {
    "model_type": "llama", "vocab_size": 50, "hidden_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 160,
    "max_position_embeddings": 200,
}  # fmt: skip


def stepped(
    model: Decoder,
    cache: PagedCache,
    through: Run,
    tables: tuple[list[int], ...] = TABLES,
    fed_each: tuple[tuple[int, ...], ...] = FED,
) -> list[torch.Tensor]:
    """What goes out of the blocks in each step. tables: pages by sequence; fed_each: by step,
    tokens of each."""
    draw, found = torch.Generator().manual_seed(5), []
    before = [0] * len(tables)
    with torch.no_grad(), rows.alone():
        for fed in fed_each:
            parts = (Part(tables[n], before[n], count, 0, n) for n, count in enumerate(fed))
            past = PagedPast(cache, tuple(part for part in parts if part.tokens))
            before = [a + b for a, b in zip(before, fed, strict=True)]
            device = model.prologue.tokens.weight.device
            context = model.context(past.positions(device), past.bounds, past=past)
            ids = torch.randint(50, (past.bounds[-1],), generator=draw)
            x_TD = model.prologue(ids.to(device), context)
            for some in through(list(model.blocks), context):
                x_TD = some(x_TD)
            found.append(x_TD)
    return found
