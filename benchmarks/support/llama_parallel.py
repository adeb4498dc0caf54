"""A lean Llama in plain PyTorch, which all peers train: no slower and no larger than transformers'.

B rows, S tokens of a row, D hidden, H heads, K head size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from support.contender_parallel import Task, targets_of
from torch import Tensor, nn
from torch.nn import functional as F

NAMES = {  # here: in the files
    "embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head",
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "attention.q": "self_attn.q_proj", "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj", "attention.o": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip


class Attention(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, self.size = config["hidden_size"], config["head_dim"]
        heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
        self.q = nn.Linear(hidden, heads * self.size, bias=False)
        self.k = nn.Linear(hidden, groups * self.size, bias=False)
        self.v = nn.Linear(hidden, groups * self.size, bias=False)
        self.o = nn.Linear(heads * self.size, hidden, bias=False)

    def forward(self, x_BSD: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
        q, k, v = (
            f(x_BSD).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        q, k = (x * cos_SK + _turned(x) * sin_SK for x in (q, k))
        grouped = q.shape[1] != k.shape[1]
        o_BHSK = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        y_BSD: Tensor = self.o(o_BHSK.transpose(1, 2).flatten(2))
        return y_BSD


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class MLP(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        y_BSD: Tensor = self.down(F.silu(self.gate(x_BSD)) * self.up(x_BSD))
        return y_BSD


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.attention_norm = nn.RMSNorm(hidden, eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(hidden, eps)
        self.mlp = MLP(config)

    def forward(self, x_BSD: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos_SK, sin_SK)
        y_BSD: Tensor = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return y_BSD


class Llama(nn.Module):
    """ids_BS -> logits_BSV."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.embed = nn.Embedding(config["vocab_size"], hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(hidden, config["rms_norm_eps"])
        self.head = nn.Linear(hidden, config["vocab_size"], bias=False)
        self.theta, self.size = config["rope_theta"], config["head_dim"]

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSD = self.embed(ids_BS)
        place_S = torch.arange(ids_BS.shape[1], dtype=torch.float32)
        speed_K = self.theta ** (-torch.arange(0, self.size, 2, dtype=torch.float32) / self.size)
        angle_SK = torch.outer(place_S, speed_K).repeat(1, 2)
        cos_SK, sin_SK = angle_SK.cos(), angle_SK.sin()
        for layer in self.layers:
            x_BSD = layer(x_BSD, cos_SK, sin_SK)
        logits_BSV: Tensor = self.head(self.norm(x_BSD))
        return logits_BSV


def model_of(task: Task) -> Llama:
    """The model with its weights."""
    with torch.device("meta"):
        model = Llama(task.config)
    model.to_empty(device="cpu")
    stored = torch.load(task.state, mmap=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(stored[stored_name(name)])
    return model.train()


def stored_name(name: str) -> str:
    """A parameter's name in the files."""
    module, _, leaf = name.rpartition(".")
    head, _, rest = module.partition(".")
    if head != "layers":
        return f"{NAMES[module]}.{leaf}"
    number, _, inner = rest.partition(".")
    return f"model.layers.{number}.{NAMES[inner]}.{leaf}"


def loss_of(logits_BSV: Tensor, ids_BS: Tensor) -> Tensor:
    """Mean over the tokens that have a next one."""
    return F.cross_entropy(logits_BSV.flatten(0, 1), targets_of(ids_BS).flatten())


def groups_of(model: nn.Module, task: Task) -> list[dict[str, Any]]:
    """Parameter groups: matrices decay, vectors do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": task.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def adamw(model: nn.Module, task: Task) -> torch.optim.AdamW:
    groups = groups_of(model, task)
    return torch.optim.AdamW(groups, lr=task.lr, betas=task.betas, eps=task.eps, fused=True)
