"""The bugs of the field (shared/data/silent_bugs.md), planted one by one: verify sees each, while
the loss looks as it should."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from subjects import MIXED
from torch import nn
from verifying import case_of

from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.kernels import entropy
from outsize.kernels.entropy import LossOptions
from outsize.kernels.loss import Head
from outsize.memory import Ledger
from outsize.memory.ledger import OverBudget
from outsize.models.dropout import Noise
from outsize.optim import AdamW, Muon
from outsize.parallel.check.decoder import Spread, check_decoder
from outsize.parallel.layouts import REPLICATED
from outsize.parallel.tensor import declared, units
from outsize.parallel.tensor.units import cuts_of
from outsize.parallel.whole import WholeTensors
from outsize.plan import Plan, Precision, zero
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.runtime.storage import update
from outsize.runtime.storage.shard_groups import ShardGroups
from outsize.runtime.storage.update import Updates
from outsize.runtime.totals import Totals
from outsize.verify import Adopted, Case, verify

TWO, SQUARE = Mesh(tensor=2), Mesh(2, 2)


def seen(case: Case, monkeypatch, *plants):
    """The verdict with bugs planted, which holds without them."""
    assert verify(case, own=False).holds
    for target, name, bug in plants:
        monkeypatch.setattr(target, name, bug)
    found = verify(case, own=False).exact
    assert not found.holds()
    return found


def row(found, name: str):
    return next(one for one in found.rows if one.name == name)


# -- missing reductions ----------------------------------------------------------------------------


def without_router(plain):
    """The table as if each worker had the whole of the router's gradient."""

    def layouts(model):
        found = plain(model)
        return {
            n: replace(one, gradient="whole") if "router" in n else one for n, one in found.items()
        }

    return layouts


def test_router_that_is_not_reduced(monkeypatch):
    """torchtitan 2387 and 4054, transformers 48205."""
    bug = without_router(units.layouts)
    found = seen(case_of("mixtral", mesh=TWO, steps=1), monkeypatch, (units, "layouts", bug))
    router = row(found, "blocks.0.mlp.router.score.weight")
    assert router.gradient > 1e-3 and router.ratio != pytest.approx(1, abs=1e-3)
    assert row(found, "blocks.0.mlp.experts.gate").ratio == pytest.approx(1, abs=1e-9)
    assert found.losses[0][0] == pytest.approx(found.losses[0][1], rel=1e-12), "which looks normal"


def test_the_checker_sees_it_too(monkeypatch):
    from subjects import config_of

    from outsize.models.build import build

    config = config_of("mixtral")
    monkeypatch.setattr(units, "layouts", without_router(units.layouts))
    cuts = cuts_of(build(config), 2, 0, False)
    found = check_decoder(config, 2, Spread(cuts, declared.boundaries(False)))
    assert any("router" in str(one) for one in found)


# -- scaled twice, or not at all -------------------------------------------------------------------


def test_a_mean_where_the_sum_was_divided_already(monkeypatch):
    """pytorch 160285, Megatron-LM 5956, torchtitan 2318 and 4245: scaled by the degree."""
    plain = ShardGroups.reduce

    def reduce(self, index, chunk, last):
        plain(self, index, chunk, last)
        chunk.gradients.div_(2)

    case = case_of(mesh=Mesh(2), rows=4, shards=zero(1, 2), steps=1)
    found = seen(case, monkeypatch, (ShardGroups, "reduce", reduce))
    ratios = [one.ratio for one in found.rows]
    assert ratios == pytest.approx([0.5] * len(ratios), abs=1e-9)


# -- local statistics ------------------------------------------------------------------------------


def test_label_smoothing_over_the_local_vocabulary(monkeypatch):
    """Megatron-LM 737 and 7464."""
    plain = entropy.together

    def together(vocabulary, mine_XC):
        found = plain(vocabulary, mine_XC)
        own = vocabulary.span[1] - vocabulary.span[0]
        here_C = mine_XC[3] / own + mine_XC[0] - found.top_C
        return replace(found, mean_C=here_C)

    case = case_of(mesh=TWO, options=LossOptions(0.1))
    found = seen(case, monkeypatch, (entropy, "together", together))
    assert found.loss < 0.2, "no one would notice"


