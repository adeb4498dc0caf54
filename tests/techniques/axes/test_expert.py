"""The expert axis: experts dealt out over workers, tokens sent to them, beside all experts on one.

With every other feature that may meet it: the pairs of tests/verify/test_matrix.py; `outsize verify
--random` draws the axis.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from piped import numbers
from plain import batches
from streamed import model_of, plan_of, small
from subjects import SEQUENCE, VOCAB, config_of
from threads import play
from torch import nn
from verifying import case_of

import outsize
from outsize.collectives import Mesh, PretendWorld
from outsize.collectives.axes import CORE
from outsize.errors import OutsizeError
from outsize.models.dropout import Noise
from outsize.models.experts import Experts, LocalDispatch
from outsize.optim import AdamW
from outsize.optim.parse import parse
from outsize.parallel.divide import divide
from outsize.parallel.execution import execution_of
from outsize.plan import Rest, Sharding, Stage
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.schedule.program import Talk
from outsize.simulate.network import far, near
from outsize.techniques.axes.expert import dealt
from outsize.verify import verify
from outsize.verify.draw import draws

WHOLE = (Stage(0, 1), Stage(1, 4, ("block",)), Stage(4, 5))
BELOW = tuple(replace(s, rest=Rest("disk", optimizer="host")) for s in per_segment(5))
CASES = {
    "uneven experts and rows": ("mixtral", {"mesh": Mesh(expert=4), "mlp_tile": 3}),
    "dense layers, a shared expert": ("deepseek_v3", {
        "mesh": Mesh(expert=3), "sequence_chunk": 9, "mlp_tile": 4, "stages": WHOLE, "rows": 4,
    }),
    "tokens cut": ("mixtral", {"mesh": Mesh(expert=2, context=2)}),
    "experts cut inside": ("mixtral", {
        "mesh": Mesh(2, tensor=2, expert=2), "shards": Sharding(2, 2, 2),
        "sequence_parallel": True, "optimizer": parse("muon", 3e-3, 0.1, (0.9, 0.95), None),
    }),
    "tiers": ("mixtral", {
        "mesh": Mesh(expert=2), "stages": BELOW, "steps": 2, "resume_at": 1, "rows": 3,
    }),
}  # fmt: skip


@pytest.mark.parametrize(("family", "changes"), CASES.values(), ids=CASES)
def test_exact(family: str, changes: dict, monkeypatch) -> None:
    def noise(batch, step):
        return replace(batch, noise=Noise(0.2, 5, step))

    small(monkeypatch)
    plan = {"rows": 5, "microbatch_rows": 1, "clip": 0.5, "steps": 1, **changes}
    found = verify(case_of(family, noise=noise, **plan), own=False)
    assert found.holds, found.exact.worst
    sent = found.sent
    assert sent.network == pytest.approx(sent.formula.states, rel=1e-3, abs=64)
    assert 0.1 * sent.formula.compute < sent.compute <= sent.formula.compute


def experts_of(count: int, bounds: tuple[int, int]) -> Experts:
    """Of so many experts those of a worker, with the same numbers in each."""
    facts = config_of("mixtral", num_local_experts=count).experts
    assert facts is not None
    whole = Experts(24, facts, "silu").double()
    generator = torch.Generator().manual_seed(1)
    for weight in whole.parameters():
        nn.init.normal_(weight, std=0.3, generator=generator)
    for leaf, weight in list(whole.named_parameters()):
        part = weight.detach()[slice(*bounds)].clone()
        whole.register_parameter(leaf, nn.Parameter(part))
    return whole


@pytest.mark.parametrize("sends", ["anywhere", "to one worker", "nowhere for some"])
@pytest.mark.parametrize("watched", [True, False], ids=["inputs learn", "inputs do not"])
def test_dispatch_is_that_of_all_experts_here(sends: str, watched: bool) -> None:
    """Outputs, gradients of tokens, of the router's weights and of experts, of workers that have
    other numbers of tokens; some experts, or all of a worker's, get none."""
    workers, count = 3, 7
    bounds = dealt(count, workers)
    tokens = [5, 1, 8]
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(n, 24, dtype=torch.float64, generator=generator) for n in tokens]
    every = {"anywhere": range(count), "to one worker": (0, 1), "nowhere for some": (0, 5, 6)}
    pairs = list(itertools.permutations(every[sends], 2))
    chosen = [torch.tensor([pairs[(3 * r + t) % len(pairs)] for t in range(n)]) for r, n in
              enumerate(tokens)]  # fmt: skip
    weight = [torch.rand(n, 2, dtype=torch.float64, generator=generator) for n in tokens]
    pull = [torch.randn(n, 24, dtype=torch.float64, generator=generator) for n in tokens]

    def run(dispatch, experts, x_TD, chosen_TJ, weight_TJ, pull_TD):
        leaves = [x_TD.clone().requires_grad_(watched), weight_TJ.clone().requires_grad_()]
        y_TD = dispatch(leaves[0], chosen_TJ, leaves[1], experts)
        y_TD.backward(pull_TD)
        grads = [w.grad for w in experts.parameters()]
        return [y_TD.detach(), leaves[1].grad, *([leaves[0].grad] if watched else [])], grads

    whole = experts_of(count, (0, count))
    wanted, gradients = run(LocalDispatch(), whole, *map(torch.cat, (x, chosen, weight, pull)))

    def worker(world):
        here = world.rank
        experts = experts_of(count, (bounds[here], bounds[here + 1]))
        dispatch = execution_of(world.mesh, world).dispatch
        return run(dispatch, experts, x[here], chosen[here], weight[here], pull[here])

    found = play(Mesh(expert=workers), worker)
    for index, want in enumerate(wanted):
        got = torch.cat([values[index] for values, _ in found])
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    for index, want in enumerate(gradients):
        got = torch.cat([grads[index] for _, grads in found])
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_evaluation_and_states_are_those_of_one_worker() -> None:
    data = batches(1, 5, SEQUENCE, VOCAB)
    plan = plan_of("float64", rows=5, microbatch_rows=2, mlp_tile=5, mesh=Mesh(tensor=2, expert=2))
    alone = replace(plan, mesh=Mesh())
    job = Job(NativeFlow(model_of("mixtral", "float64"), alone), alone, Recipe(AdamW(), 0.5))
    wanted = numbers(job, alone, data)

    def run(world):
        model = model_of("mixtral", "float64")
        cuts = divide(model, world, plan)
        flow = NativeFlow(model, plan, execution=execution_of(plan.mesh, world))
        return numbers(Job(flow, plan, Recipe(AdamW(), 0.5), Here(world), cuts=cuts), plan, data)

    for steps, *states in play(plan.mesh, run):
        for here, there in zip(steps, wanted[0], strict=True):
            assert here == pytest.approx(there, rel=1e-10)
        for mine, theirs in zip(states, wanted[1:], strict=True):
            for name in theirs:
                torch.testing.assert_close(mine[name], theirs[name], rtol=1e-10, atol=1e-10)


