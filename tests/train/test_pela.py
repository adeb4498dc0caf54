"""PELA against a plain loop: student and teacher side by side, the loss written out, autograd."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache

import pytest
import streamed
import torch
from click.testing import CliRunner
from plain import batches
from subjects import SEQUENCE, VOCAB, config_of
from threads import play
from torch.nn import functional as F

from outsize.checkpoint.hub import load, save
from outsize.cli.main import main
from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.dropout import Noise
from outsize.models.linear import linears
from outsize.optim import AdamW
from outsize.plan import Stream, zero
from outsize.plan.plan import per_segment
from outsize.runtime.making import NativeModel, make_job
from outsize.runtime.recipe import Here, Recipe
from outsize.techniques.pela import KEY, Pela
from outsize.techniques.wirings.factored_weights import converted, factored
from outsize.train.metrics import read_metrics
from outsize.train.resolve import resolve
from outsize.train.setup import set_up

STEPS, CLIP, RATE, DECAY, LAYERS, RATIO = 3, 0.5, 1e-2, 0.1, 2, 2.0
OWN = Pela(features=0.7, perturbation=3.0, epsilon=0.01)


@cache
def teacher():
    config = config_of("llama, untied", num_hidden_layers=LAYERS)
    model = build(config, seed=1, dtype=torch.float64)
    for p in model.parameters():  # large enough that what is left out is seen
        p.data *= 10 if p.ndim > 1 else 1
    return model


@cache
def student():
    model = copy.deepcopy(teacher())
    return converted(model, factored(model.config, 0, 0.0, RATIO))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pela") / "teacher"
    save(teacher(), directory)
    return directory


def data_of(weighed=False):
    """weighed: targets have weights, and students dropout."""
    made = batches(STEPS, 4, SEQUENCE, VOCAB)
    draw = torch.Generator().manual_seed(3)
    for step, batch in enumerate(made if weighed else ()):
        weights = torch.rand(batch.ids_BS.shape, generator=draw)
        made[step] = replace(batch, weights_BS=weights, noise=Noise(0.3, 5, step))
    return made


def outputs(model, batch, noise=None):
    """Of each block, and the logits."""
    context = model.context(batch.positions().reshape(-1), batch.flat_bounds(), noise=noise)
    x, found = model.prologue(batch.ids_BS.reshape(-1), context), []
    for block in model.blocks:
        x = block(x, context)
        found.append(x)
    return found, model.epilogue.logits(model.epilogue(x, context))


def terms(model, batch, own):
    """The loss, and what is added to it."""
    (mine, logits), targets = outputs(model, batch, batch.noise), batch.targets_BS.reshape(-1)
    with torch.no_grad():
        theirs, _ = outputs(teacher(), batch)
    weights = 1.0 if batch.weights_BS is None else batch.weights_BS.reshape(-1).double()
    weights = weights * (targets != -100)
    loss = F.cross_entropy(logits, targets, ignore_index=-100, reduction="none")
    squares = [(a - b).square().mean(1) for a, b in zip(mine, theirs, strict=True)]
    names = [n for n, _ in model.named_modules() if n.endswith(".beside")]
    most = []
    for name in names:
        one, full = model.get_submodule(name), name.removesuffix(".beside")
        product = one.b.weight @ one.a.weight
        most.append((product - teacher().get_parameter(f"{full}.weight")).abs().max())
    assert len(names) == 7 * LAYERS

    def mean(x):
        return (x * weights).sum() / weights.sum()

    drawn = torch.stack([(x - own.epsilon) ** 2 for x in most]).mean()
    features = mean(torch.stack(squares).mean(0))
    return mean(loss), own.features * features + own.perturbation * drawn


@cache
def by_hand(own=OWN, weighed=False):
    model, losses = copy.deepcopy(student()), []
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    for batch in data_of(weighed):
        optimizer.zero_grad()
        loss, more = terms(model, batch, own)
        (loss + more).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {n: p.detach() for n, p in model.named_parameters()}


def plan_of(**changes):
    rows = min(2, 4 // changes.get("mesh", Mesh()).rows)
    changes = {"stages": per_segment(LAYERS + 2), **changes}
    return streamed.plan_of(
        "float64", segments=LAYERS + 2, rows=4, microbatch_rows=rows, approximate=(KEY,),
        stream=Stream(512), **changes,
    )  # fmt: skip


def run_of(plan, own, data, resumed=None):
    """Of a worker: the losses, then weights and states after each step."""

    def run(world):
        model, recipe = copy.deepcopy(student()), Recipe(AdamW(weight_decay=DECAY), CLIP)
        recipe = replace(recipe, techniques={KEY: own})
        with streamed.memory() as stores:
            here = Here(world, stores=stores)
            job = make_job(NativeModel(model), plan, recipe, here)
            if resumed is not None:
                weights, states, counts, notes = resumed
                job.method.recall(notes)
                job.load(lambda n, out: out.copy_(weights[n]), lambda n, out: out.copy_(states[n]))
                job.restore_counts(counts)
            losses, found = [], []
            for batch in data:
                mine = batch.rows(*plan.rows_at(job.place))
                losses.append(float(job.step(mine, RATE)))
                evaluated = [n for n, _ in job.weights()]
                found.append((*streamed.snapshot(job), job.update_counts(), job.method.notes()))
            assert all("teacher" not in n for n in (*evaluated, *job.state_names()))
            job.close()
        return losses, found

    return run


WAYS = {
    "alone": plan_of,
    "recomputed, split": lambda: plan_of(
        stages=per_segment(LAYERS + 2, ("block",)), split_backward=True
    ),
    "all on tiers": lambda: streamed.resting(
        plan_of(), parameters="host", gradients="host", optimizer="disk"
    ),
    "zero 3": lambda: plan_of(mesh=Mesh(2), shards=zero(3, 2)),
    "context": lambda: plan_of(mesh=Mesh(context=2)),
}  # fmt: skip


def equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        torch.testing.assert_close(found[name], x, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_a_job_is_a_plain_loop_beside_the_teacher(way, place, monkeypatch):
    streamed.small(monkeypatch)
    own, plan = replace(OWN, teacher=str(place)), WAYS[way]()
    losses, weights = by_hand()
    for mine, found in play(plan.mesh, run_of(plan, own, data_of())):
        assert mine == pytest.approx(losses, rel=1e-10)
        equal(found[-1][0], weights)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tensor=2)])
def test_what_a_target_counts_its_features_count(mesh, place):
    own, plan = Pela(str(place), 0.7, 0.0), plan_of(mesh=mesh)
    losses, weights = by_hand(Pela("", 0.7, 0.0), weighed=True)
    for mine, found in play(mesh, run_of(plan, own, data_of(weighed=True))):
        assert mine == pytest.approx(losses, rel=1e-10)
        equal(found[-1][0], weights)
    other = by_hand(Pela("", 0.7, 1e-3), weighed=True)[1]
    assert any(not torch.allclose(other[n], x, atol=1e-8) for n, x in weights.items())


def test_it_goes_on_bitwise_beside_the_same_teacher_alone(place, tmp_path):
    own, plan, data = replace(OWN, teacher=str(place)), plan_of(), data_of()
    ((_, whole),) = play(Mesh(), run_of(plan, own, data))
    ((_, rest),) = play(Mesh(), run_of(plan, own, data[1:], whole[0]))
    for one, other in zip(whole[-1][:2], rest[-1][:2], strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], x) for name, x in other.items())
    moved = copy.deepcopy(teacher())
    moved.blocks[0].mlp.up.weight.data[0, 0] += 1
    save(moved, tmp_path / "moved")
    with pytest.raises(OutsizeError, match="moved holds other weights than those that the run"):
        play(Mesh(), run_of(plan, replace(own, teacher=str(tmp_path / "moved")), data, whole[0]))


def test_factors_are_of_the_largest_singular_values():
    for name, one in linears(student()):
        weight = dict(linears(teacher()))[name].weight
        (d_out, d_in), found = weight.shape, one.matrix()
        rank = d_out * d_in // int(RATIO * (d_out + d_in))
        assert one.beside.a.weight.shape == (rank, d_in)
        left = torch.linalg.svdvals(weight)[rank:].square().sum().sqrt()
        torch.testing.assert_close((weight - found).norm(), left, rtol=1e-10, atol=1e-10)
        grams = (
            one.beside.a.weight @ one.beside.a.weight.T,
            one.beside.b.weight.T @ one.beside.b.weight,
        )
        torch.testing.assert_close(*grams, rtol=1e-10, atol=1e-10)


def test_a_command_makes_the_student_which_is_a_model_of_its_own_afterwards(runs):
    """Beside its teacher for some steps, alone for some, and as a plain model."""
    call = CliRunner().invoke
    runs.train(train__steps=2, output=runs.home / "full")
    full, low, plain = (str(runs.home / name) for name in ("full", "low", "plain"))
    made = call(main, ["convert", full, "--factored", "2", "--into", low])
    assert made.exit_code == 0, made.output
    said = {"model__name": low, "plan__approximate": f"[{KEY}]", "train__steps": 2}
    printed = runs.train(**said, pela__teacher=full, output=runs.home / "beside")
    last = read_metrics(runs.home / "beside")[-1]
    assert last["measured_peak_bytes"] == pytest.approx(last["predicted_peak_bytes"], rel=0.02)
    assert "pela" in printed
    runs.resume(runs.home / "beside", "train.steps=3")
    runs.train(model__name=runs.home / "beside", train__steps=1, output=runs.home / "alone")
    made = call(main, ["merge", str(runs.home / "alone"), "--into", plain])
    assert "the product of factors" in made.output
    ids, one, other = torch.arange(9)[None], load(runs.home / "alone/step-00000001"), load(plain)
    torch.testing.assert_close(other(ids), one(ids), rtol=1e-4, atol=1e-4)
    assert one.config.weights.ratio == 2 and other.config.weights is None


def test_what_does_not_go_with_it(place):
    tiny = ("model=tiny", "train.steps=1", "precision=float32", "plan.approximate=[pela]")
    with pytest.raises(OutsizeError, match="pela: the model has no factors"):
        set_up(resolve(None, (*tiny, f"pela.teacher={place}")))
    for teacher, what in (("nowhere", "is 'nowhere'"), (place, ": .* holds another model")):
        with pytest.raises(OutsizeError, match=rf"pela\.teacher ?{what}.*; expected the directory"):
            set_up(resolve(None, (*tiny, f"pela.teacher={teacher}", "factored_weights.rank=4")))
    for more, what in (("mesh=pipeline=2", "mesh pipeline"), ("plan.sequence_chunk=8", "a stage")):
        with pytest.raises(OutsizeError, match=what):
            set_up(resolve(None, (*tiny, f"pela.teacher={place}", "factored_weights.rank=4", more)))
    with pytest.raises(OutsizeError, match=r"pela\.perturbation is 3: the largest difference"):
        run = run_of(plan_of(mesh=Mesh(tensor=2)), replace(OWN, teacher=str(place)), [])
        play(Mesh(tensor=2), run)
    for said in ({"ratio": 0.5}, {"ratio": 2, "rank": 3}):
        with pytest.raises(OutsizeError, match="expected a ratio of 1 or more, or a rank"):
            config_of("llama", factored_weights=said)
