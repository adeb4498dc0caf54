"""Other people's recipes for a small model, each a plain PyTorch loop that trains for some minutes.

    python benchmarks/peers/recipe_loops.py nanochat --minutes 1 --tokens 1024

plain           a Llama as one writes it, AdamW, a cosine; no recipe of anybody's
modded-nanogpt  Jordan et al., the record of 2024-10-14 (architecture, Muon, rates, trapezoid);
                later records lean on kernels of GPUs and on 8 of them
nanochat        Karpathy, 2026-07-03 (architecture with value embeddings, smear and back-out; Muon
                with polar express, row equilibration, variance reduction and cautious decay; its
                rules for rates and decay by batch and model; one attention pattern, as in its
                runcpu.sh)

Written anew from what they do; the numbers are theirs. What is not theirs: width and depth of the
model (those of `mini`), float32, no torch.compile, and schedules that go by the share of the time
that is over, since no number of steps is known before. Text, tokens, rows and the held-out
documents are those of `outsize train`, which this reads by its `outsize.data`; documents are not
kept apart in a row, as they are in none of the three. Prints a line of JSON.

B rows, S tokens, D width, H heads, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.data import DataConfig, TrainStream, ValidationStream, open_data
from outsize.data.vocabulary import of_data

WIDTH, LAYERS, INNER = 192, 2, 512  # of the preset `mini`
NEWTON = (3.4445, -4.7750, 2.0315)
POLAR = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def rotated(x_BSHK: Tensor, base: float) -> Tensor:
    size = x_BSHK.shape[-1]
    rates = base ** (-torch.arange(0, size, 2).float() / size)
    angle = torch.outer(torch.arange(x_BSHK.shape[1]).float(), rates)[:, None]
    first, second = x_BSHK.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos + second * sin, second * cos - first * sin], -1)


class Attention(nn.Module):
    """norms: of queries and keys, which then count `sharp` times each."""

    def __init__(self, heads: int, base: float, norms: bool, sharp: float = 1.0) -> None:
        super().__init__()
        self.heads, self.base, self.norms, self.sharp = heads, base, norms, sharp
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, value: Tensor | None = None) -> Tensor:
        """value: added to those of the tokens, (B, S, H, K)."""
        q, k, v = (one(x).unflatten(-1, (self.heads, -1)) for one in (self.q, self.k, self.v))
        v = v if value is None else v + value
        q, k = rotated(q, self.base), rotated(k, self.base)
        if self.norms:
            q, k = norm(q) * self.sharp, norm(k) * self.sharp
        y = F.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v)), is_causal=True)
        made: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return made


class Squared(nn.Module):
    """An MLP of relu, squared."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.relu(self.up(x)).square())
        return y


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


