"""A deep graph network whose layers are the stages of a pipeline.

Chen et al., "GNNPipe: Scaling Deep GNN Training with Pipelined Model Parallelism", 2023: a worker
has some layers and the whole graph, so that only embeddings between its layers and the next
worker's travel, whatever the edges. A step is over all vertices, in one of two modes:

exact          All vertices are one microbatch: a layer needs all of the one before. A pipeline has
               nothing to overlap then, and only holds a part of the layers on every worker;
               claims/gnnpipe.py runs it so, while `prepare` asks for as many chunks as workers.
approximate    Chunks of vertices are the microbatches. A layer sees its chunk as it is now and all
               others as they last came by: earlier chunks in this step, the rest in the one before.
               Gradients stay within chunks. The order of chunks changes every step.

Run it on one worker, or on several:

    python examples/gnnpipe.py --chunks 8
    torchrun --nproc-per-node 2 examples/gnnpipe.py --chunks 8
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import outsize

Batch = Mapping[str, Tensor]
_DRAWS = 400


@dataclass(frozen=True)
class Graph:
    """x_VD: features. labels_V. near_VK: the neighbours that a vertex hears, itself not among them.
    train_V: whether its label is known. Vertices of a region, as a partitioner finds them, follow
    one another, and `regions` have as many each."""

    x_VD: Tensor
    labels_V: Tensor
    near_VK: Tensor
    train_V: Tensor
    regions: int

    @property
    def vertices(self) -> int:
        return len(self.labels_V)


def make_graph(
    vertices: int = 2000, regions: int = 8, near: int = 10, classes: int = 5, dim: int = 32
) -> Graph:
    """Four neighbours of five lie in the vertex's region; half are of its class. Features
    say little by themselves. The same every time."""
    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (vertices,), generator=rng)
    region = torch.arange(vertices) * regions // vertices
    within = torch.rand(vertices, near, generator=rng) < 0.8
    alike = torch.rand(vertices, near, generator=rng) < 0.5
    near_VK = torch.randint(vertices, (vertices, near), generator=rng)
    open_ = torch.ones(vertices, near, dtype=torch.bool)
    here = torch.arange(vertices)[:, None]
    for _ in range(_DRAWS):  # each drawn anew until it suits; a small graph may lack such a vertex
        suits = (region[near_VK] == region[:, None]) == within
        suits &= ((labels[near_VK] == labels[:, None]) == alike) & (near_VK != here)
        open_ &= ~suits
        drawn = torch.randint(vertices, (vertices, near), generator=rng)
        near_VK = torch.where(open_, drawn, near_VK)
    centres = torch.randn(classes, dim, generator=rng)
    noise = torch.randn(vertices, dim, generator=rng)
    train = torch.rand(vertices, generator=rng) < 0.3
    return Graph(0.3 * centres[labels] + noise, labels, near_VK, train, regions)


class Layer(nn.Module):
    """h + relu(own(h) + near(mean of what the neighbours had)), normalised first (SAGE's mean)."""

    def __init__(self, near_VK: Tensor, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.own, self.near = nn.Linear(dim, dim), nn.Linear(dim, dim, bias=False)
        self.near_VK: Tensor
        self.past_VD: Tensor
        self.register_buffer("near_VK", near_VK, persistent=False)
        # What came by last, of every vertex; with all vertices in one batch nothing of it is used.
        self.register_buffer("past_VD", torch.zeros(len(near_VK), dim), persistent=False)

    def forward(self, h_ND: Tensor, ids_N: Tensor) -> Tensor:
        """Embeddings of vertices ids_N."""
        x_ND = self.norm(h_ND)
        seen_VD = self.past_VD.index_copy(0, ids_N, x_ND)
        heard_ND = seen_VD[self.near_VK[ids_N]].mean(1)
        self.past_VD = seen_VD.detach()
        return h_ND + F.relu(self.own(x_ND) + self.near(heard_ND))


class DeepGraph(nn.Module):
    """Layers between a projection and a classifier."""

    def __init__(self, graph: Graph, layers: int = 16, dim: int = 32) -> None:
        super().__init__()
        self.stem = nn.Linear(graph.x_VD.shape[1], dim)
        self.blocks = nn.ModuleList(Layer(graph.near_VK, dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, int(graph.labels_V.max()) + 1)

    def forward(self, x: Tensor, ids: Tensor, labels: Tensor, train: Tensor) -> Tensor:
        """Logits of the vertices `ids`, whose features are x; labels and train are for the loss."""
        h_ND = self.stem(x)
        for block in self.blocks:
            h_ND = block(h_ND, ids)
        logits: Tensor = self.head(self.norm(h_ND))
        return logits


def loss_sum(logits: Tensor, batch: Batch) -> Tensor:
    """Over the vertices whose label is known."""
    each = F.cross_entropy(logits, batch["labels"], reduction="none")
    return (each * batch["train"]).sum()


def known(batch: Batch) -> float:
    """How many labels are known: what the sum is divided by."""
    return float(batch["train"].sum())


def batch_of(graph: Graph, chunks: int = 1, step: int = 0) -> dict[str, Tensor]:
    """All vertices, chunk after chunk, in an order of the chunks that is drawn for the step."""
    order = torch.randperm(chunks, generator=torch.Generator().manual_seed(step))
    parts = torch.arange(graph.vertices).chunk(chunks)
    ids = torch.cat([parts[i] for i in order.tolist()])
    train = graph.train_V[ids].to(graph.x_VD.dtype)
    return {"x": graph.x_VD[ids], "ids": ids, "labels": graph.labels_V[ids], "train": train}


def accuracy(model: DeepGraph, graph: Graph) -> float:
    """Of the vertices whose labels were kept from training; every neighbour as it is now."""
    batch = batch_of(graph)
    with torch.no_grad():
        right = model(**batch).argmax(1) == batch["labels"]
    return float(right[~graph.train_V].double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a deep graph network as a pipeline.")
    parser.add_argument("--chunks", type=int, default=1, help="1: exact; more: approximate")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, default=16)
    args = parser.parse_args()
    torch.manual_seed(0)
    graph = make_graph()
    model = DeepGraph(graph, args.layers)
    with torch.no_grad():
        model(**batch_of(graph))  # what came by last, for the first step
    workers = int(os.environ.get("WORLD_SIZE", "1"))
    job = outsize.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        loss=loss_sum,
        count=known,
        microbatches=args.chunks,
        mesh=f"pipeline={workers}" if workers > 1 else None,
    )
    first = os.environ.get("RANK", "0") == "0"
    for step in range(args.steps):
        loss = job.step(batch_of(graph, args.chunks, step))
        if first and step % 10 == 9:
            print(f"step {step + 1}: loss {float(loss):.4f}")
    weights = {name: weight.clone() for name, weight in job.weights()}
    job.close()
    if first:
        mode = "exact" if args.chunks == 1 else "approximate: neighbours of other chunks are old"
        judged = DeepGraph(graph, args.layers)
        judged.load_state_dict(weights)
        print(f"accuracy {accuracy(judged, graph):.3f} ({mode})")


if __name__ == "__main__":
    main()
