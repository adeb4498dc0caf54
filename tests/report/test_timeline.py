"""The timeline page: what it holds, that no name gets out of its text, that a browser draws it."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
from pages import drawn, parse

from outsize.errors import OutsizeError
from outsize.report import timeline, write_timeline
from outsize.trace import Event, Trace

HOSTILE = "</script ></script><img src=x onerror=document.title='owned'>\"'&<!--"


def make(source: Any, slow: float = 1.0, workers: int = 2, count: int = 6) -> Trace:
    events = []
    for worker in range(workers):
        now = 3.0
        for m in range(count):
            kind = ("FORWARD", "BACKWARD")[m % 2]
            live = {"device/activations": 2**20 * m, "host/optimizer": 2**30} if m else {}
            end = now + slow * 0.1
            events.append(Event(worker, "compute", kind, 1, m, now, end, live, 2**21 * m))
            now = end
    return Trace(source, tuple(events), {"model": "tiny"})


def test_data_of_predicted_over_measured() -> None:
    measured = make("measured", 1.5)
    reader, data = parse(timeline(measured, make("predicted"), budget=2**30))
    assert [t["source"] for t in data["traces"]] == ["predicted", "measured"]
    assert data["budget"] == 2**30
    assert data["kinds"] == ["FORWARD", "BACKWARD"]
    assert data["lanes"] == [[0, "compute"], [1, "compute"]]
    shown = data["traces"][1]
    assert shown["start"][0] == 0.0, "from the start of its own trace"
    assert max(shown["end"]) == pytest.approx(0.9, abs=1e-9)
    assert len(shown["kind"]) == 12
    by_key = dict(zip(data["keys"], shown["live"], strict=True))
    last = shown["microbatch"].index(5)
    silent = shown["microbatch"].index(0)
    assert by_key["device/activations"][last] == 5 * 2**20
    assert by_key["host/optimizer"][silent] == -1
    assert "Predicted over measured · 2 workers · 12 actions" in reader.text
    assert "600 ms predicted, +50.0%" in reader.text
    assert "of 1.00 GiB budget" in reader.text


def test_lanes_are_ordered_by_worker_then_by_role() -> None:
    lanes = ["zeta", "disk", "copy", "network", "compute", "alpha"]
    events = [Event(w, lane, "X", -1, -1, 0.0, 1.0) for w in (10, 2) for lane in lanes]
    _, data = parse(timeline(Trace("predicted", tuple(events))))
    order = ["compute", "network", "copy", "disk", "alpha", "zeta"]
    assert data["lanes"] == [[w, lane] for w in (2, 10) for lane in order]


def test_table_compares_kinds_that_only_one_trace_has() -> None:
    gone = Event(0, "compute", "RECOMPUTE", 0, 0, 3.0, 3.25)
    predicted = Trace("predicted", (*make("predicted").events, gone))
    page = timeline(predicted, make("measured", 1.5))
    row = re.search(r"RECOMPUTE</th>(.*?)</tr>", page)
    assert row is not None
    cells = re.sub(r"<[^>]+>", "|", row[1])
    found = [c for c in cells.split("|") if c]
    assert found == ["0", "0 s", "0.0%", "–", "250 ms", "\N{MINUS SIGN}100.0%"]


def hostile() -> Trace:
    events = (Event(0, HOSTILE, HOSTILE, 0, 0, 0.0, 1.0, {f"device/{HOSTILE}": 5}, 9),)
    return Trace("measured", events, {HOSTILE: HOSTILE})


def test_no_name_becomes_markup() -> None:
    reader, data = parse(timeline(hostile(), title=HOSTILE))
    assert not [tag for tag, _ in reader.tags if tag == "img"]
    assert not [attr for _, attrs in reader.tags for attr in attrs if attr.startswith("on")]
    assert data["kinds"] == [HOSTILE]
    assert reader.text.count(HOSTILE) == 5  # title twice, table, and both sides of meta


def test_page_is_self_contained_and_allows_only_its_own_script() -> None:
    page = timeline(make("measured"))
    reader, _ = parse(page)
    digest = base64.b64encode(hashlib.sha256(reader.scripts[1].encode()).digest()).decode()
    policy = next(a["content"] for t, a in reader.tags if t == "meta" and "http-equiv" in a)
    assert policy == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    )
    assert not [t for t, a in reader.tags if t == "link" or "src" in a or "href" in a]
    assert "url(" not in page
    assert "innerHTML" not in page.replace("never through innerHTML", "")


@pytest.mark.parametrize("sources", [(), ("measured",) * 2, ("predicted", "measured", "measured")])
def test_other_numbers_of_traces_are_refused(sources: tuple[str, ...]) -> None:
    with pytest.raises(OutsizeError, match="expected one trace, or one predicted and one measured"):
        timeline(*(make(source) for source in sources))


def test_equal_traces_give_equal_pages(tmp_path: Path) -> None:
    first = write_timeline(tmp_path / "a.html", make("measured"))
    assert first.read_text(encoding="utf-8") == timeline(make("measured"))


@pytest.mark.parametrize("case", ["two", "empty", "hostile", "bare"])
def test_a_browser_draws_it(case: str, tmp_path: Path) -> None:
    traces = {
        "two": (make("measured"), make("predicted")),
        "empty": (Trace("measured", ()),),
        "hostile": (hostile(),),
        "bare": (Trace("measured", (Event(0, "compute", "FORWARD", 0, 0, 0.0, 0.0),)),),
    }
    page = write_timeline(tmp_path / "t.html", *traces[case], budget=2**20, title="calm")
    dom = drawn(page)
    assert "<title>calm</title>" in dom
    assert "<img" not in re.sub(r"<script.*?</script>", "", dom, flags=re.DOTALL)
