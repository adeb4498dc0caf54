"""docs/techniques.md and docs/together.md (tools/techniques.py, tools/together.py)."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from outsize.errors import OutsizeError
from outsize.plan import Plan
from outsize.registry import TECHNIQUES, Technique
from outsize.train import config

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.append(str(TOOLS))

import techniques  # noqa: E402
import together  # noqa: E402

ROW = {
    "name": "Halves",
    "source": "A paper",
    "where": ["outsize/registry.py"],
    "on": "`plan.mlp_tile`",
    "kind": "exact",
    "claims": ["gpipe"],
}


@dataclass(frozen=True)
class Empty:
    """A technique without settings."""


def test_the_pages_are_those_that_the_product_and_the_results_give(capsys):
    assert techniques.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("on", "why"),
    [
        ("`plan.mpl_tile`", "no run has the key 'plan.mpl_tile'"),
        ("`plan.mlp_tile: many`", "expected"),
        ("`optimizer.name: adamw9bit`", "adamw9bit"),
        ("`--memroy`", "no command takes --memroy"),
        ("`outsize train --sparse`", "outsize train does not take --sparse"),
        ("`outsize trian`", "there is no command 'trian'"),
        ("`--mesh tensr=2`", "there is no axis 'tensr'"),
        ("`--set plan.mpl_tile=2`", "no run has the key 'plan.mpl_tile'"),
        ("`outsize.prepare(mseh=)`", "outsize.prepare does not take 'mseh'"),
        ("`outsize.prepair()`", "there is no outsize.prepair"),
    ],
)
def test_a_switch_that_nothing_accepts_is_said(on, why):
    (said,) = techniques.refused(on)
    assert why in said


@pytest.mark.parametrize(
    "on",
    [
        "`plan.mlp_tile`", "`optimizer.name: adamw8bit` with `plan.approximate: [adamw8bit]`",
        "`outsize generate --memory SIZE`", "`outsize.prepare(mesh=, disk=)`", "`--mesh context=2`",
        "`outsize.plan.Stage(spill=)`", "`ladder_from` in `config.json`", "always",
    ],
)  # fmt: skip
def test_a_switch_that_is_there_passes(on):
    assert list(techniques.refused(on)) == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"claims": []}, "no claim and no proof"),
        ({"claims": ["gpip"]}, "claims/gpip.py is not there"),
        ({"where": ["outsize/registri.py"]}, "outsize/registri.py is not there"),
        ({"registered": ["adapt.lroa"]}, "'adapt.lroa' is not registered"),
        ({"registered": ["zeroth-order"]}, "registered as exact=False"),
    ],
)
def test_a_row_that_is_not_so_is_said(change, why):
    said = techniques.problems([*techniques.rows(), {**ROW, **change}])
    assert why in next(iter(said), "nothing was said")


def test_what_is_registered_has_a_row(monkeypatch):
    extra = Technique("adapt.of-this-test", Empty, "a technique without a row")
    TECHNIQUES.names()
    monkeypatch.setitem(TECHNIQUES._entries, extra.key, extra)
    config.technique_leaves.cache_clear()
    said = list(techniques.problems(techniques.rows()))
    config.technique_leaves.cache_clear()
    assert said == ["'adapt.of-this-test' is registered and has no row"]


def test_every_claim_has_a_row():
    kept = [row for row in techniques.rows() if "gpipe" not in row.get("claims", ())]
    assert "claims/gpipe.py has no row" in list(techniques.problems(kept))


@pytest.fixture
def results(monkeypatch, tmp_path):
    """A folder with the result of gpipe.py."""
    shutil.copy(techniques.verdicts.RESULTS / "gpipe.json", tmp_path)
    monkeypatch.setattr(techniques.verdicts, "RESULTS", tmp_path)
    return tmp_path


def test_a_row_shows_the_figures_of_the_result(results):
    path = results / "gpipe.json"
    result = json.loads(path.read_text())
    result["figures"] = [{**result["figures"][0], "ours": 1.25, "paper": 1.5}]
    path.write_text(json.dumps({**result, "verdict": "weaker (speed-up 1.25x of 1.5x)"}))
    page = techniques.techniques_page([ROW])
    assert "**weaker**, simulated" in page
    assert "1.25x of 1.5x (`claims/gpipe.py`)" in page
    assert "Of 1 results 0 are reached, by way: 0. 1 are weaker, 0 absent." in page
    ran = {**result["figures"][0], "what": "bytes", "ours": 1.5, "how": "run"}
    both = {**result, "verdict": "reached", "figures": [{**ran, "how": "simulated"}, ran]}
    path.write_text(json.dumps(both))
    page = techniques.techniques_page([ROW])
    assert f"**reached**, run, {result['date']}: bytes 1.5x of 1.5x; **reached**, simul" in page
    assert "Of 1 results 1 are reached, by way: 1 run and simulated." in page
    path.write_text(json.dumps({**result, "script": "another"}))
    assert "`claims/gpipe.py`; the script changed since" in techniques.techniques_page([ROW])
    path.unlink()
    said = techniques.techniques_page([{**ROW, "recorded": "twice as fast"}])
    assert "not measured since 2026-11-23: twice as fast (`claims/gpipe.py` of then)" in said
    assert "not measured yet (`claims/gpipe.py`)" in techniques.techniques_page([ROW])


def test_what_is_refused_together_is_listed_with_the_products_own_reason():
    page = together.page()
    for one, other, reason in (
        ("`update: behind` of a plan file", "`--mesh pipeline=2`", "all workers know the norm"),
        ("`plan.split_backward: true`", "`plan.sequence_chunk`", "would hold every chunk"),
        ("`optimizer.name: muon`", "`zeroth-order`", "both change optimizer states"),
    ):
        lines = [line for line in page.splitlines() if one in line and other in line]
        assert any(reason in line for line in lines), (one, other)


def test_switches_are_taken_alone_and_what_is_allowed_together_is_not_listed(monkeypatch):
    pairs = {(one, other) for one, other, _ in together.refused()}
    assert ("`plan.recompute: [block]`", "`--mesh tensor=2`") not in pairs
    monkeypatch.setattr(Plan, "_check_stages", refuse_all)
    with pytest.raises(AssertionError, match="alone is refused"):
        list(together.refused())


def refuse_all(plan):
    raise OutsizeError("nothing is allowed")
