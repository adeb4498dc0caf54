"""`outsize schedule --offload`: activations of a pipeline on the host."""

from __future__ import annotations

import json

import pytest

UNIFORM = ("schedule", "uniform", "--devices", "4", "--microbatches", "12")


def test_figures_say_what_leaves_and_what_is_left(invoke):
    plain = json.loads(invoke(*UNIFORM, "--json").output)
    moved = json.loads(invoke(*UNIFORM, "--offload", "0.5,0.5,2", "--json").output)
    assert "offload" not in plain
    assert moved["makespan"] == plain["makespan"]
    assert moved["offload"]["peak_kept"] == plain["peak_act_per_rank"]
    assert moved["offload"]["slower"] == 1
    assert min(moved["offload"]["moved"]) >= 0.5
    assert max(moved["peak_act_per_rank"]) <= 1 < 3 < max(plain["peak_act_per_rank"])
    said = invoke(*UNIFORM, "--offload", "0.5,0.5,2").output
    assert "peak 1 instead of 3.5" in " ".join(said.split())


def test_a_page_is_drawn_with_its_lanes(invoke, tmp_path):
    page = tmp_path / "page.html"
    assert invoke(*UNIFORM, "--offload", "0.5,0.5", "--html", str(page)).exit_code == 0
    assert '"EVICT"' in page.read_text() and '"FETCH"' in page.read_text()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--offload", "fast"), "expected seconds out and back"),
        (("--offload", "1"), "expected seconds out and back"),
        (("--offload", "1,2,3,4"), "expected seconds out and back"),
        (("--offload", "1,1,3"), "expected 1 to 2"),
        (("--offload", "1,1", "--csv", "x.csv"), "format cannot say"),
    ],
)
def test_what_it_cannot_be_is_refused(invoke, more, said):
    result = invoke(*UNIFORM, *more)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_it_is_of_one_schedule(invoke):
    for name in ("auto", "compare"):
        result = invoke("schedule", name, *UNIFORM[2:], "--offload", "1,1")
        assert result.exit_code == 2 and "no such choice" in " ".join(result.output.split())
