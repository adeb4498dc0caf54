"""What the planner chooses where nobody has said: each against forecasts of plans in which it is
said, and a run that goes on keeps it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from subjects import config_of

from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.hardware import Hardware, catalogue
from outsize.optim import AdamW
from outsize.plan import Precision, Sharding
from outsize.plan.settings import NONE
from outsize.plan.spread import zero
from outsize.search import PlanRequest, choose
from outsize.search.pipeline_request import continued
from outsize.simulate import Forecast

CONFIG = config_of("llama")
OPEN = PlanRequest(
    16, 128, Precision.named("float32"), AdamW(), documents=(0, 128), sequence_parallel=None,
    recompute=(), loss_chunk=0, mlp_tile=0,
)  # fmt: skip
CUT = NONE.having({"blocks_by_rows": 0})  # whether they share rows: tests/techniques
SLOWER = 1000  # so that products take most of the time, as in models of the usual sizes


def machine(links: float = 1.0) -> Hardware:
    """One whose products are slow, with links so many times as fast as the catalogue's."""
    made = catalogue("H200", 4)
    (device, *others), by = made.devices, 1 / SLOWER
    peak = {name: replace(rate, value=rate.value * by) for name, rate in device.peak.items()}
    found = (
        replace(link, bandwidth=replace(link.bandwidth, value=link.bandwidth.value * links))
        for link in made.links
    )
    return replace(made, devices=(replace(device, peak=peak), *others), links=tuple(found))


def said(request: PlanRequest, hardware: Hardware) -> dict[tuple[bool, int], Forecast]:
    """By whether tokens are cut between branches, and chunks of overlap."""
    return {
        (cut, chunks): choose(
            CONFIG,
            replace(request, sequence_parallel=cut, settings=CUT.having({"overlap": chunks})),
            hardware,
        )
        for cut in (False, True)
        for chunks in (0, 4)
    }


@pytest.mark.parametrize("links", [1.0, 0.01])
def test_sums_run_beside_products_where_links_are_what_takes_the_time(links):
    request, hardware = replace(OPEN, mesh=Mesh(tensor=2), settings=CUT), machine(links)
    made, every = choose(CONFIG, request, hardware), said(request, hardware)
    least = min(one.seconds for one in every.values())
    assert least <= made.seconds < least / 0.95
    plan = made.plan
    assert made.seconds == every[plan.sequence_parallel, plan.overlap].seconds
    assert plan.overlap == (0 if links == 1.0 else 4)
    assert ("overlap 4" if plan.overlap else "no overlap") in dict(made.why)


def test_tokens_are_cut_between_branches_where_memory_asks_for_it():
    request = replace(OPEN, mesh=Mesh(tensor=2), microbatch_rows=16, settings=CUT)
    hardware = machine()
    whole, cut = (
        choose(CONFIG, replace(request, sequence_parallel=one), hardware) for one in (False, True)
    )
    assert cut.peak < whole.peak
    asked = replace(request, budget=whole.peak - 1)
    with pytest.raises(OutsizeError, match="too small"):
        choose(CONFIG, replace(asked, sequence_parallel=False), hardware)
    made = choose(CONFIG, asked, hardware)
    assert made.plan.sequence_parallel and made.peak <= asked.budget
    assert made.why[0] == ("sequence_parallel", "no plan fits without it")
    roomy = choose(CONFIG, replace(request, budget=whole.peak), hardware)
    assert not roomy.plan.sequence_parallel


def test_the_schedule_is_the_quickest_that_fits():
    """zb-h1 needs about as much as 1f1b and is here too little quicker, zb-h2 needs more."""
    request, hardware = replace(OPEN, mesh=Mesh(pipeline=4), microbatch_rows=2), machine()
    names = ("1f1b", "zb-h1", "zb-h2")
    plain, less, most = (choose(CONFIG, replace(request, pipeline=n), hardware) for n in names)
    assert less.peak < most.peak and most.seconds < 0.95 * plain.seconds < less.seconds
    made = choose(CONFIG, replace(request, budget=most.peak), hardware)
    assert made.plan.pipeline.schedule == "zb-h2" and made.seconds == most.seconds
    gain = 1 - most.seconds / plain.seconds
    assert made.why == (("zb-h2", f"{gain:.1%} less time than 1f1b, as predicted"),)
    made = choose(CONFIG, replace(request, budget=most.peak - 1), hardware)
    assert made.plan.pipeline.schedule == "1f1b" and made.seconds == plain.seconds
    gain = 1 - less.seconds / plain.seconds
    assert made.why == (("1f1b", f"zb-h1 would take {gain:.1%} less time, as predicted"),)


def test_a_schedule_that_does_not_go_with_chunks_is_passed_over(monkeypatch):
    """zb-h2 takes the gradients of weights later, which would hold every chunk."""
    monkeypatch.setattr("outsize.search.choices.promising", lambda *_: ["zb-h2"])
    settings = CUT.having({"sequence_chunk": 32})
    request = replace(OPEN, mesh=Mesh(pipeline=2), recompute=("block",), settings=settings)
    made = choose(CONFIG, replace(request, rows=4, microbatch_rows=2), machine())
    assert made.plan.sequence_chunk == 32 and made.plan.pipeline.schedule == "1f1b"


@pytest.mark.parametrize("links", [1.0, 1e-4])
def test_messages_of_few_bits_are_sent_where_they_gain(links):
    """Named, and beside fast links only slower: writing and reading them takes time."""
    request = replace(
        OPEN, mesh=Mesh(data=2), shards=zero(3, 2), approximate=("quantised-messages",),
        sequence_parallel=False,
    )  # fmt: skip
    made = choose(CONFIG, request, machine(links))
    every = {
        (gather, reduce): choose(
            CONFIG,
            replace(request, settings=NONE.having({"gather_bits": gather, "reduce_bits": reduce})),
            machine(links),
        ).seconds
        for gather in (8, 32)
        for reduce in (4, 32)
    }
    bits = (8, 4) if links < 1 else (32, 32)
    assert min(every, key=every.__getitem__) == bits and made.seconds == every[bits]
    assert (made.plan.gather_bits, made.plan.reduce_bits) == ((0, 0) if links < 1 else bits)


def test_a_run_that_goes_on_keeps_what_was_chosen():
    request = replace(OPEN, mesh=Mesh(tensor=2, pipeline=2))
    plan = choose(CONFIG, request, machine()).plan
    plan = replace(plan, sequence_parallel=True, settings=NONE.having({"overlap": 4}))
    assert plan.pipeline.schedule != "1f1b"
    assert continued(plan, request, Sharding()) == plan
    fewer = continued(plan, replace(request, mesh=Mesh()), Sharding())
    assert not fewer.sequence_parallel and fewer.overlap == 0
    other = replace(request, sequence_parallel=False, pipeline="1f1b")
    other = continued(plan, replace(other, settings=NONE.having({"overlap": 0})), Sharding())
    assert (other.sequence_parallel, other.overlap, other.pipeline.schedule) == (False, 0, "1f1b")
