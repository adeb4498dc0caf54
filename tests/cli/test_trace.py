"""`outsize trace diff`: of files, of a run of several workers, and what it refuses."""

from __future__ import annotations

import json
import time
from collections import Counter

import pytest

from outsize.trace import Event, Trace, read, write


def step(source, *lengths: float) -> Trace:
    """Forwards of microbatch 0, 1, ... on worker 0 and 1, and a sum that ends on both at 9."""
    events = []
    for i, length in enumerate(lengths):
        events.append(
            Event(i % 2, "compute", "FORWARD", i % 2, i // 2, float(i), float(i + length))
        )
    for worker in (0, 1):
        events.append(Event(worker, "compute", "NORM", -1, -1, 8.0 + worker / 2, 9.0))
    return Trace(source, tuple(events))


@pytest.fixture
def files(tmp_path):
    """A predicted trace and a measured one, in the places that a run gives them."""
    write(step("predicted", 1, 1, 1, 1), tmp_path / "predicted.json")
    extra = Event(0, "receive", "RECV.gradients", 0, 3, 7.0, 7.5)
    now = step("measured", 2, 2.25, 5, 2)
    write(Trace("measured", (*now.events, extra)), tmp_path / "measured.json")
    return tmp_path


def test_actions_that_took_longest_beyond_forecast_are_named(files, invoke) -> None:
    result = invoke("trace", "diff", files)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("a step: 9.00 s predicted, 9.00 s measured (+0.0%); 6 actions")
    assert lines[0].endswith("at 2.00 times their forecast")
    assert lines[1] == "only measured: 1 RECV.gradients"
    named = [line.split()[:3] for line in lines if line.startswith("FORWARD s")]
    assert named == [
        ["FORWARD", "s0", "m1"],
        ["FORWARD", "s1", "m0"],
        ["FORWARD", "s0", "m0"],
        ["FORWARD", "s1", "m1"],
    ]
    longest = next(line for line in lines if line.startswith("FORWARD s0 m1")).split()
    assert longest[3:] == ["0", "1.00", "s", "5.00", "s", "-", "+4.00", "s", "+400.0%"]


def figures(invoke, *words):
    result = invoke("trace", "diff", *words, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_figures_for_programs(files, invoke) -> None:
    found = figures(invoke, files / "predicted.json", files / "measured.json")
    assert found == figures(invoke, files)
    assert (found["matched"], found["only_predicted"], found["only_measured"]) == (6, 0, 1)
    assert len(found["actions"]) == 6 and found["pace"] == 2.0
    first = found["actions"][0]
    assert (first["worker"], first["action"], first["beyond"]) == (0, "FORWARD s0 m1", 4.0)
    (forwards, norms) = found["kinds"]
    assert forwards == {
        "kind": "FORWARD", "count": 4, "predicted": 4.0, "measured": 11.25, "waited": 0.0,
        "beyond": 7.25,
    }  # fmt: skip
    assert (norms["waited"], norms["measured"], norms["beyond"]) == (0.5, 1.0, 0.0)
    assert [(w["worker"], w["beyond"]) for w in found["workers"]] == [(0, 5.0), (1, 2.25)]


def test_scaled_takes_off_what_everything_took_longer(files, invoke) -> None:
    page = files / "scaled.html"
    found = figures(invoke, files, "--scaled", "--top", 2, "--html", page)
    assert found["predicted_seconds"] == 9.0 and "18.0 s predicted" in page.read_text()
    assert "stretched 2.00 times" in page.read_text()
    assert [(a["action"], a["beyond"]) for a in found["actions"]] == [
        ("FORWARD s0 m1", 3.0),
        ("FORWARD s1 m0", 0.25),
    ]


def test_an_earlier_run_may_be_the_forecast_and_both_are_drawn(files, invoke) -> None:
    write(step("measured", 1, 1, 1, 1), files / "before.json")
    page, other = files / "t.html", files / "p.json"
    words = (files / "before.json", files / "measured.json", "--html", page, "--perfetto", other)
    assert figures(invoke, *words)["actions"][0]["beyond"] == 4.0
    assert "Predicted over measured · 2 workers" in page.read_text()
    processes = [
        r for r in json.loads(other.read_text())["traceEvents"] if r["name"] == "process_name"
    ]
    assert [r["args"]["name"] for r in processes] == [
        f"worker {worker} ({source})" for worker in (0, 1) for source in ("predicted", "measured")
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("nowhere",), "nowhere: no directory of a run"),
        (("empty",), "predicted.json is missing; expected the directory of a run"),
        (("predicted.json",), "predicted.json: no directory of a run; expected one, or the files"),
        (("predicted.json", "nothing.json"), "cannot be read: No such file"),
        (("measured.json", "predicted.json"), "name the predicted one first"),
        (("predicted.json", "other.json"), "no action in common (predicted: 6 actions, FORWARD s0"),
        (("predicted.json", "perfetto.json"), "a file for Perfetto; expected a trace"),
        (("predicted.json", "damaged.json"), "event 0: end"),
        (("predicted.json", "measured.json", "--top", "0"), "'--top'"),
        ((), "Missing argument"),
        ((".", "--html", "no/page.html"), "cannot write"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(words, says, files, invoke, monkeypatch) -> None:
    monkeypatch.chdir(files)
    (files / "empty").mkdir()
    write(Trace("measured", (Event(7, "compute", "DECODE", 0, 0, 0.0, 1.0),)), files / "other.json")
    (files / "perfetto.json").write_text('{"traceEvents": []}')
    text = (files / "measured.json").read_text()
    (files / "damaged.json").write_text(text.replace('"end": 2.0', '"end": -2.0', 1))
    result = invoke("trace", "diff", *words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: ")
    assert says in result.stderr


def test_a_run_of_several_workers_leaves_the_traces_of_all(home, invoke) -> None:
    """The simulator predicted the same actions for every worker."""
    launched = time.perf_counter()
    result = invoke("train", "run.yaml", "--mesh", "pipeline=2,data=2")
    assert result.exit_code == 0, result.stderr
    predicted, measured = (
        read(home / "run" / f"{name}.json") for name in ("predicted", "measured")
    )
    assert predicted.workers == measured.workers == (0, 1, 2, 3)
    names = [Counter((e.worker, e.name) for e in t.events) for t in (predicted, measured)]
    assert names[0] == names[1]
    norms = [e for e in measured.events if e.kind == "NORM"]
    begun, ended = max(e.start for e in norms), min(e.end for e in norms)
    assert begun <= ended, "one clock: nobody leaves the sum before the last has come"
    latest = max(e.end for e in measured.events)
    assert latest < time.perf_counter() - launched, "seconds of the step"
    found = figures(invoke, home / "run")
    assert found["only_predicted"] == found["only_measured"] == 0
    assert found["matched"] == len(measured.events)
    rows = json.loads((home / "run" / "trace.json").read_text())["traceEvents"]
    assert sum(row["name"] == "process_name" for row in rows) == 8
    page = (home / "run" / "timeline.html").read_text()
    assert "Predicted over measured · 4 workers" in page
