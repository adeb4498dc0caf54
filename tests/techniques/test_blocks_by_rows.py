"""Blocks at the front with whole weights and shared rows, on a tensor axis that cuts the others:
the numbers of plain PyTorch, bytes by formula, and what the planner makes of links and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from subjects import config_of
from threads import play
from verifying import case_of

from outsize.collectives import Mesh, along
from outsize.errors import OutsizeError
from outsize.hardware import Hardware, catalogue
from outsize.models.build import build
from outsize.models.dropout import Noise
from outsize.optim import AdamW
from outsize.parallel.check.decoder import Spread, check_decoder
from outsize.parallel.tensor.by_rows import check_by_rows
from outsize.parallel.tensor.declared import boundaries
from outsize.parallel.tensor.decoder import split
from outsize.parallel.tensor.units import cuts_of
from outsize.plan import Pipelined, Precision, Rest, Sharding
from outsize.plan.plan import per_segment
from outsize.plan.settings import NONE
from outsize.search import PlanRequest, choose
from outsize.simulate.network import BORDERS
from outsize.techniques.blocks_by_rows import NAME
from outsize.verify import verify

BLOCK, PARTS = per_segment(5, ("block",)), per_segment(5, ("mlp", "attention"))
BELOW = tuple(replace(s, rest=Rest(optimizer="host", activations="host")) for s in per_segment(5))
CASES = {  # rows of a step and of a microbatch, blocks, and more
    "all of a model, rows that do not divide": (5, 3, 3, {"clip": 0.5}),
    "tokens cut between branches": (5, 2, 2, {"sequence_parallel": True, "stages": BLOCK}),
    "dropout, sums beside": (5, 2, 1, {"overlap": 2, "noise": True, "mlp_tile": 6}),
    "zero 3": (8, 2, 2, {"mesh": Mesh(2, 2), "shards": Sharding(2, 2, 2), "split_backward": True}),
    "below": (4, 2, 2, {"stages": BELOW, "steps": 2}),
    "a border inside of a pipeline's stage": (
        8, 2, 3, {"mesh": Mesh(1, 2, 2), "pipeline": Pipelined("interleaved:2"), "stages": BLOCK}
    ),
    "ends cut over a pipeline": (
        5, 2, 2, {
            "mesh": Mesh(1, 2, 2), "pipeline": Pipelined("zb-h1", vocabulary=1),
            "sequence_parallel": True,
        },
    ),
    "another family": (4, 4, 2, {"family": "gemma2", "stages": PARTS, "order": "layer"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_of_one_worker_and_the_bytes_of_the_formula(name):
    rows, few, blocks, more = CASES[name]
    noise = {"noise": lambda batch, step: replace(batch, noise=Noise(0.2, 5, step))}
    more = {**more, **(noise if more.get("noise") else {})}
    case = case_of(
        **{"mesh": Mesh(1, 2), "steps": 1, **more}, rows=rows, microbatch_rows=few,
        blocks_by_rows=blocks,
    )  # fmt: skip
    found = verify(case, own=False)
    assert found.holds, found.exact.worst
    sent, formula = found.sent, found.sent.formula
    assert formula.exact and sent.compute == pytest.approx(formula.compute, abs=64)
    assert sent.network == pytest.approx(formula.states, rel=1e-3, abs=64)
    assert sent.stages == pytest.approx(formula.stages, abs=formula.rounded)


@pytest.mark.parametrize("family", ["llama, untied", "gpt2"])
def test_a_model_that_is_called_as_it_is_has_all_tokens_everywhere(family):
    config, size = config_of(family), 3 if family == "gpt2" else 2
    ids = torch.arange(14).view(2, 7)

    def run(world):
        mine = build(config, seed=1, dtype=torch.float64)
        split(mine, along(world, "tensor"), True, by_rows=2)
        with torch.no_grad():
            return mine(ids)

    wanted = build(config, seed=1, dtype=torch.float64)(ids)
    for logits in play(Mesh(tensor=size), run):
        torch.testing.assert_close(logits, wanted.detach(), rtol=1e-10, atol=1e-10)


# -- layouts ---------------------------------------------------------------------------------------


def findings(
    family: str,
    blocks: int,
    wide: bool = False,
    drop: str = "",
    whole: bool = True,
    told: bool = True,
):
    config = config_of(family)
    size = 3 if family == "gpt2" else 2
    cuts = cuts_of(build(config), size, 0, wide, blocks if whole else 0)
    kept = tuple(b for b in boundaries(wide, blocks) if b.module != drop)
    return check_decoder(config, size, Spread(cuts, kept, by_rows=blocks if told else 0))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("family", "blocks"), [("gpt2", 1), ("gemma2", 2), ("deepseek_v3", 1)])
def test_layouts_pass(family, blocks, wide):
    assert findings(family, blocks, wide) == ()


def test_what_is_missing_is_found():
    assert findings("llama", 1, drop="blocks.0")
    (first, *_) = findings("llama", 2, drop="blocks.0")
    assert first.module == "blocks.1" and first.missing == "take"
    (first, *_) = findings("llama", 2, drop="blocks.1")
    assert first.module.startswith("blocks.2") and "sharded(0)" in first.what
    assert findings("llama", 2, whole=False)
    (first, *_) = findings("gpt2", 2, told=False)  # documents would be cut
    assert "attention looks at the whole of dim 0" in first.what


# -- the planner -----------------------------------------------------------------------------------

CONFIG = config_of("llama")
OPEN = PlanRequest(
    64, 16, Precision.named("float32"), AdamW(), documents=(0, 16), mesh=Mesh(tensor=2),
    microbatch_rows=2, recompute=(), loss_chunk=0, mlp_tile=0,
)  # fmt: skip


def machine(links: float) -> Hardware:
    """With links so many times as fast as the catalogue's."""
    made = catalogue("H200", 2)
    found = (
        replace(link, bandwidth=replace(link.bandwidth, value=link.bandwidth.value * links))
        for link in made.links
    )
    return replace(made, links=tuple(found))


