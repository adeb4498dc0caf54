"""The client of benchmarks/serve_load.py and serve_forecast.py sees what a server does."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from serving import KEY, ROOM, served

from outsize.checkpoint import hub
from outsize.serve.engine import Engine
from outsize.serve.model import Model
from outsize.serve.policies import POLICIES

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import serve_forecast
import serve_load
from support.serving.models import made
from support.serving.traffic import (
    Lengths,
    Reply,
    asked,
    percentile,
    slower,
    wishes,
)

SOME = wishes(6, 50.0, Lengths(6, 9), Lengths(8, 8))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(hub.load(made("tiny", tmp_path_factory.mktemp("bench"))))


def test_wishes_follow_from_their_seed() -> None:
    assert wishes(6, 50.0, Lengths(6, 9), Lengths(8, 8)) == SOME
    assert slower(SOME, 2.0)[-1].at == 2 * SOME[-1].at
    many = wishes(2000, 4.0, Lengths(100, 400, 500), Lengths(8, 8), shared=[1, 2])
    assert many[-1].at == pytest.approx(500, rel=0.1)
    sizes = sorted(len(one.ids) - 2 for one in many)
    assert sizes[1000] == pytest.approx(100, rel=0.1) and sizes[-1] == 500
    assert sizes[1800] == pytest.approx(400, rel=0.15) and many[0].ids[:2] == [1, 2]


def test_a_client_sees_every_token_and_every_refusal(model: Model) -> None:
    expected = ["".join(map(chr, model.generate(one.ids, one.new))) for one in SOME]
    assert len(set(expected)) == len(SOME) and {len(one) for one in expected} == {8}
    engine = Engine(model, ROOM, POLICIES.get("mixed"))
    with served(engine, "on") as (host, port):
        url = f"http://{host}:{port}"
        found = asked(url, SOME, key=KEY)
        assert serve_load.answered(found) == found and [one.text for one in found] == expected
        assert {(len(one.times), one.used) for one in found} == {(8, 8)}
        text = httpx.get(f"{url}/metrics").text
        used = float(re.findall(r"^outsize_cache_bytes (\S+)", text, re.MULTILINE)[0])
        most = len(SOME) * 2  # pages of 16 tokens, each 2 layers of 64 keys and values in float32
        assert (
            used == engine.line.pages.used * 16 * 2 * 128 * 4 and 0 < engine.line.pages.used <= most
        )
        assert all(b.sent >= a.at for a, b in zip(SOME, found, strict=True))
        assert [one.text for one in asked(url, SOME, at_once=2, key=KEY)] == expected
    narrow = Engine(model, replace(ROOM, slots=1, queue=1), POLICIES.get("mixed"))
    with served(narrow, "on") as (host, port):
        found = asked(f"http://{host}:{port}", slower(SOME, 0.0), key=KEY)
    refused = [one for one in found if one.status == 429]
    assert refused and all(int(one.retry) > 0 for one in refused)
    assert [one.text for one in found if one.served] == [
        text for text, one in zip(expected, found, strict=True) if one.served
    ]
    with pytest.raises(SystemExit, match="was not answered: 429"):
        serve_load.answered(found)


def test_figures_follow_from_what_was_seen() -> None:
    load = serve_load.Load(Lengths(6, 9), Lengths(8, 8), 0.5, 0.1, 6)
    good = Reply(1.0, 200, times=[1.4, 1.45, 1.55], whole=True)
    late = replace(good, times=[1.6, 1.65])
    slow = replace(good, times=[1.1, 1.3])
    lost = replace(good, whole=False)
    assert load.within([good, late, slow, lost]) == 0.25
    assert good.gaps == pytest.approx([0.05, 0.1]) and good.tpot == pytest.approx(0.075)
    assert percentile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.0 and percentile([1.0, 2.0], 0.99) == 2.0

    names = (*serve_forecast.TARGETS, "bytes", "steps", "refused")
    found = serve_forecast.Found("x", 2.0, dict.fromkeys(names, 1.04), dict.fromkeys(names, 1.0))
    assert found.missed() == [] and "(+4%)" in serve_forecast.shown([found])
    found.foretold |= {"ttft p99": 0.85, "tpot p50": 1.2, "bytes": 0.99}
    assert found.missed() == ["tpot p50", "bytes"]
    words = serve_forecast.SETTINGS[-1].words(Path("/x"), 1000)
    assert words[-4:] == ["--memory", "750", "--policy", "mixed"]
