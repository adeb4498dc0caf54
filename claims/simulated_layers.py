"""A decoder's layers under tensor parallelism by the event simulator, wired in several ways.

Seconds of one layer: attention, mlp (compute), one sum over the workers (network).
"""

from __future__ import annotations

from dataclasses import dataclass

from outsize.simulate.events import Node, run

COMPUTE, NETWORK = "compute", "network"


@dataclass(frozen=True)
class Layer:
    """Seconds; layers: how many follow one another. scores: of attention, beside its products."""

    attention: float
    mlp: float
    sum: float
    layers: int = 32
    scores: float = 0.0


def layer_of(
    tokens: int,
    hidden: int,
    weights: tuple[float, float],
    workers: int,
    flops: float,
    memory: float,
    rate: float,
    latency: float,
    layers: int,
) -> Layer:
    """weights: of attention and feed-forward network of a layer. flops, memory (bytes a second):
    that a worker reaches; rate: bytes a second that it sends, latency: of a sum. Two bytes a
    number; the scores of attention are left out."""

    def seconds(count: float) -> float:
        return max(2 * tokens * count / flops, 2 * count / memory) / workers

    moved = 2 * tokens * hidden * 2 * (workers - 1) / workers
    return Layer(seconds(weights[0]), seconds(weights[1]), latency + moved / rate, layers)


def plain(layer: Layer) -> float:
    """Everything waits."""
    return layer.layers * (layer.attention + layer.scores + layer.mlp + 2 * layer.sum)


def halves(layer: Layer) -> float:
    """ISO: two halves of the tokens by turns. The second one sees three times as many scores."""
    nodes, before = list[Node](), dict[int, tuple[int, ...]]({0: (), 1: ()})
    share = (layer.sum) / 2
    for _ in range(layer.layers):
        for seconds, scores in ((layer.attention / 2, layer.scores / 4), (layer.mlp / 2, 0.0)):
            for half in (0, 1):
                nodes.append(Node(0, COMPUTE, seconds + (1, 3)[half] * scores, before[half]))
                nodes.append(Node(0, NETWORK, share, (len(nodes) - 1,)))
                before[half] = (len(nodes) - 1,)
    return run(nodes).makespan


def ladder(layer: Layer) -> float:
    """Every branch needs all sums but the one before it."""
    nodes, sums = list[Node](), list[int]()
    for _ in range(layer.layers):
        for seconds in (layer.attention, layer.mlp):
            needs = (sums[-2],) if len(sums) > 1 else ()
            nodes.append(Node(0, COMPUTE, seconds, needs))
            nodes.append(Node(0, NETWORK, layer.sum, (len(nodes) - 1,)))
            sums.append(len(nodes) - 1)
    return run(nodes).makespan


def kraken(layer: Layer) -> float:
    """One sum a layer, beside the next layer's attention."""
    nodes, fed = list[Node](), -1
    for _ in range(layer.layers):
        needs: tuple[int, ...] = ()
        if fed >= 0:
            nodes.append(Node(0, NETWORK, layer.sum, (fed,)))
            needs = (len(nodes) - 1,)
        nodes.append(Node(0, COMPUTE, layer.attention, (fed,) if fed >= 0 else ()))
        nodes.append(Node(0, COMPUTE, layer.mlp, needs))
        fed = len(nodes) - 1
    nodes.append(Node(0, NETWORK, layer.sum, (fed,)))
    return run(nodes).makespan
