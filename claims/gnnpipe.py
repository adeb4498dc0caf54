"""Claim: layers of a deep graph network as a pipeline send less, and old neighbours do no harm.

Chen et al., "GNNPipe: Scaling Deep GNN Training with Pipelined Model Parallelism", 2023:
communication falls by about the number of layers (22.9 times at most, 8.7 in the mean) against
workers that each have a part of the vertices, at comparable accuracy, though embeddings of other
chunks are of the step before. The example examples/gnnpipe.py is trained in both modes; workers of
a pipeline must give the numbers of one worker; what they receive is counted, what parts of the
graph would receive is the formula over its edges.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path

import torch
from verdict import Figure, conclude

from outsize.collectives import Mesh, World, received
from outsize.collectives.threads import play
from outsize.models.adopt import find_blocks
from outsize.optim import AdamW
from outsize.plan import Pipelined, Plan, Precision
from outsize.plan.plan import per_segment
from outsize.runtime import AdoptedFlow, Job
from outsize.runtime.adopted.flow import reach_of
from outsize.train.prepared.batches import cut

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import gnnpipe as example

from outsize.runtime.recipe import Here, Recipe

LAYERS, DIM, WORKERS, CHUNKS = 16, 32, 4, 8
STEPS, CHECKED = 15, 2
RATE = 1e-2
MEAN = 8.69  # times fewer bytes, the paper's mean
DIGITS = 1e-10


def trained(
    model: example.DeepGraph, graph: example.Graph, chunks: int, workers: int, steps: int
) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses, weights, and bytes that the workers of a pipeline had from each other in the last
    step."""
    mesh = Mesh(pipeline=workers)
    count = LAYERS + 2
    plan = Plan(
        count, per_segment(count), graph.vertices, -(-graph.vertices // chunks), 0,
        Precision.named("float64"), mesh=mesh, pipeline=Pipelined("1f1b"),
    )  # fmt: skip
    models = [copy.deepcopy(model) for _ in range(workers)]

    def run(world: World) -> tuple[list[float], dict[str, torch.Tensor], int]:
        mine = models[world.rank]
        blocks = find_blocks(mine)
        batch = example.batch_of(graph, chunks)
        part = cut(batch, 0, plan.microbatch_rows)
        reach = reach_of(mine, blocks, example.loss_sum, part) if workers > 1 else None
        flow = AdoptedFlow(mine, blocks, plan, example.loss_sum, cut, counted, reach)
        job = Job(flow, plan, Recipe(AdamW(weight_decay=0.01)), Here(world))
        losses, had = [], 0
        for step in range(steps):
            before = embeddings(job)
            losses.append(float(job.step(example.batch_of(graph, chunks, step), RATE)))
            had = embeddings(job) - before
        weights = {name: weight.clone() for name, weight in job.weights()}
        job.close()
        return losses, weights, had

    every = play(mesh, run)
    return every[0][0], every[0][1], sum(had for _, _, had in every)


def counted(batch: example.Batch) -> torch.Tensor:
    """How many labels are known."""
    return torch.tensor(example.known(batch), dtype=torch.float64)


def embeddings(job: Job) -> int:
    """Bytes of embeddings and their gradients that a worker has had from the others."""
    return received(job.world, "stages").total()


def accuracy(
    model: example.DeepGraph, graph: example.Graph, weights: dict[str, torch.Tensor]
) -> float:
    judged = copy.deepcopy(model)
    judged.load_state_dict(weights)
    return example.accuracy(judged, graph)


def of_parts(graph: example.Graph) -> int:
    """Bytes in a step where every worker has a part of the vertices: of each layer the neighbours
    that lie elsewhere, once a worker, and their gradients back."""
    owner = torch.arange(graph.vertices) * WORKERS // graph.vertices
    halo = 0
    for worker in range(WORKERS):
        heard = graph.near_VK[owner == worker].unique()
        halo += int((owner[heard] != worker).sum())
    return 2 * LAYERS * halo * DIM * 8


def same(a: tuple, b: tuple) -> bool:
    """Whether two runs gave the same losses and weights."""
    losses = torch.tensor(a[0], dtype=torch.float64), torch.tensor(b[0], dtype=torch.float64)
    pairs = [losses, *((a[1][name], b[1][name]) for name in b[1])]
    return all(torch.allclose(x, y, rtol=DIGITS, atol=DIGITS) for x, y in pairs)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    graph = example.make_graph()
    graph = replace(graph, x_VD=graph.x_VD.double())
    model = example.DeepGraph(graph, LAYERS, DIM).double()
    with torch.no_grad():
        model(**example.batch_of(graph))  # what came by last, for the first step
    equal, found, sent, ends = True, {}, 0, {}
    for mode, chunks in (("exact", 1), ("approximate", CHUNKS)):
        alone = trained(model, graph, chunks, 1, CHECKED)
        piped = trained(model, graph, chunks, WORKERS, CHECKED)
        equal &= same(piped, alone)
        sent = piped[2]
        ends[mode] = trained(model, graph, chunks, 1, STEPS)[1]
        found[mode] = accuracy(model, graph, ends[mode])
        print(f"  {mode}: accuracy {found[mode]:.4f}; {WORKERS} workers give the numbers of one:"
              f" {same(piped, alone)}; {sent:,} bytes a step between them")  # fmt: skip
    deaf = replace(graph, near_VK=torch.arange(graph.vertices)[:, None].expand_as(graph.near_VK))
    plain = example.DeepGraph(deaf, LAYERS, DIM).double()
    unheard = accuracy(plain, deaf, trained(plain, deaf, 1, 1, STEPS)[1])
    print(f"  vertices that hear themselves alone: accuracy {unheard:.4f}")
    apart = max(float((w - ends["exact"][n]).abs().max()) for n, w in ends["approximate"].items())
    print(f"  weights of the two modes differ by {apart:.1e} at most")
    formula = 2 * (WORKERS - 1) * graph.vertices * DIM * 8
    parts = of_parts(graph)
    print(f"  bytes a step by formula: {formula:,} between layers, {parts:,} between parts")
    conclude(
        'Chen et al., "GNNPipe", 2023',
        "communication falls with the number of layers, 8.7 times in the mean; comparable accuracy",
        f"{parts / sent:.1f} times fewer bytes; accuracy {found['approximate']:.3f} with old"
        f" neighbours, {found['exact']:.3f} exact; workers"
        f" {'as' if equal else 'NOT AS'} one worker",
        f"{graph.vertices} vertices, {graph.near_VK.shape[1]} neighbours each, a fifth of them in"
        f" other regions; {LAYERS} layers, hidden {DIM}, float64; {WORKERS} workers as threads,"
        f" {CHUNKS} chunks, gradients within chunks; bytes between parts by formula, {STEPS} steps",
        Figure("bytes, fewer than between parts of the graph", parts / sent, MEAN),
        Figure(
            "accuracy with old neighbours over exact",
            found["approximate"] / found["exact"],
            1.0,
            nothing=unheard / found["exact"],
        ),
        Figure("time of an epoch, mean", None, 1.58),
        holds={"workers give the numbers of one": equal, "bytes as the formula": sent == formula},
    )


if __name__ == "__main__":
    main()