def by_rows(blocks: int, links: float, request: PlanRequest = OPEN):
    return choose(CONFIG, replace(request, settings=FIXED.having({NAME: blocks})), machine(links))


FIXED = NONE.having({"overlap": 0})
LEFT = replace(OPEN, settings=FIXED)


def test_the_planner_takes_as_many_as_gain_and_fit():
    made, cut = choose(CONFIG, LEFT, machine(0.01)), by_rows(0, 0.01)
    assert made.plan.blocks_by_rows == 3 and "less time" in dict(made.why)[f"{NAME} 3"]
    assert made.seconds < 0.97 * cut.seconds and made.peak > cut.peak
    tight = choose(CONFIG, replace(LEFT, budget=made.peak - 1), machine(0.01))
    assert 0 < tight.plan.blocks_by_rows < 3 and tight.peak < made.peak
    assert tight.seconds == by_rows(tight.plan.blocks_by_rows, 0.01).seconds


def test_the_planner_takes_none_where_they_gain_nothing():
    few = replace(LEFT, rows=2)  # gradients are more than what a microbatch sums
    made = choose(CONFIG, few, machine(0.01))
    assert made.plan.blocks_by_rows == 0 and "more time" in dict(made.why)[f"no {NAME}"]


def test_conversions_are_priced():
    """Of each microbatch a gather forward and one back, of which a worker has half from others."""
    slow, fast = (by_rows(2, links) for links in (0.01, 1))
    nbytes = 2 * 16 * CONFIG.hidden * 4
    for made in (slow, fast):
        assert made.received[BORDERS].total == 32 * 2 * nbytes / 2
    assert slow.received[BORDERS].seconds > 1.5 * fast.received[BORDERS].seconds


# -- what does not go together ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"mesh": Mesh(2)}, "mesh.tensor is 1 and nothing would be"),
        ({"mesh": Mesh(tensor=2, context=2)}, "another axis of the mesh cuts the tokens of rows"),
        ({"sequence_chunk": 6, "stages": BLOCK}, "blocks run in chunks of the sequence"),
        ({"approximate": ("local-learning",)}, "makes steps in its own way"),
    ],
)
def test_plans_that_are_refused(plan, said):
    with pytest.raises(OutsizeError, match=said):
        case_of(**{"mesh": Mesh(1, 2), **plan}, blocks_by_rows=1)


@pytest.mark.parametrize(
    ("family", "blocks", "said"),
    [
        ("mixtral", 1, "block 0 has experts, whose balance is one of all rows; expected 0 at most"),
        ("deepseek_v3", 2, "block 1 has experts"),
        ("llama", 4, "and the model has 3; expected no more"),
    ],
)
def test_models_that_are_refused(family, blocks, said):
    with pytest.raises(OutsizeError, match=said):
        check_by_rows(build(config_of(family)), blocks)