@dataclass
class Loop:
    """A model, its optimizer, and what is set before each step. turn: of a step's number and the
    share of the time that is over."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    turn: Callable[[int, float], None]
    clip: float | None = None


def rated(groups: list[dict[str, object]], factor: float) -> None:
    for group in groups:
        group["lr"] = group["initial"] * factor  # type: ignore[operator]


# -- plain -----------------------------------------------------------------------------------------


class Llama(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.attention = nn.ModuleList(Attention(4, 10000, False) for _ in range(LAYERS))
        self.mlp = nn.ModuleList(Gated() for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, eps=1e-5) for _ in range(2 * LAYERS + 1))
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids_BS: Tensor) -> Tensor:
        x = self.tokens(ids_BS)
        for i in range(LAYERS):
            x = x + self.attention[i](self.norms[2 * i](x))
            x = x + self.mlp[i](self.norms[2 * i + 1](x))
        logits: Tensor = self.head(self.norms[-1](x))
        return logits


def plain(vocabulary: int, tokens: int) -> Loop:
    model = Llama(vocabulary)
    parts = [[p for p in model.parameters() if (p.ndim > 1) == matrix] for matrix in (True, False)]
    groups = [
        {"params": part, "weight_decay": decay, "initial": 3e-3}
        for part, decay in zip(parts, (0.1, 0.0), strict=True)
    ]
    own = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))

    def turn(step: int, share: float) -> None:
        falls = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share))
        rated(own.param_groups, min(1.0, (step + 1) / 20) * falls)

    return Loop(model, [own], turn, clip=1.0)


# -- modded-nanogpt --------------------------------------------------------------------------------


class Modded(nn.Module):
    """Tied; norms without weights; what enters the stream begins at zero."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.attention = nn.ModuleList(Attention(2, 10000, True) for _ in range(LAYERS))
        self.mlp = nn.ModuleList(Squared() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        for one in (*(a.o for a in self.attention), *(m.down for m in self.mlp)):
            nn.init.zeros_(one.weight)

    def forward(self, ids_BS: Tensor) -> Tensor:
        x = F.embedding(ids_BS, self.head.weight)
        for attention, mlp in zip(self.attention, self.mlp, strict=True):
            x = x + attention(norm(x))
            x = x + mlp(norm(x))
        logits: Tensor = self.head(norm(x))
        return logits


class Muon(torch.optim.Optimizer):
    """Of 2024: Nesterov's momentum, five quintic steps, an update whose mean square is 1."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__([{"params": params, "initial": lr}], {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(group["momentum"]).add_(p.grad)
                g = p.grad.add(mean, alpha=group["momentum"])
                x = g.T if len(g) > g.shape[1] else g
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    a = x @ x.T
                    x = NEWTON[0] * x + (NEWTON[1] * a + NEWTON[2] * a @ a) @ x
                x = x.T if len(g) > g.shape[1] else x
                p.add_(x, alpha=-group["lr"] * max(g.shape) ** 0.5)


def modded(vocabulary: int, tokens: int) -> Loop:
    """Its rates are for 2^19 tokens a step, and it has no rule for others."""
    model, rate, falling = Modded(vocabulary), 3.6e-3, 1450 / 5100
    adam = torch.optim.AdamW(model.head.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0)
    adam.param_groups[0]["initial"] = rate
    inside = [*model.attention.parameters(), *model.mlp.parameters()]
    muon = Muon(inside, 0.1 * rate)

    def turn(step: int, share: float) -> None:
        for own in (adam, muon):
            rated(own.param_groups, min(1.0, (1 - share) / falling))

    return Loop(model, [adam, muon], turn)


# -- nanochat --------------------------------------------------------------------------------------


class Nanochat(nn.Module):
    """values: embeddings that are mixed into the values of every second layer, the last among
    them, by a gate of each head."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.heads = WIDTH // 64
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.attention = nn.ModuleList(
            Attention(self.heads, 100000, True, 1.2) for _ in range(LAYERS)
        )
        self.mlp = nn.ModuleList(Squared() for _ in range(LAYERS))
        mixed = [i for i in range(LAYERS) if i % 2 == (LAYERS - 1) % 2]
        self.values = nn.ModuleDict({str(i): nn.Embedding(vocabulary, WIDTH) for i in mixed})
        self.gates = nn.ModuleDict({str(i): nn.Linear(12, self.heads, bias=False) for i in mixed})
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        deep = torch.arange(LAYERS) / max(LAYERS - 1, 1)
        self.stream, self.first = nn.Parameter(1.15 - 0.1 * deep), nn.Parameter(0.2 - 0.15 * deep)
        self.smear_gate = nn.Linear(24, 1, bias=False)
        self.smear, self.back = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.full((1,), 0.2))
        self._begin()

    def _begin(self) -> None:
        bound = math.sqrt(3 / WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.8)
        nn.init.normal_(self.head.weight, std=0.001)
        for attention, mlp in zip(self.attention, self.mlp, strict=True):
            for one in (attention.q, attention.k, attention.v):
                nn.init.uniform_(one.weight, -bound, bound)
            nn.init.uniform_(mlp.up.weight, -0.4 * bound, 0.4 * bound)
            nn.init.zeros_(attention.o.weight)
            nn.init.zeros_(mlp.down.weight)
        for one in self.values.values():
            nn.init.uniform_(one.weight, -bound, bound)
        for one in (*self.gates.values(), self.smear_gate):
            nn.init.uniform_(one.weight, 0.0, 0.02)

    def forward(self, ids_BS: Tensor) -> Tensor:
        x = norm(self.tokens(ids_BS))
        gate = self.smear * torch.sigmoid(self.smear_gate(x[:, 1:, :24]))
        x = begun = torch.cat([x[:, :1], x[:, 1:] + gate * x[:, :-1]], 1)
        middle = x
        for i, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            x = self.stream[i] * x + self.first[i] * begun
            x = x + attention(norm(x), self._value(i, ids_BS, norm(x)))
            x = x + mlp(norm(x))
            middle = x if i == LAYERS // 2 else middle
        logits = self.head(norm(x - self.back * middle))
        return 15 * torch.tanh(logits / 15)

    def _value(self, i: int, ids_BS: Tensor, x: Tensor) -> Tensor | None:
        if str(i) not in self.values:
            return None
        gate = 3 * torch.sigmoid(self.gates[str(i)](x[..., :12]))
        own: Tensor = self.values[str(i)](ids_BS).unflatten(-1, (self.heads, -1))
        return gate.unsqueeze(-1) * own


