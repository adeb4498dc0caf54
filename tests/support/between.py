"""Modules of somebody's own, each with other code between its blocks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, VOCAB = 8, 11


class Block(nn.Module):
    """Attention and a feed-forward; `pair`: gives a tuple with something else beside it."""

    def __init__(self, pair=False):
        super().__init__()
        self.norm, self.pair = nn.LayerNorm(WIDTH), pair
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))

    def forward(self, x, mask=None, extra=None):
        h = self.norm(x)
        if extra is not None:
            h = h + extra
        y = x + self.attend(h, h, h, attn_mask=mask, need_weights=False)[0]
        y = y + self.wide(y)
        return (y, {"mean": y.mean(-1, keepdim=True), "tokens": x.shape[1]}) if self.pair else y


class Chain(nn.Module):
    """Tokens in, logits out; the code between the blocks scales by parameters of its own."""

    def __init__(self, blocks=5, tied=False, pair=False):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList(Block(pair) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def prologue(self, ids):
        places = torch.arange(ids.shape[1], device=ids.device)
        mask = torch.ones(len(places), len(places), dtype=torch.bool).triu(1)
        return self.tokens(ids) + self.places(places), mask

    def forward(self, ids):
        x, mask = self.prologue(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class Pairs(Chain):
    """Blocks give tuples and dictionaries; what they give beside is read by the next one."""

    def __init__(self):
        super().__init__(pair=True)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, ids):
        x, mask = self.prologue(ids)
        extra = None
        for block in self.blocks:
            x, more = block(x, mask.to(x.dtype) * -9.0, extra)
            extra = more["mean"] * self.scale * more["tokens"]
        return self.head(self.norm(x) + extra)


class Skips(Chain):
    """The second half reads what the first half gave, mirrored, through weights between blocks."""

    def __init__(self):
        super().__init__(blocks=6)
        self.across = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, ids):
        x, mask = self.prologue(ids)
        kept = []
        for i, block in enumerate(self.blocks):
            if i >= 3:
                x = x + self.across[i - 3](kept[5 - i]).tanh()
            x = block(x, mask)
            kept.append(x)
        return self.head(self.norm(x) + 0.1 * kept[0])


class InPlace(Skips):
    """Changes what blocks give, which later ones read as it is then."""

    def forward(self, ids):
        x, mask = self.prologue(ids)
        kept = []
        for i, block in enumerate(self.blocks):
            x = block(x if i < 3 else x + kept[5 - i], mask)
            x = x.relu_() if i % 2 else x.mul_(0.7)
            kept.append(x)
        return self.head(self.norm(x) + 0.1 * kept[0])


class EncoderDecoder(nn.Module):
    """Every block of the decoder reads the encoder's output, normalised by code between blocks."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.between = nn.LayerNorm(WIDTH)
        self.decoder = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        memory = self.tokens(ids)
        for block in self.encoder:
            memory = block(memory)
        memory = self.between(memory)
        x = self.tokens(ids.flip(1))
        for block in self.decoder:
            x = block(x, None, memory)
        return self.head(x)


def cross_entropy(output, ids):
    return F.cross_entropy(output[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def tokens(rows=2, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (rows, 7), generator=generator) for _ in range(2)]


def made(kind, *args, seed=0):
    torch.manual_seed(seed)
    model = kind(*args).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model
