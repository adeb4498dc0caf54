"""Muon against torch.optim.Muon: alone over matrices and stacks, and as a job's optimizer."""

from __future__ import annotations

import copy

import plain
import pytest
import streamed
import torch
from torch import nn

import outsize.optim.muon as muon_file
from outsize.memory.chunk import ChunkTable, Slot
from outsize.optim import AdamW, Muon, taker
from outsize.optim.declared import WHOLE, named
from outsize.optim.optimizer import Rates
from outsize.optim.parse import parse
from outsize.plan import Stream

STEPS = 20
SHAPES = {"tall": (9, 5), "wide": (4, 7), "square": (6, 6), "long": (33, 2)}


def draw(shape, seed: int, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.optim.Muon computes directions in bfloat16, whatever the weights are; not here."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda t: t.double().clone())


def theirs(shape, muon: Muon, dtype=torch.float64) -> torch.Tensor:
    weight = nn.Parameter(draw(shape, 1000, dtype))
    optimizer = torch.optim.Muon(
        [weight], lr=0.1, weight_decay=muon.weight_decay, momentum=muon.momentum,
        nesterov=muon.nesterov, adjust_lr_fn=muon.scale, ns_steps=muon.iterations,
    )  # fmt: skip
    for step in range(STEPS):
        weight.grad = draw(shape, step, dtype)
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        optimizer.step()
    return weight.detach()


def ours(shape, muon: Muon, dtype=torch.float64) -> torch.Tensor:
    weight = draw(shape, 1000, dtype)
    state = {name: torch.zeros_like(weight) for name in named(muon.states)}
    for step in range(STEPS):
        gradient = draw(shape, step, dtype)
        before = gradient.clone()
        muon.update(weight, gradient, state, Rates(step + 1, 0.1 / (step + 1), muon.weight_decay))
        assert torch.equal(gradient, before), "gradients are left as they are"
    return weight


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    "muon",
    [Muon(), Muon(scale="original"), Muon(nesterov=False, momentum=0.7, iterations=3)],
    ids=["default", "original", "other-numbers"],
)
def test_twenty_steps_equal_torch(monkeypatch, shape, muon):
    in_float64(monkeypatch)
    expected = theirs(shape, muon)
    assert float((ours(shape, muon) - expected).abs().max()) <= 1e-10 * float(expected.abs().max())


@pytest.mark.parametrize(("directions", "apart"), [("float32", 1e-5), ("bfloat16", 2.0**-8)])
def test_float32_weights_move_as_torchs_do(monkeypatch, directions, apart):
    """Apart by what roundings are worth: of directions in float32 here, in bfloat16 elsewhere."""
    if directions == "float32":
        monkeypatch.setattr(torch.Tensor, "bfloat16", lambda t: t.float().clone())
    else:
        monkeypatch.setattr(muon_file, "QUICK", dict.fromkeys(("cpu",), torch.bfloat16))
    shape = (24, 40)
    expected, got = (f(shape, Muon(), torch.float32) for f in (theirs, ours))
    moved = float((expected - draw(shape, 1000, torch.float32)).abs().max())
    assert float((got - expected).abs().max()) <= apart * moved


def test_a_stack_is_its_matrices_one_by_one():
    muon, weights, gradients = Muon(), draw((3, 5, 7), 1), draw((3, 5, 7), 2)
    mean = torch.zeros_like(weights)
    apart = [(w.clone(), g, m.clone()) for w, g, m in zip(weights, gradients, mean, strict=True)]
    muon.update(weights, gradients, {"momentum": mean}, Rates(1, 0.1, 0.2))
    for w, g, m in apart:
        muon.update(w, g, {"momentum": m}, Rates(1, 0.1, 0.2))
    assert torch.equal(weights, torch.stack([w for w, _, _ in apart]))
    assert torch.equal(mean, torch.stack([m for _, _, m in apart]))


def test_no_gradient_no_direction():
    weight = torch.ones(3, 4, dtype=torch.float64)
    zeros = torch.zeros_like(weight)
    Muon().update(weight, zeros, {"momentum": zeros.clone()}, Rates(1, 0.1, 0.0))
    assert torch.equal(weight, torch.ones_like(weight)), "0 / 0 is no direction"


@pytest.mark.parametrize("gradient", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32])
def test_dtypes_may_be_mixed(weight, gradient):
    w, g = draw((6, 8), 1).to(weight), draw((6, 8), 2).to(gradient)
    like, mean = w.float(), torch.zeros(6, 8)
    Muon().update(w, g, {"momentum": mean}, Rates(1, 0.1, 0.1))
    Muon().update(like, g.float(), {"momentum": torch.zeros(6, 8)}, Rates(1, 0.1, 0.1))
    assert w.dtype == weight
    assert torch.allclose(w.float(), like, rtol=2.0**-7 if weight is torch.bfloat16 else 1e-6)


# -- as a job's optimizer ---------------------------------------------------------------------


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    return name.startswith("blocks.") and parameter.ndim >= 2


