"""Bytes that a worker has to have from others in one step, from the layout alone.

For n workers and B bytes: an all-reduce 2 (n - 1) / n B, a reduce-scatter or an all-gather
(n - 1) / n B (Rajbhandari et al., "ZeRO", 2019, section 7; Narayanan et al., "Efficient large-scale
language model training", 2021, and Korthikanti et al., "Reducing activation recomputation", 2022,
for the tensor axis).

T tokens of a worker's rows, D hidden, L layers.
"""

from __future__ import annotations

from math import prod
from typing import Any

from support.contender_parallel import Task
from torch import Tensor

BYTES = 4  # of an element, float32
SCALARS = 4096  # bytes a step: the count of targets, the norm, the loss, and what is agreed upon


def gathered(size: float, workers: int) -> float:
    """Of an all-gather or a reduce-scatter of so many bytes."""
    return size * (workers - 1) / workers


def reduced(size: float, workers: int) -> float:
    """Of an all-reduce."""
    return 2 * gathered(size, workers)


def held(parameters: dict[str, Tensor], tensor: int) -> int:
    """Elements of the parameters on a worker of the tensor axis: matrices are cut, vectors not."""
    return sum(p.numel() // (tensor if p.ndim >= 2 else 1) for p in parameters.values())


def data_volume(size: int, task: Task) -> float:
    """Over the data axis: `size` bytes of parameters lie on a worker and its neighbours.

    Gradients are summed where they stay, and what is updated in parts comes together again;
    parameters that are cut come twice, forward and backward, instead.
    """
    parameters, gradients, optimizer = task.shards
    if optimizer == 1:
        return reduced(size, task.data)
    assert {parameters, gradients} <= {1, optimizer} and optimizer == task.data, "a ZeRO stage"
    times = 3 if parameters > 1 else 2
    return times * gathered(size, task.data)


def tensor_volume(config: dict[str, Any], tokens: int, task: Task) -> float:
    """Over the tensor axis: each branch is summed at its end, and its input's gradient at its
    beginning; so are the embedding and the head's input. The loss needs three numbers a token.

    With the sequence cut between branches the sums are as much, in two halves; the input of a
    branch comes once more for the weights' gradients, and the gradients of norms are sums.
    """
    n, layers, hidden = task.tensor, config["num_hidden_layers"], config["hidden_size"]
    hiddens = tokens * hidden * BYTES
    total = (4 * layers + 2) * reduced(hiddens, n) + reduced(3 * tokens * BYTES, n)
    if task.sequence_parallel:
        total += (2 * layers + 1) * gathered(hiddens, n)
        total += reduced((2 * layers + 1) * hidden * BYTES, n)
    return total


def volume(
    task: Task, parameters: dict[str, Tensor], rows: int, sequence: int
) -> tuple[float, float]:
    """Bytes over the data axis and over the tensor axis, that a worker has from others."""
    tokens = prod((rows // task.data, sequence))
    size = held(parameters, task.tensor) * BYTES
    over_data = data_volume(size, task) if task.data > 1 else 0.0
    over_tensor = tensor_volume(task.config, tokens, task) if task.tensor > 1 else 0.0
    return over_data, over_tensor
