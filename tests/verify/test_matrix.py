"""Every pair of features in one run at least, each against plain PyTorch in float64."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest
from plain import batches
from streamed import small
from subjects import MIXED, SEQUENCE, VOCAB
from verifying import case_of

from outsize.collectives import Mesh
from outsize.kernels.entropy import LossOptions
from outsize.models.dropout import Noise
from outsize.optim.parse import parse
from outsize.plan import Pipelined, Rest, Sharding, Stage
from outsize.plan.plan import per_segment
from outsize.techniques.optim.adamw8bit import Settings
from outsize.verify import verify


def shards(name: str, data: int) -> Sharding:
    n = data
    return {
        "whole": Sharding(),
        "optimizer": Sharding(1, 1, n),
        "gradients": Sharding(1, n, n),
        "parameters": Sharding(n, n, n),
    }[name]


FROZEN = {
    "nothing": None,
    "parts": lambda name: "blocks.0" in name or "norm" in name,
    "tables": lambda name: "prologue.tokens" in name or "head" in name,
}
FACTORS = {
    "family": ("llama, untied", "gemma2", "gpt2", "mixtral", "deepseek_v3"),
    "mesh": (
        *(Mesh(), Mesh(3), Mesh(1, 2), Mesh(2, 2)),
        *(Mesh(context=3), Mesh(2, context=2), Mesh(tensor=2, context=2)),
        *(Mesh(tensor=2, expert=2), Mesh(2, expert=2)),
    ),
    "shards": ("whole", "optimizer", "gradients", "parameters"),
    "recompute": ("two stages", "block", "parts", "mixed"),
    "optimizer": ("adamw", "adamw8bit", "sgd", "muon"),
    "order": ("microbatch", "layer"),
    "update": ("apart", "behind"),
    "sequence_parallel": (False, True),
    "split_backward": (False, True),
    "loss_chunk": (0, 13),
    "mlp_tile": (0, 11),
    "sequence_chunk": (0, 8),
    "overlap": (0, 2),
    "clip": (None, 0.5),
    "dropout": (0.0, 0.2),
    "options": (LossOptions(), LossOptions(0.1, 1e-2)),
    "frozen": tuple(FROZEN),
    "resume_at": (0, 1),
}
STAGES = {
    "none": per_segment(5),
    "block": per_segment(5, ("block",)),
    "parts": per_segment(5, ("mlp", "attention")),
    "mixed": MIXED,
}
# Two blocks, which differ where those of a family do.
FEW = {
    "none": per_segment(4),
    "two stages": (Stage(0, 1), Stage(1, 4)),
    "block": per_segment(4, ("block",)),
    "parts": (
        Stage(0, 1), Stage(1, 2, ("mlp", "attention")), Stage(2, 3, ("attention",)), Stage(3, 4),
    ),
    "mixed": (Stage(0, 1), Stage(1, 3, ("block",)), Stage(3, 4)),
}  # fmt: skip


# Two workers of a pipeline: plain, with several stages each, a V with gradients of weights apart,
# both ways. Their segments lie in at least the 4 stages that these have.
PIPED = FACTORS | {
    "family": ("llama", *FACTORS["family"][1:]),
    "recompute": ("none", "block", "parts", "mixed"),
    "mesh": (
        Mesh(1, 1, 2),
        Mesh(2, 1, 2),
        Mesh(1, 2, 2),
        Mesh(1, 1, 2, context=2),
        Mesh(1, 1, 2, expert=2),
    ),
    "schedule": ("1f1b", "interleaved:2", "zb-v", "chimera"),
    "vocabulary": (0, 1, 2),
    "cuts": ("even", "head alone"),
    "rest": (Rest(), Rest(activations="host"), Rest(optimizer="host")),
    "order": ("microbatch",),
    "update": ("apart",),
}
LOOPED = ("interleaved:2", "zb-v")
REDRAWS = 60


def possible(row: dict) -> bool:
    """What plans refuse, said once more."""
    if row["mesh"].pipeline > 1 and not piped(row):
        return False
    if row["update"] == "behind" and row["clip"] is not None:
        return False
    if (row["sequence_parallel"] or row["overlap"]) and row["mesh"].tensor == 1:
        return False
    if row["family"] == "gpt2" and row["mesh"].tensor == 2:  # three heads
        return False
    if row["shards"] != "whole" and row["mesh"].data == 1:
        return False
    if row["mesh"]["expert"] > 1 and row["family"] not in ("mixtral", "deepseek_v3"):
        return False
    whole = ("block",) if row["sequence_parallel"] else ("block", "mixed")
    return not row["sequence_chunk"] or (row["recompute"] in whole and not row["split_backward"])


def piped(row: dict) -> bool:
    """What pipelines refuse, or what would be said twice."""
    if row["sequence_chunk"] and row["schedule"].startswith("zb"):
        return False
    if row["rest"].activations != "device" and row["overlap"] and row["sequence_parallel"]:
        return False
    if row["vocabulary"] and row["sequence_chunk"] and row["sequence_parallel"]:
        return False
    return row["cuts"] == "even" or row["recompute"] != "mixed" or row["schedule"] not in LOOPED


def drawn(draw: Random, factors: dict, fixed: dict) -> dict | None:
    """A possible row with these values: where it is not, one factor is redrawn, a while long."""
    row = {name: draw.choice(values) for name, values in factors.items()} | fixed
    free = [name for name in factors if name not in fixed]
    for _ in range(REDRAWS):
        if possible(row):
            return row
        if not free:
            return None
        name = draw.choice(free)
        row[name] = draw.choice(factors[name])
    return None


def covering(factors: dict, kept: tuple[str, ...]) -> list[dict]:
    """Rows that hold every possible pair: the kept ones, a digit for the value of each factor, and
    for pairs that none of them holds (of a factor or a value that came since) some that are drawn,
    greedily, of three for each pair."""
    draw = Random(6)
    named = [dict(zip(factors, map(int, row), strict=False)) for row in kept]
    made = [{name: factors[name][i] for name, i in row.items()} for row in named]
    rows = [row for one in made if (row := drawn(draw, factors, one))]
    held = {pair for row in rows for pair in itertools.combinations(row.items(), 2)}
    every = (
        ((one, x), (other, y))
        for one, other in itertools.combinations(factors, 2)
        for x, y in itertools.product(factors[one], factors[other])
    )
    left = [pair for pair in every if pair not in held]
    more = [row for pair in left for _ in range(3) if (row := drawn(draw, factors, dict(pair)))]
    new = [set(left).intersection(itertools.combinations(row.items(), 2)) for row in more]
    while any(new):
        best = max(range(len(more)), key=lambda i: len(new[i]))
        rows.append(more[best])
        new = [some - new[best] for some in new]
    return rows


# Found by annealing: nearly as few as pairs of two factors alone need, and of the cheapest values.
KEPT = """
350221001110001020 133231110110100020 383110100001001020 420201001010111121
432300011000101011 400000000010011120 120311000101000020 020030111100001010
470331000101010020 152131100101001110 453010001100010101 013201101100000110
460211111100000100 251330101100000020 480331100110001100 311020101010001021
440101001110010010 212010101010001100 470220111000101111 100021101100000000
330020101010001010 000231001100000110 200101000111001021 370101110000001010
300310000100001110 052200101000000020 360020001000101120 382020001100010110
213320000001011010 111031101000000011 410100101100000110 040020101000001010
320120111000000100 240200101010001101 160100000101010000 340130001000001120
481200001110000111 370010011010001100 140310100111000010 060330011110000111
031110010101110100
"""
KEPT_PIPED = """
0300100010100110201110 4003200000010111213000 4400000001100000002100 2123100011000111010011
1112200010000111213001 3111100000010101210101 3202200110101011011110 1301300001010011010012
0001200010000111102102 2002100010100001011201 3302000011000001112201 2131000000110111110100
3132300010000111203102 3002000010100110110012 1000300011100111211200 4201000101011100113010
4132100011100111211002 1200100110000111202111 3403100001010111213001 4122000011100010213002
2100000010000111212112 0130200010000000013211 2113300001110010101002 3402200011100111100202
0203300111001101210202 4110000010100111210212 1200100001101111102011 2303200010100110213000
1133000011100110212100 4302000000000111202001 0112000010000110012000 3120000010000011201000
0121200000110111210200 4401300010100111201011 1120300011000101102110
"""
ROWS = covering(FACTORS, tuple(KEPT.split()))
PIPED_ROWS = covering(PIPED, tuple(KEPT_PIPED.split()))


def case(row: dict, stages=FEW):
    mesh, layers = row["mesh"], "n_layer" if row["family"] == "gpt2" else "num_hidden_layers"
    stages = stages[row["recompute"]]

    def noise(batch, step):
        return replace(batch, noise=Noise(row["dropout"], 5, step)) if row["dropout"] else batch

    names = ("order", "update", "sequence_parallel", "split_backward", "loss_chunk", "mlp_tile")
    plan = {name: row[name] for name in (*names, "sequence_chunk", "overlap")}
    said = Settings(block=32, least=65) if row["optimizer"] == "adamw8bit" else None
    optimizer = parse(row["optimizer"], 3e-3, 0.1, (0.9, 0.95), said)
    return case_of(
        row["family"], optimizer, row["clip"],
        resume_at=row["resume_at"], noise=noise, options=row["options"],
        frozen=FROZEN[row["frozen"]],
        rows=2 * mesh.data + 1, microbatch_rows=2, mesh=mesh,
        shards=shards(row["shards"], mesh.data), segments=stages[-1].last, stages=stages,
        changes={layers: stages[-1].last - 2},
        approximate=(optimizer.approximate,) if optimizer.approximate else (), **plan,
    )  # fmt: skip


def pipeline_case(row: dict):
    """The same on a pipeline, of five microbatches on two workers, of two or three elsewhere; tiers
    in memory."""
    looped, even = row["schedule"] in LOOPED, row["cuts"] == "even"
    made = case(row, STAGES if looped and not (even and row["recompute"] != "mixed") else FEW)
    plan, mesh = made.plan, row["mesh"]
    places = mesh.data * mesh["expert"]  # that rows are spread over
    count = 4 if looped else 2
    cuts = () if even else (*range(1, count - 1), len(plan.stages) - 1)
    plan = replace(
        plan, rows=(4 if mesh.size == 2 else 2) * places + 1, microbatch_rows=1,
        pipeline=Pipelined(row["schedule"], cuts, vocabulary=row["vocabulary"]),
        stages=tuple(replace(stage, rest=row["rest"]) for stage in plan.stages),
    )  # fmt: skip
    data = batches(made.steps, plan.rows, SEQUENCE, VOCAB)

    def batch(step):
        noise = Noise(row["dropout"], 5, step) if row["dropout"] else None
        return replace(data[step], noise=noise)

    return replace(made, plan=plan, batch=batch)


@pytest.mark.parametrize("index", range(len(ROWS)))
def test_pairs(index):
    judge(case(ROWS[index]), ROWS[index])


@pytest.mark.parametrize("index", range(len(PIPED_ROWS)))
def test_pairs_with_pipelines(index, monkeypatch):
    small(monkeypatch)
    sent = judge(pipeline_case(PIPED_ROWS[index]), PIPED_ROWS[index])
    assert sent.stages == pytest.approx(sent.formula.stages, abs=sent.formula.rounded)


def judge(made, row: dict):
    """Within 1e-10 of plain PyTorch, and the bytes of the formulas. Gives what was sent."""
    found = verify(made)
    assert found.holds, (row, found.exact.worst)
    sent = found.sent
    if (
        row.get("shards") != "parameters" or row.get("frozen") != "tables"
    ):  # the formula has less then
        assert sent.network == pytest.approx(sent.formula.states, rel=1e-3, abs=64)
    if sent.formula.exact:
        assert sent.compute == pytest.approx(sent.formula.compute, rel=1e-3, abs=64)
    else:
        assert sent.compute <= 1.001 * sent.formula.compute
    return sent


def test_one_head_that_every_worker_has_is_not_sent():
    """Matrices that are updated whole are put together only where they lie in parts."""
    muon = parse("muon", 3e-3, 0.1, (0.9, 0.95))
    one = {"num_key_value_heads": 1}
    judge(case_of(optimizer=muon, mesh=Mesh(tensor=2), changes=one), one)


def test_a_last_tile_of_one_token_is_summed_as_the_others():
    """Over workers whose sums overlap; in the middle of a row, where others read it."""
    case = case_of(
        mesh=Mesh(1, 2), overlap=2, mlp_tile=3, sequence_chunk=7, stages=STAGES["block"]
    )  # fmt: skip
    assert verify(case, own=False).holds
