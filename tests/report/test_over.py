"""The timeline page of a pipeline, predicted and measured over each other."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from pages import drawn, parse

from outsize.report import timeline
from outsize.report.totals import computing, totals
from outsize.schedule.pipelines import Costs, Shape, make
from outsize.simulate.coarse import Played, Times, play
from outsize.trace import Event, Trace


def played(name: str = "1f1b", workers: int = 4, both: float | None = None) -> Played:
    times = Times(1.0, 1.25, 0.75, 0.125, both)
    costs = Costs(times.forward, times.of_input, times.of_weight, times.transfer)
    return play(make(name, Shape(workers, 2 * workers, costs)), times)


def slower(trace: Trace, late: dict[tuple[int, str], float]) -> Trace:
    """As it ran: everything where it was, named actions so many seconds longer, and the order of
    events another, as threads would write them."""
    events = [
        replace(event, end=event.end + late.get((event.worker, event.name), 0.0))
        for event in trace.events
    ]
    random.Random(5).shuffle(events)
    return replace(trace, source="measured", events=tuple(events))


LATE = {(2, "BACKWARD s2 m5"): 0.5, (0, "FORWARD s0 m3"): 0.25, (3, "FORWARD s3 m0"): -0.5}


def test_every_action_has_its_twin_and_its_seconds_beyond_forecast() -> None:
    predicted = played().trace()
    _, data = parse(timeline(predicted, slower(predicted, LATE)))
    before, now = data["traces"]
    assert len(now["twin"]) == len(predicted.events) and sorted(now["twin"]) == list(
        range(len(predicted.events))
    )
    for shown in (before, now):
        assert shown["start"] == sorted(shown["start"]), "the script searches in them"
    for j, i in enumerate(now["twin"]):
        assert before["twin"][i] == j
        for column in ("lane", "kind", "stage", "microbatch", "part"):
            assert before[column][i] == now[column][j]
        name = f"{data['kinds'][now['kind'][j]]} s{now['stage'][j]} m{now['microbatch'][j]}"
        worker = data["lanes"][now["lane"][j]][0]
        assert now["beyond"][j] == pytest.approx(LATE.get((worker, name), 0.0), abs=1e-9)
    assert "beyond" not in before and "beyond" not in parse(timeline(predicted))[1]["traces"][0]


def test_the_longest_beyond_forecast_lead_to_their_bars() -> None:
    predicted = played().trace()
    page = timeline(predicted, slower(predicted, LATE))
    reader, data = parse(page)
    buttons = re.findall(r'data-event="(\d+)"[^>]*>([^<]+)<', page)
    assert [name for _, name in buttons] == ["BACKWARD s2 m5", "FORWARD s0 m3"], "those beyond only"
    now = data["traces"][1]
    for place, name in buttons:
        i = int(place)
        assert name.startswith(data["kinds"][now["kind"][i]])
        assert name.endswith(f" s{now['stage'][i]} m{now['microbatch'][i]}")
    assert "+500 ms" in reader.text and "BACKWARD s2 m5 on worker 2" in reader.text
    same = timeline(predicted, slower(predicted, {}))
    assert "Longest beyond forecast</h2>" not in same, "nothing was"


def test_idle_is_what_the_simulator_says() -> None:
    made = played("zb-h1")
    trace = made.trace()
    spent = computing(trace)
    idle = [trace.span() - spent[worker] for worker in range(4)]
    assert idle == pytest.approx(made.run.idle_in_makespan)
    page = timeline(trace)
    for worker, seconds in enumerate(idle):
        share = f"{seconds / trace.span():.1%}"
        assert re.search(rf"worker {worker}</th><td>[^<]*</td><td>{share}</td>", page)


def test_waiting_is_neither_computing_nor_beyond_forecast() -> None:
    def step(source, late: float) -> Trace:
        norms = [Event(w, "compute", "NORM", -1, -1, 2.0 + w * late, 3.0 + late) for w in (0, 1)]
        return Trace(source, (Event(1, "compute", "BACKWARD", 0, 0, 1.0, 2.0 + late), *norms))

    measured = step("measured", 4.0)
    _, data = parse(timeline(step("predicted", 0.0), measured))
    now = data["traces"][1]
    assert sorted(now["wait"]) == [0.0, 0.0, 4.0]
    assert sorted(now["beyond"]) == [0.0, 0.0, 4.0], "the backward alone"
    assert computing(measured) == pytest.approx({0: 1.0, 1: 6.0})
    norm = next(total for total in totals(measured) if total.kind == "NORM")
    assert (norm.seconds, norm.waited, norm.own) == pytest.approx((6.0, 4.0, 2.0))
    page = timeline(step("predicted", 0.0), measured)
    assert "Waiting for others" in page
    row = re.search(r"NORM</th>(.*?)</tr>", page)
    assert row is not None and row[1].endswith("<td>+0.0%</td>"), "without waiting nothing changed"


@pytest.mark.parametrize(
    ("name", "link"), [("dualpipe", "#colour=beyond&follow=2"), ("zb-v", "#rows=lanes&colour=no")]
)
def test_a_browser_draws_it(name, link, tmp_path) -> None:
    predicted = played(name, both=3.25).trace()
    late = {(e.worker, e.name): 0.5 for e in predicted.events[::7]}
    page = tmp_path / "t.html"
    page.write_text(timeline(predicted, slower(predicted, late)), encoding="utf-8")
    dom = drawn(page, link)
    kind, rows = ("beyond", "workers") if "beyond" in link else ("kind", "lanes")
    assert f'data-rows="{rows}" data-colour="{kind}"' in dom
    assert "colour: microbatch</option>" in dom and "every lane</option>" in dom
    assert ("slower by 500 ms" in dom) == (kind == "beyond")