def test_logits_that_were_gathered_before_a_parallel_loss(monkeypatch):
    """Megatron-LM 7452: the loss is too large by log(degree)."""
    plain = entropy.together

    def together(vocabulary, mine_XC):
        found = plain(vocabulary, mine_XC)
        return replace(found, total_C=2 * found.total_C)

    found = seen(case_of(mesh=TWO), monkeypatch, (entropy, "together", together))
    (mine, theirs), *_ = found.losses
    assert mine - theirs == pytest.approx(torch.tensor(2.0).log().item(), abs=1e-3)


def test_the_checker_sees_a_loss_that_takes_other_logits():
    from subjects import config_of

    from outsize.models.build import build

    config = config_of("llama")
    cuts = cuts_of(build(config), 2, 0, False)
    right = Spread(cuts, declared.boundaries(False))
    assert not check_decoder(config, 2, right)
    assert check_decoder(config, 2, replace(right, logits=REPLICATED))


# -- counts ----------------------------------------------------------------------------------------


def test_every_worker_divides_by_its_own_count(monkeypatch):
    """Megatron-LM 7513 and 7452: as if all had as many valid targets."""
    case = case_of(mesh=Mesh(2), rows=5, microbatch_rows=2)
    bug = lambda self, mine: (2 * float(mine[0]), 2 * int(mine[1]))  # noqa: E731
    found = seen(case, monkeypatch, (Totals, "count", bug))
    assert found.differ or found.gradient > 1e-2


def test_a_mean_of_means(monkeypatch):
    """transformers 34191: uneven microbatches count alike."""
    plain = NativeFlow.begin

    def begin(self, part, factor, *rest):
        count = max(1, int((part.targets.ids_T != -100).sum()))
        return plain(self, part, 1 / (count * self.plan.microbatches), *rest)

    found = seen(case_of(rows=3, microbatch_rows=2), monkeypatch, (NativeFlow, "begin", begin))
    assert found.loss == pytest.approx(0.5)  # one of two microbatches has all targets


# -- the norm --------------------------------------------------------------------------------------


def test_replicated_weights_counted_by_every_worker(monkeypatch):
    """Megatron-LM 7452 and 5916: norm weights, twice."""

    def counted(self, squares):
        return sum(squares.values())

    case = case_of(mesh=TWO, clip=0.5)
    found = seen(case, monkeypatch, (Totals, "_counted", counted))
    (mine, theirs), *_ = found.norms
    assert mine > theirs * (1 + 1e-6)
    assert all(one.ratio < 1 for one in found.rows), "clipped by more than the norm says"


# -- groups ----------------------------------------------------------------------------------------


def test_another_group_of_the_same_size(monkeypatch):
    """Megatron-LM 7452 and 6307: gradients of the data axis summed over tensor neighbours."""
    plain = ShardGroups._group

    def group(self, outer, inner=1):
        if outer == 1:
            return plain(self, outer, inner)
        mesh, rank = self._world.mesh, self._world.rank
        return self._world.group(mesh.ranks("tensor", rank), "network"), (0, 1)

    case = case_of(mesh=SQUARE, rows=4, shards=zero(1, 2), changes={"vocab_size": 54})
    found = seen(case, monkeypatch, (ShardGroups, "_group", group))
    assert found.differ, "workers that update alike have other gradients"


# -- optimizers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [TWO, SQUARE], ids=str)
def test_a_matrix_optimizer_on_a_slice(monkeypatch, mesh):
    """DeepSpeed 7807."""

    def local(self, optimizer, name, weights, gradients, states, rates):
        optimizer.update(weights, gradients, states, rates)

    optimizer = Muon(1e-2, rest=AdamW(1e-2, eps=1e-4))
    case = case_of(optimizer=optimizer, mesh=mesh, rows=4)
    found = seen(case, monkeypatch, (Updates, "_whole", local))
    q = row(found, "blocks.0.attention.q.weight")
    first = found.losses[0]
    assert first[0] == pytest.approx(first[1], rel=1e-12) and q.weight > 1e-4
    assert row(found, "prologue.tokens.weight").ratio == pytest.approx(1, abs=0.2)