def plain_muon(model, batches, lr, clip, decay):
    """The usual practice by hand: torch.optim.Muon for matrices of blocks, experts one by one,
    torch.optim.AdamW for the rest."""
    model = copy.deepcopy(model)
    named = list(model.named_parameters())
    matrices = [p for n, p in named if is_matrix(n, p)]
    single = [[nn.Parameter(m) for m in (p.detach() if p.ndim == 3 else [p.detach()])]
              for p in matrices]  # fmt: skip
    flat = [m for stack in single for m in stack]
    muon = torch.optim.Muon(flat, lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    rest = [(n, p) for n, p in named if not is_matrix(n, p)]
    adamw = torch.optim.AdamW(
        [
            {"params": [p for _, p in rest if p.ndim >= 2], "weight_decay": decay},
            {"params": [p for _, p in rest if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=lr, betas=(0.9, 0.95),
    )  # fmt: skip
    for batch in batches:
        model.zero_grad()
        plain.loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        for p, stack in zip(matrices, single, strict=True):
            for m, g in zip(stack, p.grad if p.ndim == 3 else [p.grad], strict=True):
                m.grad = g
        muon.step()
        adamw.step()
    return dict(model.named_parameters())


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_job_trains_as_the_plain_loop_does(monkeypatch, family):
    in_float64(monkeypatch)
    model = streamed.model_of(family, "float64")
    data = streamed.data_of()
    expected = plain_muon(model, data, 1e-2, 0.5, 0.1)
    plan = streamed.plan_of("float64")
    job = streamed.job_of(plan, model=model, optimizer=Muon(weight_decay=0.1))
    for batch in data:
        job.step(batch, 1e-2)
    for name, weight in job.weights():
        gap = float((weight.detach() - expected[name].detach()).abs().max())
        assert gap <= 1e-10 * float(expected[name].detach().abs().max()), name


def test_matrices_have_one_state_and_the_rest_two():
    job = streamed.job_of(streamed.plan_of(), optimizer=Muon())
    shapes = {name: p.shape for name, p in job.owners.items()}
    states: dict[str, list[str]] = {name: [] for name in shapes}
    for name, tensor in job.optimizer_state():
        owner, _, state = name.rpartition(".")
        states[owner].append(state)
        assert tensor.shape == shapes[owner]
    assert list(job.state_names()) == [name for name, _ in job.optimizer_state()]
    for name, found in states.items():
        muon = is_matrix(name, job.owners[name])
        assert found == (["momentum"] if muon else ["exp_avg", "exp_avg_sq"]), name
    held = sum(flat.numel() for chunk in job.chunks for flat in chunk.optimizer.values())
    matrices = sum(p.numel() for n, p in job.owners.items() if is_matrix(n, p))
    assert held == 2 * sum(p.numel() for p in job.owners.values()) - matrices


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_streamed_states_give_the_same_bits(monkeypatch, precision):
    streamed.small(monkeypatch, piece=32)  # matrices begin on multiples of it
    data = streamed.data_of(3)
    plan = streamed.plan_of(precision, stream=Stream(part=512))
    below = streamed.resting(plan, parameters="host", gradients="host", optimizer="host")
    resident = streamed.trained(
        streamed.job_of(plan, optimizer=Muon()), data, streamed.ROWS
    )  # fmt: skip
    with streamed.memory() as stores:
        job = streamed.job_of(below, stores, optimizer=Muon())
        assert max(len(pieces) for pieces in job.placement.items.pieces.values()) > 3, "in parts"
        moved = streamed.trained(job, data, streamed.ROWS)
    assert moved.same(resident), moved.differences(resident)


SPAN = (0, 180)


def test_parts_are_of_whole_matrices():
    slots = tuple(
        Slot(str(i), (n, 2), o, 0) for i, (n, o) in enumerate(((50, 0), (20, 100), (20, 140)))
    )
    table = ChunkTable(0, True, slots, main=True, grain=WHOLE)
    assert table.cuts(80, 20, SPAN) == (0, 100, 180), "one is larger; two fit"
    assert table.cuts(40, 20, SPAN) == (0, 100, 140, 180) and table.cuts(1000, 20, (0, 180)) == (
        0,
        180,
    )
    assert table.cuts(40, 50, SPAN) == (0, 100, 180), "the third begins on no multiple of 50"
    flat = ChunkTable(0, True, slots)
    assert flat.cuts(80, 20, SPAN) == (0, 80, 160, 180) and flat.cuts(90, 10, SPAN) == (
        0,
        90,
        180,
    )


def test_who_updates_what():
    muon = parse("muon", 1e-3, 0.2, (0.8, 0.9))
    assert muon == Muon(1e-3, weight_decay=0.2, rest=AdamW(1e-3, (0.8, 0.9), weight_decay=0.2))
    assert taker(muon, True) is muon and taker(muon, False) is muon.rest
    assert muon.grain == WHOLE and taker(AdamW(), True) == taker(AdamW(), False) == AdamW()
