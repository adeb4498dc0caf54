"""Lion, Adafactor and the optimizers in subspaces: formulas of their papers written out for whole
matrices, the same numbers on any mesh and tier, and bytes that are those foretold."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import anywhere
import pytest
import streamed
import subjects
import torch
from anywhere import Given
from rates import known_hardware
from subjects import VOCAB

from outsize.data import Batch
from outsize.errors import OutsizeError
from outsize.hardware import Rate, Tier
from outsize.memory import Ledger
from outsize.memory.tiers import TierSpec
from outsize.models.random import normal, uniform
from outsize.optim import AdamW, subspace
from outsize.optim.optimizer import Rates
from outsize.optim.parse import parse
from outsize.plan import Plan, Precision
from outsize.plan.plan import per_segment
from outsize.registry import TECHNIQUES
from outsize.search import PlanRequest, predict
from outsize.techniques.optim import adafactor, apollo, fira, frugal, galore, lion
from outsize.train.derive import before_plan
from outsize.train.prepare import prepare
from outsize.train.resolve import resolve
from outsize.train.setup import set_up

STEPS, RATE, DECAY, GAP, RANK = 8, 0.05, 0.1, 3, 2
SHAPES = {"tall": (9, 5), "wide": (4, 7), "square": (6, 6), "stack": (3, 5, 8)}
ADAMW = AdamW(betas=(0.9, 0.95), weight_decay=DECAY)


def draw(shape, seed):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def ours(optimizer, shape, steps=STEPS, scale=1.0, rate=RATE):
    """Weights after some updates, and the states. scale: of the first weights."""
    weights = draw(shape, 1000) * scale
    state = {}
    for spec in optimizer.states:
        size = shape if spec.shaped else (spec.elements(shape),)
        state[spec.name] = torch.full(size, spec.initial, dtype=torch.float64)
    for step in range(steps):
        gradient = draw(shape, step)
        before = gradient.clone()
        rates = Rates(step + 1, rate / (step + 1), DECAY, "w")
        optimizer.update(weights, gradient, state, rates)
        assert torch.equal(gradient, before), "gradients are left as they are"
    return weights, state


def torchs(make, shape, scale=1.0, rate=RATE):
    weight = torch.nn.Parameter(draw(shape, 1000) * scale)
    optimizer = make([weight])
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = rate / (step + 1)
        weight.grad = draw(shape, step)
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("shape", [*SHAPES.values(), (7,)], ids=[*SHAPES, "vector"])
@pytest.mark.parametrize(
    ("clip", "scale", "rate"),
    [(1.0, 1.0, RATE), (2.0, 1.0, 2.0), (1.0, 1e-6, RATE)],  # 2.0: above 1 / sqrt(step)
)
def test_adafactor_is_torchs(shape, clip, scale, rate):
    own = adafactor.Adafactor(weight_decay=DECAY, settings=adafactor.Settings(clip=clip))
    expected = torchs(
        lambda p: torch.optim.Adafactor(p, weight_decay=DECAY, d=clip), shape, scale, rate
    )
    found = ours(own, shape, scale=scale, rate=rate)[0]
    assert float((found - expected).abs().max()) <= 1e-10 * scale


def test_lion_is_the_papers():
    w, mean = draw((5, 3), 1000), torch.zeros(5, 3, dtype=torch.float64)
    for step in range(STEPS):
        g, lr = draw((5, 3), step), RATE / (step + 1)
        w = w - lr * (torch.sign(0.9 * mean + 0.1 * g) + DECAY * w)
        mean = 0.99 * mean + 0.01 * g
    found, state = ours(lion.Lion(weight_decay=DECAY), (5, 3))
    assert float((found - w).abs().max()) <= 1e-10
    assert float((state["exp_avg"] - mean).abs().max()) <= 1e-10


# -- subspaces, each by the formulas of its paper, a matrix at a time ------------------------------


class Adam:
    """The moments of what is in a subspace. warm: steps since they began."""

    def __init__(self):
        self.m = self.v = torch.zeros((), dtype=torch.float64)
        self.warm = 0

    def __call__(self, low):
        self.warm += 1
        self.m = 0.9 * self.m + 0.1 * low
        self.v = 0.95 * self.v + 0.05 * low**2
        start = sqrt(1 - 0.95**self.warm) / (1 - 0.9**self.warm)
        return start * self.m / (self.v.sqrt() + 1e-8), start


def lying(shape, direction):
    """The weights after all updates: direction(matrix as it lies, its step, its name) -> what to
    subtract, made anew for every matrix."""
    w = draw(shape, 1000)
    rows, columns = shape[-2:]
    for i, matrix in enumerate(w.view(-1, rows, columns)):
        move = direction(f"w.{i}")
        for step in range(STEPS):
            g = draw(shape, step).view(-1, rows, columns)[i]
            lr = RATE / (step + 1)
            towards = move(g.T, step).T if rows >= columns else move(g, step)
            matrix.copy_(matrix - lr * DECAY * matrix - lr * towards)
    return w


def svd(g):
    """Vectors whose largest numbers are positive: a decomposition leaves signs open."""
    columns = torch.linalg.svd(g)[0][:, :RANK].T
    return torch.stack([c if c.max() == c.abs().max() else -c for c in columns]).T


@pytest.mark.parametrize("seed", range(4))
def test_a_subspace_has_signs_that_rounding_does_not_decide(seed):
    """Each vector's largest number is positive; they are the left singular vectors but for that."""
    g = torch.randn(12, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    found, left = subspace.leading(g, 6), torch.linalg.svd(g).U[:, :6]
    assert (found.gather(0, found.abs().argmax(0, keepdim=True)) > 0).all()
    torch.testing.assert_close(found.abs(), left.abs())
    torch.testing.assert_close(found @ found.T, left @ left.T)


def by_galore(name):
    adam, kept = Adam(), {}

    def move(g, step):
        if step % GAP == 0:
            kept["p"] = svd(g)
        return 0.25 * kept["p"] @ adam(kept["p"].T @ g)[0]

    return move


def limited(x, before, most):
    """x, no longer than `most` times the one before."""
    size = x.norm()
    if "size" in before and size / (before["size"] + 1e-8) > most:
        x = x * (most * (before["size"] + 1e-8) / size)
    before["size"] = x.norm()
    return x


def by_fira(name):
    adam, kept = Adam(), {}

    def move(g, step):
        if step % GAP == 0:
            kept["p"] = svd(g)
        p = kept["p"]
        low = p.T @ g
        towards, start = adam(low)
        plain = towards / start  # the factors are those of moments as they are
        factors = plain.norm(dim=0) / (low.norm(dim=0) + 1e-8)
        others = limited((g - p @ low) * factors, kept, 1.01)
        return p @ towards + start * others

    return move


def by_apollo(scaling, scale):
    def of(name):
        adam, kept = Adam(), {}

        def move(g, step):
            numbers = normal(0, f"{name}.{step // GAP}", 0, len(g) * RANK)
            p = torch.from_numpy(numbers).view(len(g), RANK) / sqrt(RANK)
            low = p.T @ g
            towards = adam(low)[0]
            dim = 0 if scaling == "column" else None
            factors = towards.norm(dim=dim) / (low.norm(dim=dim) + 1e-8)
            return scale * limited(g * factors, kept, 1.01)

        return move

    return of


def by_frugal(kind, others):
    def of(name):
        kept = {}

        def move(g, step):
            if step % GAP == 0:
                kept["adam"], kept["p"] = Adam(), span(g, f"{name}.{step // GAP}")
            p = kept["p"]
            low = p.T @ g
            return p @ kept["adam"](low)[0] + others * torch.sign(g - p @ low)

        return move

    def span(g, name):
        if kind == "svd":
            return svd(g)
        if kind == "rows":
            first = uniform(0, name, 0, len(g)).argsort()[:RANK]
            return torch.eye(len(g), dtype=torch.float64)[:, sorted(first)]
        numbers = torch.from_numpy(normal(0, name, 0, len(g) * RANK)).view(len(g), RANK)
        return torch.linalg.qr(numbers)[0]

    return of


MINI = apollo.Settings(RANK, GAP, "matrix", 11.3)
CASES = {
    "galore": (galore.GaLore(ADAMW, galore.Settings(RANK, GAP)), by_galore),
    "fira": (fira.Fira(ADAMW, fira.Settings(RANK, GAP)), by_fira),
    "apollo": (
        apollo.Apollo(ADAMW, apollo.Settings(RANK, GAP)), by_apollo("column", 1.0),
    ),
    "apollo, a factor a matrix": (apollo.Apollo(ADAMW, MINI), by_apollo("matrix", 11.3)),
    "frugal, rows": (
        frugal.Frugal(ADAMW, frugal.Settings("rows", RANK, GAP, 0.5)), by_frugal("rows", 0.5),
    ),
    "frugal, svd": (
        frugal.Frugal(ADAMW, frugal.Settings("svd", RANK, GAP)), by_frugal("svd", 1.0),
    ),
    "frugal, random": (
        frugal.Frugal(ADAMW, frugal.Settings("random", RANK, GAP)), by_frugal("random", 1.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("case", CASES)
def test_a_subspace_is_that_of_the_paper(case, shape):
    optimizer, direction = CASES[case]
    found, state = ours(optimizer, shape)
    assert float((found - lying(shape, direction)).abs().max()) <= 1e-10
    short, long = min(shape[-2:]), max(shape[-2:])
    stack = shape[0] if len(shape) == 3 else 1
    moments = 2 * stack * RANK * long
    kept = moments + (stack * RANK * short if "projector" in state else 0)
    kept += stack if "length" in state else 0
    assert sum(s.numel() for s in state.values()) == kept


def test_a_quarter_of_the_shorter_side_where_no_rank_is_said():
    one = galore.GaLore()
    assert [spec.elements((24, 80)) for spec in one.states] == [24 * 6, 80 * 6, 80 * 6]
    assert one.takes((24, 80)) and not one.takes((24,)) and not one.takes((1, 80))
    assert not galore.GaLore(settings=galore.Settings(24)).takes((24, 80))


# -- in a job --------------------------------------------------------------------------------------

JOBS = {
    "lion": Given(lion.Lion(weight_decay=0.1)),
    "adafactor": Given(adafactor.Adafactor(weight_decay=0.1)),
    "galore": Given(galore.GaLore(settings=galore.Settings(3, 2)), ("galore",)),
    "fira": Given(fira.Fira(settings=fira.Settings(3, 2)), ("fira",)),
    "apollo": Given(apollo.Apollo(settings=apollo.Settings(3, 2)), ("apollo",)),
    "frugal": Given(frugal.Frugal(settings=frugal.Settings("rows", 3, 2)), ("frugal",)),
    "frugal, svd": Given(frugal.Frugal(settings=frugal.Settings("svd", 3, 2)), ("frugal",)),
    "galore, experts": Given(galore.GaLore(settings=galore.Settings(3, 2)), ("galore",), "mixtral"),
}
PAIRS = [
    ("lion", "zero 2"), ("adafactor", "all on tiers"), ("adafactor", "tensor, a tier"),
    ("adafactor", "pipeline, rows of tables"), ("galore", "tensor, a tier"),
    ("fira", "zero 3, 4 workers, a tier"), ("apollo", "all on tiers"),
    ("frugal", "zero 2"), ("frugal, svd", "pipeline"), ("galore, experts", "zero 2"),
]  # fmt: skip
RESUMED = (2, 3, 4, 8)


@pytest.mark.parametrize(("name", "way"), PAIRS, ids=map(", ".join, PAIRS))
def test_the_same_numbers_on_any_mesh_and_tier(name, way, monkeypatch):
    """From half of the steps on one worker, where the pair is a resumed one."""
    anywhere.small(monkeypatch)
    anywhere.check(JOBS[name], way, resume=PAIRS.index((name, way)) in RESUMED)


RATE_OF_DISK = Rate(2e9, "B/s", "test", "2026-11-20")
MACHINE = known_hardware()
HARDWARE = replace(
    MACHINE, tiers=(*MACHINE.tiers, Tier("disk", 10**10, RATE_OF_DISK, RATE_OF_DISK))
)


def formula(name, shape, inside):
    """Elements of states, from the tables of docs/finetuning.md."""
    numel = torch.Size(shape).numel()
    if name == "lion":
        return numel
    if name == "adafactor":
        return shape[0] + shape[1] if len(shape) > 1 else numel
    if not inside or len(shape) < 2:
        return 2 * numel
    low = 3 * (2 * max(shape) + (min(shape) if name in ("galore", "fira", "frugal, svd") else 0))
    return low + (1 if name in ("fira", "apollo") else 0)


@pytest.mark.parametrize(
    ("name", "rest"),
    [("adafactor", "device"), ("fira", "disk"), ("frugal", "device")],
)
def test_what_is_predicted_is_what_is_held(name, rest):
    given = JOBS[name]
    config = subjects.config_of("llama, untied", hidden_size=32, intermediate_size=80)
    named = Precision.named("float32")
    plan = Plan(5, per_segment(5), 4, 2, 32, named, approximate=given.approximate)
    plan = streamed.resting(plan, optimizer=rest)
    request = PlanRequest(
        4, 32, named, given.optimizer, 1.0, documents=(0, 32), approximate=given.approximate,
        tiers=(TierSpec("disk", "memory", (), 1 << 30),),
    )  # fmt: skip
    made = predict(config, request, plan, HARDWARE)
    ledger, ids = Ledger(), torch.randint(0, VOCAB, (4, 32))
    batch = Batch(ids, torch.roll(ids, -1, 1), ((0, 32),) * 4)
    with streamed.memory(1 << 27) as stores:
        model = streamed.model_of("llama, untied", hidden_size=32, intermediate_size=80)
        job = streamed.job_of(
            plan, stores, clip=1.0, model=model, ledger=ledger, optimizer=given.optimizer
        )
        static = {kind: count for kind, count in ledger.live.items() if count}
        for _ in range(2):
            job.step(batch, 1e-3)
        peak = job.report.trace.peak()
        states = sum(home.bytes for home in job.weight_pool.homes.known.values())
        found = sum(s.nbytes for _, s in job.optimizer_state())
    assert dict(made.static) == {**static, "data": 2 * ids.nbytes}
    assert 0 <= made.peak - peak <= 0.02 * peak
    assert sum(made.below.values()) == states
    own = job.owners.items()
    assert found == 4 * sum(formula(name, tuple(p.shape), n[:6] == "blocks") for n, p in own)


DEVICE = MACHINE.devices[0]
NAMES = ("schedule-free", "lion", "adafactor", "galore", "fira", "apollo", "frugal")


@pytest.mark.parametrize("name", NAMES)
def test_a_run_takes_it_by_name(name):
    exact = TECHNIQUES.get(name).exact
    said = ("model=tiny", "train.steps=1", f"optimizer.name={name}", "precision=float32",
            "train.sequence=16", "train.batch_tokens=32")  # fmt: skip
    named = said if exact else (*said, f"plan.approximate=[{name}]")
    found = before_plan(resolve(None, named), subjects.config_of("llama, untied"), DEVICE)
    assert parse(name, 1.0, 0.1, (0.9, 0.95)).approximate == (None if exact else name)
    rate = {"lion": 0.0064, "adafactor": 0.01}.get(name, 0.032)
    assert found.get("optimizer.lr") == rate
    if name == "fira":  # which has states of every kind of size
        assert set_up(found).plan.approximate == (name,)
    if not exact:
        with pytest.raises(OutsizeError, match=f"the optimizer {name} changes the maths"):
            resolve(None, said)


@pytest.mark.parametrize("name", NAMES)
def test_prepare_takes_it_and_it_learns(name):
    torch.manual_seed(0)
    model = Regression()
    batch = (torch.randn(16, 16), torch.randn(16, 16))
    job = prepare(model, name)
    rate = {"adafactor": 0.02, "lion": 1e-3}.get(name, 3e-3)
    losses = [float(job.step(batch, lr=rate)) for _ in range(20)]
    assert losses[-1] < 0.98 * losses[0]


class Regression(torch.nn.Module):
    """A loss of a stack of layers."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))

    def forward(self, x, y):
        return (self.layers(x) - y).square().mean()


@pytest.mark.parametrize(
    "said",
    [
        ("optimizer.name=galore", "plan.approximate=[galore]", "galore.rank=64"),
        ("optimizer.name=muon", "train.only='*_norm'"),
    ],
)
def test_an_optimizer_that_would_leave_all_to_adamw_is_refused(said):
    """Of rank 64, a matrix 64 wide is no smaller in its subspace; norms are no matrices."""
    run = ("model=tiny", "train.steps=1", "train.sequence=8", "train.batch_tokens=16",
           "precision=float32")  # fmt: skip
    with pytest.raises(OutsizeError, match=r"takes none of what the blocks train \(.*64"):
        set_up(resolve(None, (*run, *said)))
