"""Patterns of what is trained, and of how fast: against torch.optim over groups, on any mesh."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import streamed
import torch
from plain import batches, loss_of
from rates import known_hardware
from subjects import SEQUENCE, VOCAB, config_of
from threads import play

from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.memory import Ledger
from outsize.models.build import build
from outsize.models.config import DecoderConfig
from outsize.models.declared import declared_rates
from outsize.models.linear import Linear
from outsize.models.patterns import matches, rate_of, refuse_idle
from outsize.models.trained import only, trained_names
from outsize.optim import AdamW
from outsize.parallel.divide import divide
from outsize.plan import Pipelined, Plan, Precision, Stream, zero
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.making import NativeModel, make_job
from outsize.runtime.recipe import Here, Recipe
from outsize.runtime.special.forwards import NAME as ZEROTH
from outsize.runtime.special.forwards import Zeroth
from outsize.search import PlanRequest, predict
from outsize.simulate.sample import sample
from outsize.train.model import subject
from outsize.train.recipe import recipe_of
from outsize.train.resolve import resolve
from outsize.verify.case import Case, Native
from outsize.verify.verify import verify

RATES = {"blocks.1": 0.5, "*_norm": 3.0, "blocks.*.mlp.up": 0.25, "prologue": 0.0}
ONLY = ("blocks.*.attention", "blocks.1.mlp.down", "epilogue.norm")
LLAMA = "llama, untied"


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("blocks.*.attention", {"blocks.0.attention.q.weight", "blocks.12.attention.o.weight"}),
        ("blocks.1", {"blocks.1.mlp.up.weight"}),
        ("*.bias", {"blocks.3.mlp.up.bias"}),
        ("blocks.0.attention.q.weight", {"blocks.0.attention.q.weight"}),
        ("blocks.?.attention", {"blocks.0.attention.q.weight"}),
    ],
)
def test_what_a_pattern_names(pattern, named):
    every = {
        "blocks.0.attention.q.weight", "blocks.12.attention.o.weight", "blocks.1.mlp.up.weight",
        "blocks.3.mlp.up.bias", "blocks.3.attention_norm.weight",
    }  # fmt: skip
    assert {name for name in every if matches(name, pattern)} == named


def declared(monkeypatch) -> None:
    """Those matrices of a block that widen declare a rate of their own."""
    real = Linear.declare

    def declare(self, leaf):
        wide = self.use == "column" and self.unit == "inner"
        return replace(real(self, leaf), rate=4.0 if wide else 1.0)

    monkeypatch.setattr(Linear, "declare", declare)


def factor(name: str) -> float:
    """Written out: the patterns above, and what is declared, of gate and up."""
    found = 4.0 if "mlp.gate" in name or "mlp.up" in name else 1.0
    found *= 0.5 if name.startswith("blocks.1.") else 1.0
    found *= 3.0 if "_norm." in name else 1.0
    found *= 0.25 if ".mlp.up." in name else 1.0
    return 0.0 if name.startswith("prologue.") else found


def by_hand(model, data, clip=0.5, decay=0.1):
    """torch.optim.AdamW, each parameter in a group of its own; frozen ones in none."""
    model = copy.deepcopy(model)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p], "weight_decay": decay if p.ndim > 1 else 0.0, "lr": 1e-2 * factor(n)}
        for n, p in named
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    for batch in data:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_([p for _, p in named], clip)
        optimizer.step()
    return dict(model.named_parameters())


WAYS = {
    "one worker": {},
    "zero 3": {"mesh": Mesh(2), "shards": zero(3, 2)},
    "tensor": {"mesh": Mesh(tensor=2)},
    "pipeline": {"mesh": Mesh(pipeline=2), "pipeline": Pipelined("1f1b")},
}


def config(patterns=None) -> DecoderConfig:
    made = config_of(LLAMA)
    return made if patterns is None else only(made, patterns, "train.only")


@pytest.mark.parametrize(
    ("way", "patterns"),
    [("one worker", None), ("zero 3", ONLY), ("tensor", None), ("tensor", ONLY),
     ("pipeline", ONLY)],
)  # fmt: skip
def test_a_job_is_torch_over_groups(way, patterns, monkeypatch):
    declared(monkeypatch)
    plan = streamed.plan_of("float64", rows=4, microbatch_rows=1, **WAYS[way])
    if way == "zero 3":  # parts of the update end anywhere
        streamed.small(monkeypatch, 64)
        plan = streamed.resting(replace(plan, stream=Stream(part=512)), optimizer="host")
    data = batches(2, 4, SEQUENCE, VOCAB)

    def run(world):
        model = build(config(patterns), seed=1, dtype=torch.float64)
        start = copy.deepcopy(model)
        cuts, recipe = divide(model, world, plan), Recipe(AdamW(weight_decay=0.1), 0.5, rates=RATES)
        with streamed.memory() as stores:
            job = Job(NativeFlow(model, plan), plan, recipe, Here(world, stores=stores), cuts=cuts)
            for batch in data:
                job.step(batch.rows(*plan.rows_at(job.place)), 1e-2)
            states = {name.rpartition(".")[0] for name in job.state_names()}
            found = streamed.snapshot(job)[0], states
            job.close()
        return start, *found

    for start, weights, states in play(plan.mesh, run):
        expected = by_hand(start, data)
        first = dict(start.named_parameters())
        trained = {name for name, p in first.items() if p.requires_grad}
        assert states == trained and (patterns is None) == (len(trained) == len(first))
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name].data, rtol=1e-10, atol=1e-12)
            still = name not in trained or name.startswith("prologue.")
            assert torch.equal(weight, first[name]) == still, name


def test_only_what_is_named_is_trained():
    found = set(trained_names(config(ONLY)))
    every = trained_names(config())
    assert found == {
        n for n in every if ".attention." in n or n.startswith("blocks.1.mlp.down") or
        n == "epilogue.norm.weight"
    }  # fmt: skip
    assert set(trained_names(only(config(ONLY), ("blocks.2", "epilogue"), "x"))) == {
        n for n in found if n.startswith("blocks.2.") or n.startswith("epilogue")
    }
    tied = only(config_of("llama"), ("prologue",), "train.only")
    assert trained_names(tied) == ("prologue.tokens.weight",)


def test_layers_that_no_gradient_reaches_stand_for_themselves_alone():
    """Layers 0 and 2 have nothing to train; what layer 2 passes on goes through layer 1."""
    made = only(config(), ("blocks.1.mlp",), "train.only")
    assert [layer.idle for layer in made.layers] == [True, False, False]
    chosen = sample(made, Plan(5, per_segment(5), 2))
    assert len(set(chosen.stands[1:4])) == 3


@pytest.mark.parametrize(
    ("precision", "patterns"), [("bfloat16", ONLY), ("float32", ("blocks.1.mlp",))]
)
def test_what_is_predicted_is_what_is_held(precision, patterns):
    named = Precision.named(precision)
    plan = Plan(5, per_segment(5), 4, 2, SEQUENCE, named)
    request = PlanRequest(
        4, SEQUENCE, named, AdamW(), 1.0, documents=(0, SEQUENCE), rates=RATES
    )  # fmt: skip
    made = predict(config(patterns), request, plan, known_hardware())
    ledger, model = Ledger(), build(config(patterns), seed=1)
    job = make_job(NativeModel(model), plan, request.recipe, Here(ledger=ledger))
    static = {kind: count for kind, count in ledger.live.items() if count}
    ids = torch.randint(0, VOCAB, (4, SEQUENCE))
    batch = replace(
        batches(1, 4, SEQUENCE, VOCAB)[0], ids_BS=ids, targets_BS=torch.roll(ids, -1, 1),
        bounds=((0, SEQUENCE),) * 4,
    )  # fmt: skip
    for _ in range(2):
        job.step(batch, 1e-3)
    trained = sum(p.numel() for p in job.owners.values() if p.requires_grad)
    assert static["optimizer"] == 8 * trained
    assert dict(made.static) == {**static, "data": 2 * ids.nbytes}
    assert 0 <= made.peak - job.report.trace.peak() <= 12 * plan.microbatches


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(2, 2)], ids=str)
def test_verify_knows_of_both(mesh):
    """And finds a rate that the plain run does not have."""
    made = config(ONLY)

    def values():
        model = build(made, seed=1, dtype=torch.float64)
        named = dict(model.named_parameters())
        return lambda name, out: out.data.copy_(named[name])

    plan = streamed.plan_of("float64", rows=4, microbatch_rows=1, mesh=mesh)
    data = batches(2, 4, SEQUENCE, VOCAB)
    case = Case(Native(made, values), plan, AdamW(), data.__getitem__, 2, 0.5, 1e-2, factors=RATES)
    assert verify(case, own=False).holds
    if mesh.size == 1:
        torn = Native(made, values)
        object.__setattr__(torn, "factors", lambda patterns: {})
        assert not verify(replace(case, subject=torn), own=False).holds


RUN = (
    "model=tiny", "train.steps=1", "train.sequence=8", "train.batch_tokens=16",
    "precision=float32", "optimizer.lr=0.1",
)  # fmt: skip


def test_what_a_run_says():
    sets = (*RUN, "train.only=[blocks.0, epilogue]", "optimizer.rates=epilogue=0.5")
    resolved, found = subject(resolve(None, sets))
    names = trained_names(found.config)
    assert names and all(n.startswith(("blocks.0.", "epilogue.")) for n in names)
    assert recipe_of(resolved.config).rates == {"epilogue": 0.5}


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("train.only=blocks.*.atention", r"train.only: 'blocks.\*.atention' names no parameter"),
        ("train.only=[]", "names no parameter"),
        ("train.only=true", "names no parameter"),
        ("optimizer.rates=[epilog=2]", "optimizer.rates: 'epilog' names no parameter"),
        ("optimizer.rates=[epilogue=-2]", "optimizer.rates: 'epilogue=-2'; expected PATTERN"),
        ("optimizer.rates=[epilogue=much]", "'epilogue=much'; expected PATTERN=FACTOR, a number"),
        ("optimizer.rates=[]", "optimizer.rates is empty"),
        ("optimizer.rates=[epilogue=2, epilogue=3]", "'epilogue' has the factors 2 and 3"),
    ],
)
def test_what_names_nothing_is_refused(said, wrong):
    with pytest.raises(OutsizeError, match=wrong) as caught:
        resolved, _ = subject(resolve(None, (*RUN, said)))
        recipe_of(resolved.config)
    assert "\n" not in str(caught.value)


def test_what_does_not_go_with_rates(monkeypatch):
    config = resolve(None, (*RUN, "optimizer.rates=[epilogue=2]", "zeroth-order=true",
                            f"plan.approximate=[{ZEROTH}]")).config  # fmt: skip
    with pytest.raises(OutsizeError, match=r"optimizer\.rates .*one direction"):
        recipe_of(config)
    declared(monkeypatch)
    plan = streamed.plan_of("float64", approximate=(ZEROTH,))
    model = build(config_of(LLAMA), seed=1, dtype=torch.float64)
    assert {4.0, 1.0} == set(declared_rates(model).values())
    with pytest.raises(OutsizeError, match="declare a learning rate"):
        Job(NativeFlow(model, plan), plan, Recipe(Zeroth()))


def test_the_nearest_name_is_said():
    names = ("blocks.0.mlp.weight", "blocks.1.mlp.weight", "a.b")
    with pytest.raises(OutsizeError, match=r"did you mean 'blocks\.\*\.mlp'"):
        refuse_idle(("blocks.0.mlpp",), names, "x")
    with pytest.raises(OutsizeError, match=r"known: a, blocks\.\*\.mlp; expected"):
        refuse_idle(("zz",), names, "x")


def test_factors_of_several_patterns_multiply():
    rates = {"blocks.0": 0.5, "*.weight": 3.0, "blocks.1": 7.0}
    assert rate_of("blocks.0.mlp.up.weight", rates) == 1.5
    assert rate_of("epilogue.norm.bias", rates) == 1.0
