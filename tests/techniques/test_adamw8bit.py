"""8-bit AdamW: the table of its paper, its updates against a plain loop, the same bits anywhere."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import streamed
import subjects
import torch
from plain import batches
from rates import known_hardware
from subjects import SEQUENCE, VOCAB
from threads import play
from torch import nn

from outsize.collectives import Mesh
from outsize.data import Batch
from outsize.hardware import Rate, Tier
from outsize.kernels import native
from outsize.kernels.blockwise import Moments, Rates, plain, table, update
from outsize.memory import Ledger
from outsize.memory.chunk import ChunkTable, Slot
from outsize.memory.tiers import TierSpec
from outsize.optim import AdamW, StateSpec, optimizer
from outsize.parallel.divide import divide
from outsize.parallel.shards import at_borders
from outsize.plan import Pipelined, Plan, Precision, Rest, Sharding, Stream, zero
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.search import PlanRequest, predict
from outsize.techniques.optim.adamw8bit import NAME, AdamW8Bit, Settings
from outsize.train.prepare import prepare

STEPS = 2


# -- the table -------------------------------------------------------------------------------------


def of_bits(bits: int, length: int) -> float | None:
    """The paper's figure: leading zeros say the decade, a one ends them, the rest cuts it evenly.
    None for the two patterns that are values of their own: no bit set, and the last one alone."""
    if bits < 1 << (length - 7):
        return None
    fraction = bits.bit_length() - 1
    zeros = length - 1 - fraction
    part = (bits - (1 << fraction) + 0.5) / (1 << fraction)
    return 10.0**-zeros * (0.1 + 0.9 * part)


@pytest.mark.parametrize("signed", [True, False])
def test_the_table_is_the_papers(signed):
    length = 7 if signed else 8
    found = [v for bits in range(1 << length) if (v := of_bits(bits, length)) is not None]
    expected = sorted([0.0, 1.0, *found, *((-v for v in found) if signed else ())])
    assert len(expected) == 256
    got = table(signed).values.double()
    assert torch.allclose(got, torch.tensor(expected, dtype=torch.float64), rtol=2e-6, atol=0)


@pytest.mark.parametrize("signed", [True, False])
def test_numbers_get_the_nearest_code(signed):
    generator = torch.Generator().manual_seed(0)
    x = 10.0 ** (-8 * torch.rand(5000, generator=generator))
    x = torch.cat([x, -x] if signed else [x]).float()
    values = table(signed).values.double()
    codes = table(signed).codes(x).int()
    gaps = (x.double()[:, None] - values).abs()
    own = gaps.gather(1, codes.long()[:, None])[:, 0]
    bad = own > gaps.min(1).values * (1 + 1e-6)
    # The one exception: what is negative stays so.
    lost = (x < 0) & (values[gaps.argmin(1)] == 0)
    assert (
        not (bad & ~lost).any() and (values[codes[lost]] < 0).all() and bool(lost.any()) == signed
    )
    zero = table(signed).codes(torch.zeros(1))
    assert values[zero.long()] == 0.0


# -- the update ------------------------------------------------------------------------------------


def fresh(numel: int, block: int) -> Moments:
    scales = -(-numel // block)
    zero = int(table(True).codes(torch.zeros(1)))
    return Moments(
        torch.full((numel,), zero, dtype=torch.uint8), torch.zeros(scales),
        torch.zeros(numel, dtype=torch.uint8), torch.zeros(scales),
    )  # fmt: skip


def drawn(numel: int, seed: int, dtype=torch.float32) -> torch.Tensor:
    """Gradients over eight decades, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    size = 10.0 ** (-8 * torch.rand(numel, generator=generator, dtype=torch.float64))
    sign = torch.randint(-1, 2, (numel,), generator=generator)
    return (size * sign).to(dtype)