def test_gradients_packed_without_those_that_are_missing(monkeypatch):
    """A parameter that gets no gradient shifts every later one."""
    plain = update._ranges

    def ranges(chunk, touched):
        found, offset = [], 0
        for first, last, *rest in plain(chunk, touched):
            found.append((offset, offset + last - first, *rest))
            offset += last - first
        return found

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(7, 7)
            self.used = nn.Linear(7, 6)
            self.back = nn.Linear(6, 7)

        def forward(self, x):
            return x + self.back(self.used(x).tanh())

    torch.manual_seed(1)
    model = nn.Sequential(*(Block() for _ in range(2)))
    data = [torch.randn(5, 7) for _ in range(2)]
    adopted = Adopted(
        model, lambda step, rows: data[step][:rows], lambda out, batch: out.square().sum(), len
    )
    precision = Precision.named("float64")
    plan = Plan(4, per_segment(4), 5, 2, precision=precision, mesh=Mesh(2), shards=zero(1, 2))
    case = Case(adopted, plan, AdamW(1e-2, eps=1e-4), lambda step: data[step], 2)
    found = seen(case, monkeypatch, (update, "_ranges", ranges))
    assert row(found, "0.unused.weight").weight > 1e-6, "it was updated"


# -- randomness, and going on ----------------------------------------------------------------------


def test_every_worker_draws_the_same_masks(monkeypatch):
    def noise(batch, step):
        return replace(batch, noise=Noise(0.2, 5, step))

    bug = lambda self, start: self  # noqa: E731
    case = case_of(mesh=Mesh(2), rows=4, noise=noise)
    seen(case, monkeypatch, (Noise, "at", bug))


def test_the_same_seed_on_another_mesh_gives_other_weights(monkeypatch):
    """torchtitan 514 and 1750, 3106: each worker draws what lies there."""
    bug = lambda self, fill, suffix="": fill  # noqa: E731
    found = seen(case_of(mesh=TWO), monkeypatch, (WholeTensors, "cutting", bug))
    assert found.loss > 1e-6


@pytest.mark.parametrize("shards", [zero(0, 2), zero(3, 2)], ids=["", "zero 3"])
def test_a_run_that_goes_on_with_other_states(monkeypatch, shards):
    """Megatron-Bridge 5257 and its kin: something is counted from the beginning again."""
    bug = lambda self, counts: None  # noqa: E731
    case = case_of(mesh=Mesh(2), rows=4, shards=shards, steps=3, resume_at=2)
    found = seen(case, monkeypatch, (Job, "restore_counts", bug))
    assert found.loss < 1e-10 and found.gradient < 1e-10 < found.weight


# -- precision -------------------------------------------------------------------------------------


def test_bfloat16_weights_without_a_master_copy():
    """Updates below half an ulp vanish: refused unless it is named, and seen where it is."""
    bare = replace(Precision.named("bfloat16"), master=None)
    with pytest.raises(OutsizeError, match="bfloat16-weights under approximate"):
        case_of().within(bare)
    optimizer = AdamW(1e-5)
    named = case_of(optimizer=optimizer, named="bfloat16")
    lossy = replace(named, plan=replace(named.plan, approximate=("bfloat16-weights",)))
    kept, lost = verify(named), verify(lossy.within(bare))
    assert kept.holds and lost.holds, "in float64 there is nothing to lose"
    assert lost.own.weight > 10 * kept.own.weight
    assert lost.own.weight > 1e-3, "as far as bfloat16 rounds"


# -- memory ----------------------------------------------------------------------------------------


def budgeted(budget):
    case = case_of(rows=3, microbatch_rows=3, loss_chunk=5, stages=MIXED)
    model = case.subject.plain(case.plan.precision).model
    ledger = Ledger(budget)
    job = Job(NativeFlow(model, case.plan), case.plan, Recipe(AdamW()), Here(ledger=ledger))
    job.step(case.batch(0))
    return max(event.peak for event in job.report.trace.events)


def test_a_loss_that_keeps_every_chunk(monkeypatch):
    """Chunks that live until one backward pass at the end: the budget that was predicted says
    it."""
    peak = budgeted(None)
    assert budgeted(peak) == peak
    kept, plain = [], Head.accumulate

    def accumulate(self, weight, bias, g_CV, h_CD):
        kept.append(g_CV.clone())
        plain(self, weight, bias, g_CV, h_CD)

    monkeypatch.setattr(Head, "accumulate", accumulate)
    with pytest.raises(OverBudget, match="out of memory on the device tier"):
        budgeted(peak)