class PolarMuon(torch.optim.Optimizer):
    """Of 2026. What it does to a matrix, in this order: momentum, rows of equal norm, the polar
    factor, its exact norm, each row (or column, of a wide one) by how much it varies, and a decay
    of those weights alone that move towards zero."""

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        super().__init__(
            [{"params": params, "initial": lr}], {"lr": lr, "momentum": 0.95, "decay": 0.0}
        )

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state, dim = self.state[p], -1 if len(p) >= p.shape[1] else -2
                if not state:
                    state["mean"] = torch.zeros_like(p)
                    state["square"] = torch.zeros_like(p.mean(dim, keepdim=True))
                state["mean"].lerp_(p.grad, 1 - group["momentum"])
                g = _polar(p.grad.lerp(state["mean"], group["momentum"]))
                mean = g.square().mean(dim, keepdim=True)
                state["square"].lerp_(mean, 1 - 0.9)
                each = state["square"].clamp_min(1e-10).rsqrt()
                before, after = mean.sum().sqrt(), (mean * each.square()).sum().sqrt()
                g = g * each * (before / after.clamp_min(1e-10))
                p.sub_(group["lr"] * (g + group["decay"] * p * (g * p >= 0)))


def _polar(g: Tensor) -> Tensor:
    size = g.norm() / len(g) ** 0.5
    x = g * (size / g.norm(dim=-1, keepdim=True).clamp_min(1e-6))
    x = x / (x.norm() * 1.01 + 1e-6)
    tall = len(x) > x.shape[1]
    x = x.T if tall else x
    for a, b, c in POLAR:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x.T if tall else x
    return x * (min(x.shape) ** 0.5 / x.norm().clamp_min(1e-6))