def by_hand(weights, gradients, block, steps, rate=0.01, betas=(0.9, 0.95), eps=1e-8, decay=0.1):
    """The paper's procedure, block by block and number by number, in float64."""
    weights = [float(w) for w in weights]
    tables = [[float(v) for v in table(signed).values] for signed in (True, False)]
    zero = tables[0].index(0.0)
    codes = [[zero] * len(weights), [0] * len(weights)]
    scales = [[0.0] * -(-len(weights) // block) for _ in range(2)]
    for step in range(1, steps + 1):
        for b, first in enumerate(range(0, len(weights), block)):
            here = range(first, min(first + block, len(weights)))
            moments = [[tables[k][codes[k][i]] * scales[k][b] for i in here] for k in range(2)]
            for at, i in enumerate(here):
                g = float(gradients[step - 1][i])
                moments[0][at] = betas[0] * moments[0][at] + (1 - betas[0]) * g
                moments[1][at] = betas[1] * moments[1][at] + (1 - betas[1]) * g * g
                mean = moments[0][at] / (1 - betas[0] ** step)
                root = math.sqrt(moments[1][at] / (1 - betas[1] ** step))
                weights[i] = weights[i] * (1 - rate * decay) - rate * mean / (root + eps)
            for k in range(2):
                most = float(torch.tensor(max(map(abs, moments[k]))).float())
                scales[k][b] = most
                for at, i in enumerate(here):
                    x = moments[k][at] / (most or 1.0)
                    near = min(range(256), key=lambda c, x=x, k=k: abs(tables[k][c] - x))
                    codes[k][i] = near - 1 if k == 0 and x < 0 and near == zero else near
    return torch.tensor(weights, dtype=torch.float64), codes


def test_updates_are_those_of_the_paper():
    numel, block = 150, 64
    start = torch.randn(numel, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = [drawn(numel, seed, torch.float64) for seed in range(6)]
    own = AdamW8Bit(AdamW(betas=(0.8, 0.9), eps=1e-3), Settings(block=block))
    expected, codes = by_hand(start, gradients, block, 6, betas=(0.8, 0.9), eps=1e-3)
    weights, moments = start.clone(), fresh(numel, block)
    state = dict(zip((one.name for one in own.states), vars(moments).values(), strict=True))
    for step, gradient in enumerate(gradients, 1):
        own.update(weights, gradient, state, optimizer.Rates(step, 0.01, 0.1))
    assert float((weights - expected).abs().max()) <= 1e-10
    assert moments.mean.tolist() == codes[0] and moments.square.tolist() == codes[1]


DTYPES = {
    "float32": (torch.float32, torch.float32),
    "bfloat16 gradients": (torch.float32, torch.bfloat16),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
}


def trained(step_of, numel, block, dtypes, cuts=None):
    weights = drawn(numel, 99, dtypes[0])
    moments = fresh(numel, block)
    for step in range(1, 9):
        gradient, rates = drawn(numel, step, dtypes[1]), Rates(0.01, (0.9, 0.95), 1e-8, 0.1, step)
        for first, last in pairwise(cuts or (0, numel)):
            scales = slice(first // block, -(-last // block))
            part = Moments(
                moments.mean[first:last], moments.mean_scale[scales],
                moments.square[first:last], moments.square_scale[scales],
            )  # fmt: skip
            step_of(weights[first:last], gradient[first:last], part, block, rates)
    return weights, *vars(moments).values()


@pytest.mark.parametrize("numel, block", [(1000, 256), (70_001, 256), (9000, 4096), (31, 32)])
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_the_native_pass_gives_the_bits_of_its_twin(dtypes, numel, block):
    assert native.library() is not None

    def twin(weights, gradients, moments, block, rates):
        plain(weights, gradients, moments, block, rates.numbers)

    with torch.no_grad():
        mine, theirs = (trained(one, numel, block, dtypes) for one in (update, twin))
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        cut = trained(update, numel, block, dtypes, (0, block, 3 * block, numel)) if (
            numel > 3 * block
        ) else mine  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(mine, cut, strict=True)), "wherever it is cut"


def around(x: torch.Tensor) -> torch.Tensor:
    """Float32 numbers and the 8 next ones on both sides of each."""
    bits = x.view(torch.int32)
    return (bits[:, None] + torch.arange(-8, 9, dtype=torch.int32)).flatten().view(torch.float32)


@pytest.mark.parametrize("block", [32, 64, 256])  # passes of 32 numbers, and of 64
@pytest.mark.parametrize("short", [0, 5])
def test_numbers_next_to_a_border_get_its_side(short, block):
    """Every border of both tables and what is next to it, zeros, subnormals and the ends. The new
    moments are the gradients and their squares: 1 in each block makes the scales 1."""
    signed, unsigned = (table(one).borders[:-1] for one in (True, False))
    ends = torch.tensor([1.0, 2.0**-24, 2.0**-125, 2.0**-126, 2.0**-149 * 20])
    x = torch.cat([signed, unsigned, unsigned.sqrt(), ends, -ends])
    x = torch.cat([around(x[x != 0]), torch.tensor([0.0, -0.0])])
    x = x[x.abs() <= 1]
    rows = torch.ones(-(-len(x) // (block - 1)), block)
    rows[:, 1:] = torch.cat([x, torch.zeros(-len(x) % (block - 1))]).view(-1, block - 1)
    gradient = rows.flatten()[: rows.numel() - short]
    weights, moments = torch.zeros_like(gradient), fresh(len(gradient), block)
    with torch.no_grad():
        update(weights, gradient, moments, block, Rates(0.01, (0.0, 0.0), 1e-8, 0.0, 1))
    for codes, number, borders in (
        (moments.mean, gradient, signed), (moments.square, gradient.square(), unsigned),
    ):  # fmt: skip
        assert torch.equal(codes.int(), (number.double()[:, None] > borders.double()).sum(1).int())
        assert len(codes.unique()) == 256 and (moments.mean_scale == 1).all()


@pytest.mark.parametrize("block", [32, 64])
def test_what_is_not_finite_reaches_the_weights_and_nothing_else(block):
    weights, moments = torch.ones(64), fresh(64, block)
    gradient = torch.ones(64)
    gradient[3] = math.nan
    with torch.no_grad():
        update(weights, gradient, moments, block, Rates(0.01, (0.9, 0.95), 1e-8, 0.0, 1))
    assert weights[3].isnan() and weights.isnan().sum() == 1


# -- where chunks are cut --------------------------------------------------------------------------

# Of 1000, 900 and 300 elements; of the last one half lies here. Blocks of 64.
SLOTS = (
    Slot("a", (1000,), 0, 0),
    Slot("b", (30, 30), 1000, 0),
    Slot("c", (150,), 1900, 0, (300,), (300,)),
)
TABLE = ChunkTable(0, True, SLOTS, main=True, grain=64)
PER = StateSpec("scale", per=64)
BORDERS = {*range(0, 1000, 64), *range(1000, 1900, 64), 1900, 2050}


def test_elements_of_a_state_by_blocks():
    assert [slot.elements(PER) for slot in SLOTS] == [16, 15, 5], "the last is whole everywhere"
    assert [TABLE.before(place, PER) for place in (0, 64, 960, 1000, 1064, 1900, 2050)] == [
        0, 1, 15, 16, 17, 31, 36,
    ]  # fmt: skip
    flat = torch.arange(36)
    parts = [TABLE.part(slot, flat, PER).tolist() for slot in SLOTS]
    assert parts == [list(range(16)), list(range(16, 31)), list(range(31, 36))]


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_workers_get_whole_blocks_as_evenly_as_can_be(parts):
    cut = at_borders(TABLE.marks, TABLE.grain, TABLE.open)
    offsets = cut(0, 2050, parts)
    assert offsets[0] == 0 and offsets[-1] == 2050 and set(offsets) <= BORDERS
    whole = {**TABLE.marks}  # in whole parameters there are 2200
    marks = [whole.get(at, at) for at in offsets]
    last = parts * 1900 // 2200  # what lies in the parted one cannot be cut
    assert all(abs(m - 2200 * i / parts) <= 33 for i, m in enumerate(marks) if i <= last)


def test_parts_of_an_update_begin_at_blocks_and_at_multiples_of_the_tiers():
    for first in (0, 64, 1000, 1064):
        offsets = TABLE.cuts(256, 128, (first, 2050))
        assert offsets[0] == first and offsets[-1] == 2050
        assert set(offsets) <= BORDERS and all((at - first) % 128 == 0 for at in offsets[:-1])
    assert TABLE.cuts(256, 128, (0, 2050)) == (0, 256, 512, 768, 896, 2050), "1000 is no multiple"
    assert TABLE.cuts(256, 128, (1000, 2050)) == (1000, 1256, 1512, 1768, 1896, 2050)


# -- in a job --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rounded(AdamW8Bit):
    """With gradients on a grid, so that those of several workers, which are one worker's but for
    the last digits, are the same bits."""

    def update(self, weights, gradients, state, rates):
        gradients = (gradients * 2.0**24).round() / 2.0**24
        super().update(weights, gradients, state, rates)


@dataclass(frozen=True)
class RoundedAdamW(AdamW):
    def update(self, weights, gradients, state, rates):
        gradients = (gradients * 2.0**24).round() / 2.0**24
        super().update(weights, gradients, state, rates)


OPTIMIZER = Rounded(RoundedAdamW(weight_decay=0.1), Settings(block=64, least=65))


def run_of(plan, data, optimizer=OPTIMIZER, resumed=None, keep=None, family="llama, untied"):
    """What a worker does: some steps, from saved states where there are some."""

    def run(world):
        model = streamed.model_of(family, plan.precision.compute)
        cuts = divide(model, world, plan)
        with streamed.memory() as stores:
            job = Job(
                NativeFlow(model, plan),
                plan,
                Recipe(optimizer, 0.5),
                Here(world, stores=stores),
                cuts=cuts,
            )
            if resumed is not None:
                weights, states, counts = resumed
                job.load(lambda n, out: out.copy_(weights[n]), lambda n, out: out.copy_(states[n]))
                job.restore_counts(counts)
            for batch in data:
                job.step(batch.rows(*plan.rows_at(job.place)), 1e-2)
            found = (*streamed.snapshot(job), job.update_counts())
            parts = max((len(p) for p in job.placement.items.pieces.values()), default=0)
            job.close()
        return found, parts

    return run


def alone(plan):
    stages = tuple(replace(stage, rest=Rest()) for stage in plan.stages)
    return replace(
        plan, mesh=Mesh(), shards=Sharding(), stages=stages, pipeline=Pipelined(),
        sequence_parallel=False,
    )  # fmt: skip


def plan_of(rows=4, **changes):
    return streamed.plan_of(
        "float64", rows=rows, microbatch_rows=1, approximate=(NAME,), stream=Stream(part=512),
        **changes,
    )  # fmt: skip


def below(plan):
    return streamed.resting(plan, optimizer="disk")


WAYS = {
    "a tier": lambda: below(plan_of()),
    "all on tiers": lambda: streamed.resting(
        plan_of(), parameters="host", gradients="host", optimizer="disk"
    ),
    "zero 1": lambda: plan_of(mesh=Mesh(2), shards=zero(1, 2)),
    "zero 3": lambda: plan_of(mesh=Mesh(2), shards=zero(3, 2)),
    "zero 3, 4 workers, a tier": lambda: below(plan_of(mesh=Mesh(4), shards=zero(3, 4))),
    "tensor, a tier": lambda: below(plan_of(mesh=Mesh(tensor=2))),
    "tensor, zero 2": lambda: plan_of(mesh=Mesh(2, 2), shards=zero(2, 2)),
    "pipeline": lambda: plan_of(mesh=Mesh(pipeline=2), pipeline=Pipelined("1f1b")),
}


def same(found, wanted):
    """Bit for bit; where the states are of 32 bits, within the last digit of PyTorch's own pass,
    which rounds otherwise at the ends of what it is given."""
    small = {
        name.removesuffix(".exp_avg_scale") for name in wanted[1] if name.endswith("avg_scale")
    }
    assert len(small) > 4
    for mine, theirs in zip(found[:2], wanted[:2], strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert mine[name].dtype == theirs[name].dtype
            if name in small or name.rpartition(".")[0] in small:
                assert torch.equal(mine[name], theirs[name]), name
            else:
                torch.testing.assert_close(mine[name], theirs[name], rtol=1e-13, atol=1e-15)


def small(monkeypatch):
    """Parts of the update begin at multiples of 64 elements, and so do checksums."""
    streamed.small(monkeypatch, 64)
    monkeypatch.setattr(streamed.stores_module, "BLOCK", 64)


@pytest.fixture(scope="module")
def wanted():
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        return one_worker()


def one_worker():
    plan = alone(plan_of())
    data = batches(STEPS, plan.rows, SEQUENCE, VOCAB)
    (found, _), = play(Mesh(), run_of(plan, data))  # fmt: skip
    (half, _), = play(Mesh(), run_of(plan, data[: STEPS // 2]))  # fmt: skip
    return data, found, half


RESUMED = ("a tier", "zero 3", "tensor, zero 2", "pipeline")


@pytest.mark.parametrize("way", [way for way in WAYS if way not in RESUMED])
def test_the_same_bits_on_any_mesh_and_tier(way, wanted, monkeypatch):
    data, expected, _ = wanted
    small(monkeypatch)
    plan = WAYS[way]()
    for found, parts in play(plan.mesh, run_of(plan, data)):
        same(found, expected)
        assert ("tier" not in way) or parts > 1


@pytest.mark.parametrize("way", RESUMED)
def test_resumed_under_another_mesh(way, wanted, monkeypatch):
    """Half of the steps on one worker, the others on several."""
    small(monkeypatch)
    data, expected, half = wanted
    plan = WAYS[way]()
    for found, parts in play(plan.mesh, run_of(plan, data[STEPS // 2 :], resumed=half)):
        same(found, expected)
        assert ("tier" not in way) or parts > 1


# -- what is predicted and what runs
# ----------------------------------------------------------------

MACHINE = known_hardware()
RATE = Rate(2e9, "B/s", "test", "2026-11-20")
HARDWARE = replace(MACHINE, tiers=(*MACHINE.tiers, Tier("disk", 10**10, RATE, RATE)))
RESTS = {
    "device": {},
    "states below": {"optimizer": "disk"},
    "all below": {"parameters": "disk", "gradients": "disk", "optimizer": "disk"},
}


@pytest.mark.parametrize(
    ("rest", "precision"),
    [
        *zip(RESTS, itertools.cycle(["float32", "bfloat16"]), strict=False),
        ("all below", "bfloat16"),
    ],
)
def test_what_is_predicted_is_what_is_held(rest, precision):
    """Static bytes and those on tiers to the byte; and a quarter of AdamW's states."""
    optimizer = AdamW8Bit(settings=Settings(least=1024))
    config = subjects.config_of("llama, untied", hidden_size=64, intermediate_size=160)
    named = Precision.named(precision)
    plan = Plan(5, per_segment(5), 4, 2, 64, named, approximate=(NAME,))
    plan = streamed.resting(plan, **RESTS[rest])
    request = PlanRequest(
        4, 64, named, optimizer, 1.0, documents=(0, 64), approximate=(NAME,),
        tiers=(TierSpec("disk", "memory", (), 1 << 30),),
    )  # fmt: skip
    made = predict(config, request, plan, HARDWARE)
    ledger = Ledger()
    ids = torch.randint(0, VOCAB, (4, 64))
    batch = Batch(ids, torch.roll(ids, -1, 1), ((0, 64),) * 4)
    with streamed.memory(1 << 27) as stores:
        model = streamed.model_of("llama, untied", hidden_size=64, intermediate_size=160)
        job = streamed.job_of(
            plan, stores, clip=1.0, model=model, ledger=ledger, optimizer=optimizer
        )
        static = {kind: count for kind, count in ledger.live.items() if count}
        for _ in range(2):
            job.step(batch, 1e-3)
        peak = job.report.trace.peak()
        states = sum(home.bytes for home in job.weight_pool.homes.known.values())
        found = sum(s.nbytes for _, s in job.optimizer_state())
    assert dict(made.static) == {**static, "data": 2 * ids.nbytes}
    assert 0 <= made.peak - peak <= 12 * plan.microbatches
    assert sum(made.below.values()) == states
    mine = [p.numel() for n, p in job.owners.items() if "blocks" in n and p.ndim > 1]
    assert min(mine) >= 1024
    rest_of = sum(p.numel() for p in job.owners.values()) - sum(mine)
    kept = sum(2 * n + 2 * 4 * -(-n // 256) for n in mine) + 8 * rest_of
    master = 0 if precision == "float32" else 4 * (sum(mine) + rest_of)
    assert found == kept
    if rest == "device":
        assert static["optimizer"] == kept and static.get("master", 0) == master


def test_prepare_takes_it_by_name():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    start, batch = copy.deepcopy(model), (torch.randn(8, 64), torch.randn(8, 64))
    job = prepare(Regression(model), NAME)
    losses = [float(job.step(batch)) for _ in range(20)]
    reference = prepare(Regression(start), "adamw")
    expected = [float(reference.step(batch)) for _ in range(20)]
    assert losses != expected and losses == pytest.approx(expected, rel=0.02)
    assert losses[-1] < 0.99 * losses[0]


class Regression(nn.Module):
    """A loss of a stack of layers."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x, y):
        return (self.layers(x) - y).square().mean()
