"""Claim: two rules give a tensor-parallel plan for any language model, without configuration.

Tan et al., "Redco: A Lightweight Tool to Automate Distributed Training of LLMs on Any GPU/TPUs",
2023. Plans for twelve architectures of transformers are derived from their unmodified code, run by
two workers and compared with the plain model: loss and every gradient. Needs transformers.
"""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path

from torch import Tensor, nn
from verdict import Figure, conclude

from outsize.collectives import Mesh, World, along
from outsize.parallel.automatic.apply import spread
from outsize.parallel.automatic.derive import derive

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from foreign import IDS, MODELS, model_of
from threads import play

LEAST = 1e-6  # below it a gradient is rounding: that of a key's bias is zero, but for this


def loss_of(model: nn.Module) -> Tensor:
    logits = model(input_ids=IDS).logits
    loss: Tensor = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    return loss


def examine(name: str) -> tuple[int, int, float, float]:
    """(rows found in a block, rows left whole, seconds, largest relative difference)."""
    plain = model_of(name)
    start = time.perf_counter()
    derived = derive(plain, 2, (IDS,))
    seconds = time.perf_counter() - start
    expected = loss_of(plain)
    expected.backward()

    def work(world: World) -> float:
        axis = along(world, "tensor")
        model = copy.deepcopy(plain)
        model.zero_grad()
        cuts = spread(model, derived, axis)
        loss = loss_of(model)
        loss.backward()
        worst = float((loss - expected).abs() / expected)
        for key, parameter in model.named_parameters():
            grad, whole = parameter.grad, plain.get_parameter(key).grad
            assert grad is not None and whole is not None
            if cuts[key].partial:
                axis.all_reduce(grad)
            scale = max(float(whole.abs().max()), LEAST)
            worst = max(worst, float((grad - cuts[key].of(whole)).abs().max()) / scale)
        return worst

    first = next(iter(derived.values()))
    return len(first.groups), len(first.left), seconds, max(play(Mesh(tensor=2), work))


def main() -> None:
    found = {name: examine(name) for name in MODELS}
    for name, (groups, left, seconds, worst) in found.items():
        print(f"  {name:<22} {groups} of {groups + left} pairs, {seconds:.2f} s, {worst:.0e}")
    whole = [name for name, (_, left, _, _) in found.items() if not left]
    worst = max(difference for *_, difference in found.values())
    conclude(
        'Tan et al., "Redco", 2023',
        "two rules derive tensor parallelism for any given LLM without further coding",
        f"{len(found)} of {len(found)} models right, {len(whole)} of them with every pair of layers"
        f" cut; largest relative difference {worst:.1e}",
        "tiny models of transformers' classes, 2 workers as threads, float64",
        Figure(
            "configurations with every pair of layers cut", len(whole), len(found), "", nothing=0
        ),
        Figure("jobs by three functions", None, 3, ""),
        holds={
            "the plain model's numbers at 1e-10": worst < 1e-10,
            "pairs in every configuration": all(groups for groups, *_ in found.values()),
        },
    )


if __name__ == "__main__":
    main()