def nanochat(vocabulary: int, tokens: int) -> Loop:
    """Its rules: rates by the root of the batch, decay by that and the tokens that its model would
    have; both are tuned at 12 layers of 768 and 2^19 tokens a step."""
    model = Nanochat(vocabulary)
    batch, wide = math.sqrt(tokens / 2**19), (WIDTH / 768) ** -0.5
    own = sum(p.numel() for p in _matrices(model)) + model.head.weight.numel()
    decay = 0.28 * batch * (12 * 12 * 768**2 + 768 * vocabulary) / own
    scalars = [model.smear_gate.weight, model.smear, model.back]
    said: list[tuple[list[nn.Parameter], float, tuple[float, float], float]] = [
        ([model.head.weight], 0.008 * batch * wide, (0.8, 0.96), 0.01),
        ([model.tokens.weight], 0.3 * batch * wide, (0.8, 0.995), 0.001),
        ([*model.values.parameters()], 0.15 * batch * wide, (0.8, 0.995), 0.01),
        ([model.stream], 0.005 * batch, (0.8, 0.95), 0.05),
        ([model.first], 0.5 * batch, (0.96, 0.95), 0.0),
        (scalars, 0.2, (0.8, 0.95), 0.0),
    ]
    groups = [
        {"params": p, "lr": rate, "initial": rate, "betas": betas, "weight_decay": own_decay}
        for p, rate, betas, own_decay in said
    ]
    adam, muon = torch.optim.AdamW(groups, eps=1e-10), PolarMuon(_matrices(model), 0.02 * batch)
    falling = 0.65

    def turn(step: int, share: float) -> None:
        left = min(1.0, (1 - share) / falling)
        for one in (adam, muon):
            rated(one.param_groups, min(1.0, (step + 1) / 40, left + (1 - left) * 0.05))
        ramp = step / 400
        warm = 0.85 * (1 - ramp) + 0.97 * ramp
        muon.param_groups[0]["momentum"] = warm if step < 400 else 0.9 + 0.07 * left
        muon.param_groups[0]["decay"] = decay * 0.5 * (1 + math.cos(math.pi * share))

    return Loop(model, [adam, muon], turn)


def _matrices(model: Nanochat) -> list[nn.Parameter]:
    return [p for part in (model.attention, model.mlp, model.gates) for p in part.parameters()]


# -- the run ---------------------------------------------------------------------------------------

RECIPES: dict[str, Callable[[int, int], Loop]] = {
    "plain": plain, "modded-nanogpt": modded, "nanochat": nanochat,
}  # fmt: skip


def losses(model: nn.Module, ids_BS: Tensor, targets_BS: Tensor) -> Tensor:
    """Nats, summed."""
    return F.cross_entropy(model(ids_BS).flatten(0, 1), targets_BS.flatten(), reduction="sum")


def train(loop: Loop, stream: TrainStream, minutes: float) -> Iterator[float]:
    """The mean loss of each step."""
    begin, step = time.monotonic(), 0
    parameters = list(loop.model.parameters())
    while (share := (time.monotonic() - begin) / (60 * minutes)) < 1:
        loop.turn(step, share)
        batch = stream.batch(step)
        count = int((batch.targets_BS != -100).sum())
        loss = losses(loop.model, batch.ids_BS, batch.targets_BS) / count
        loss.backward()
        if loop.clip is not None:
            nn.utils.clip_grad_norm_(parameters, loop.clip)
        for own in loop.optimizers:
            own.step()
            own.zero_grad(set_to_none=True)
        step += 1
        yield loss.item()


@torch.no_grad()
def bits(model: nn.Module, held: ValidationStream) -> float:
    """A byte of held-out text."""
    nats = sum(float(losses(model, one.ids_BS, one.targets_BS)) for one in held)
    return float(held.bits_per_byte(nats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", choices=list(RECIPES))
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=1024, help="of a step")
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--tokenizer", default="bpe:2048")
    parser.add_argument("--evaluate", type=int, default=65536, help="held-out tokens")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    config = DataConfig()
    place = of_data(asked.tokenizer, config.paths(), config.field, config.cache_directory())
    data = open_data(DataConfig(tokenizer=str(place)))
    torch.manual_seed(asked.seed)
    loop = RECIPES[asked.recipe](data.tokenizer.vocab_size, asked.tokens)
    rows = asked.tokens // asked.sequence
    stream = TrainStream(data.train, asked.seed, rows, asked.sequence)
    begin, found = time.monotonic(), list(train(loop, stream, asked.minutes))
    seconds = time.monotonic() - begin
    held = ValidationStream(data.validation, 16, asked.sequence, asked.evaluate)
    said = {"bits": bits(loop.model, held), "steps": len(found), "seconds": seconds}
    print(json.dumps({**said, "loss": found[-1]}))


if __name__ == "__main__":
    main()