def test_a_worker_holds_its_experts_alone() -> None:
    for rank, count in enumerate((2, 2, 2)):
        model = model_of("mixtral", "float64")
        plan = plan_of("float64", rows=3, microbatch_rows=1, mesh=Mesh(expert=3))
        cuts = divide(model, PretendWorld(plan.mesh, rank), plan)
        shapes = {name: p.shape[0] for name, p in model.named_parameters() if ".experts." in name}
        assert set(shapes.values()) == {count} and len(shapes) == 9
        assert {name for name, cut in cuts.items() if cut.axis not in CORE} == set(shapes)


def test_what_does_not_go_with_it_is_refused() -> None:
    two = {"rows": 2, "microbatch_rows": 1, "mesh": Mesh(expert=2)}
    few = {"microbatch_rows": 3, "sequence_chunk": 2, "stages": WHOLE}
    with pytest.raises(
        OutsizeError, match=r"mesh\.expert is 2, and chunks of the sequence of fewer"
    ):
        plan_of("float64", **{**two, **few})
    plan = plan_of("float64", **two)
    with pytest.raises(OutsizeError, match="the model has no experts; set expert to 1"):
        divide(model_of("llama", "float64"), PretendWorld(plan.mesh), plan)
    many = replace(plan, rows=7, mesh=Mesh(expert=7))
    with pytest.raises(OutsizeError, match=r"6 experts, too few for 7 workers.*expert=6"):
        divide(model_of("mixtral", "float64"), PretendWorld(many.mesh), many)
    flow = NativeFlow(model_of("mixtral", "float64"), plan)
    with pytest.raises(OutsizeError, match=r"model: whole, while mesh\.expert is 2"):
        Job(flow, plan, Recipe(AdamW()), Here(PretendWorld(plan.mesh)))
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    with pytest.raises(OutsizeError, match="expert is 2, but Sequential is an adopted module"):
        outsize.prepare(model, "adamw", mesh="expert=2")


def test_what_is_said_to_each_crosses_machines_itself() -> None:
    """Eight workers on machines of two: six of the seven others are on other machines."""
    direct, handed = (
        Talk(tuple(range(8)), "compute", operation, 800.0)
        for operation in ("all_to_all", "all_gather")
    )
    assert (near(direct, 2), far(direct, 2)) == (100.0, 600.0)
    assert (near(handed, 2), far(handed, 2)) == (400.0, 300.0)


def test_it_is_drawn() -> None:
    drawn = (next(d for d in draws(seed, 4) if not isinstance(d, OutsizeError)) for seed in
             range(150))  # fmt: skip
    assert any(1 < mesh["expert"] < mesh.size for mesh in (one.case.plan.mesh for one in drawn))
