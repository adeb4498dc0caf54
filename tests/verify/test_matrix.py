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
    "two stages": (Stage(0, 2), Stage(2, 5)),
}


# Two workers of a pipeline: plain, with several stages each, a V with gradients of weights apart,
# both ways. The 5 segments lie in at least the 4 stages that these have.
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
        name = draw.choice(free)
        row[name] = draw.choice(factors[name])
    return None


def covering(factors: dict) -> list[dict]:
    """Rows that hold every possible pair: greedy, of three rows for each pair. Every process that
    collects tests finds them anew, so sets of pairs are numbers: a bit for each."""
    draw = Random(6)  # of the first sixteen the one whose rows take the least time
    pairs = (
        frozenset({(one, x), (other, y)})
        for one, other in itertools.combinations(factors, 2)
        for x, y in itertools.product(factors[one], factors[other])
    )
    bits = {pair: 1 << i for i, pair in enumerate(pairs)}
    rows = [row for pair in bits for _ in range(3) if (row := drawn(draw, factors, dict(pair)))]
    left = [sum(bits[frozenset(p)] for p in itertools.combinations(r.items(), 2)) for r in rows]
    found = []
    while any(left):
        best = max(range(len(rows)), key=lambda i: left[i].bit_count())
        found.append(rows[best])
        left = [some & ~left[best] for some in left]
    return found


ROWS, PIPED_ROWS = covering(FACTORS), covering(PIPED)


def case(row: dict):
    mesh = row["mesh"]

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
        shards=shards(row["shards"], mesh.data), stages=STAGES[row["recompute"]],
        approximate=(optimizer.approximate,) if optimizer.approximate else (), **plan,
    )  # fmt: skip


def pipeline_case(row: dict):
    """The same on a pipeline, of four microbatches or five; tiers in memory."""
    made = case(row)
    plan, mesh = made.plan, row["mesh"]
    count = 4 if row["schedule"] in LOOPED else 2
    cuts = () if row["cuts"] == "even" else (*range(1, count - 1), len(plan.stages) - 1)
    plan = replace(
        plan, rows=4 * mesh.data + 1, microbatch_rows=1,
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
