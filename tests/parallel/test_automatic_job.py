"""A model spread automatically and trained by a Job as an adopted module: as one worker."""

import copy

import pytest
import torch
from foreign import IDS, model_of
from threads import play

from outsize.collectives import Mesh, along
from outsize.models.adopt import find_blocks
from outsize.models.cuts import NO_CUTS
from outsize.optim import AdamW, Muon
from outsize.parallel.automatic.apply import Fan, spread
from outsize.parallel.automatic.derive import derive
from outsize.plan import Plan, Precision
from outsize.plan.plan import per_segment
from outsize.runtime import Job
from outsize.runtime.adopted.flow import AdoptedFlow
from outsize.runtime.recipe import Here, Recipe

ROWS = IDS.shape[0]
OPTIMIZERS = {"adamw": AdamW(weight_decay=0.1), "muon": Muon()}


def plan_of(mesh, **changes):
    return Plan(4, per_segment(4, **changes), ROWS, 1, 1, Precision.named("float64"), mesh=mesh)


def loss_of(output, batch):
    logits = output.logits[:, :-1].flatten(0, 1)
    wanted = batch["input_ids"][:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")


def trained(model, plan, optimizer, ids=IDS, cuts=NO_CUTS, **here):
    flow = AdoptedFlow(
        model,
        find_blocks(model),
        plan,
        loss_of,
        split=lambda batch, a, b: {k: v[a:b] for k, v in batch.items()},
        counter=lambda batch: torch.tensor(float(batch["input_ids"][:, 1:].numel())).double(),
    )
    job = Job(flow, plan, Recipe(optimizer, 0.5), Here(**here), cuts)
    steps = []
    for _ in range(2):
        loss = job.step({"input_ids": ids}, 1e-2)
        steps.append((float(loss), job.report.norm, job.report.count))
    weights = {name: w.clone() for name, w in job.weights()}
    states = {name: s.clone() for name, s in job.optimizer_state()}
    counts = job.update_counts()
    job.load(lambda n, out: out.copy_(weights[n]).mul_(2), lambda n, out: out.copy_(states[n]))
    job.restore_counts(counts)
    for name, weight in job.weights():
        torch.testing.assert_close(weight, 2 * weights[name], rtol=0, atol=0)
    job.close()
    return steps, weights, states


@pytest.mark.parametrize(
    ("name", "recompute", "optimizer", "mesh"),
    [
        ("llama", ("block",), "adamw", Mesh(data=2, tensor=2)),
        ("gemma", ("block",), "adamw", Mesh(tensor=2)),
        ("gpt2", (), "muon", Mesh(tensor=2)),
        ("phi3", (), "muon", Mesh(data=2, tensor=2)),
    ],
)
def test_two_steps_are_those_of_one_worker(name, recompute, optimizer, mesh):
    plain = model_of(name)
    derived = derive(plain, 2, (IDS,))
    assert all(d.groups for d in derived.values())
    rule = OPTIMIZERS[optimizer]
    wanted, weights, states = trained(copy.deepcopy(plain), plan_of(Mesh()), rule)

    def work(world):
        model = copy.deepcopy(plain)
        cuts = spread(model, derived, along(world, "tensor"))
        plan = plan_of(world.mesh, recompute=recompute)
        place = mesh.index("data", world.rank)
        rows = IDS[place * ROWS // mesh.data : (place + 1) * ROWS // mesh.data]
        return trained(model, plan, rule, rows, world=world, cuts=cuts)

    for steps, mine, own in play(mesh, work):
        for here, there in zip(steps, wanted, strict=True):
            assert here == pytest.approx(there, rel=1e-10)
        for found, expected in ((mine, weights), (own, states)):
            assert set(found) == set(expected)
            for key, whole in expected.items():
                torch.testing.assert_close(found[key], whole, rtol=1e-9, atol=1e-10, msg=key)


def test_what_is_fanned_out_without_gradients_is_fanned_out_again_with_them():
    """A part that is computed again takes a tensor first without gradients; another part, that is
    not, takes the same one."""

    def work(world):
        fan, x = Fan(2, along(world, "tensor")), torch.ones(3, requires_grad=True)
        with torch.no_grad():
            fan(x)
        fan(x).sum().backward()
        return x.grad

    for gradient in play(Mesh(tensor=2), work):
        torch.testing.assert_close(gradient, torch.full((3,), 2.0))
