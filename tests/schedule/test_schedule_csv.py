"""PyTorch's pipelining CSV: PyTorch reads what is written here, and the other way round."""

from __future__ import annotations

import csv
import io

import pytest
from torch.distributed.pipelining import schedules as theirs

from outsize.errors import OutsizeError
from outsize.schedule.csv import from_csv, to_csv
from outsize.schedule.pipelines import (
    NAMES,
    Shape,
    dualpipe,
    dualpipe_v,
    interleaved,
    make,
    skip_pipe,
    zb_v,
)

ONE_WAY = [n for n in NAMES if n not in ("chimera", "bitpipe", "dualpipe", "skip-pipe")]


@pytest.mark.parametrize("name", ONE_WAY)
def test_what_is_written_is_read_back_here_and_by_pytorch(name):
    made = make(name, Shape(4, 8))
    text = to_csv(made)
    again = from_csv(text)
    assert again.schedule == made.schedule and again.together == made.together
    rows = list(csv.reader(io.StringIO(text)))
    orders = {
        rank: [theirs._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)
    }
    stages = made.schedule.stages
    rank_of = theirs._validate_schedule(orders, 4, stages, 8)
    assert [rank_of[s] for s in range(stages)] == list(made.placement.routes[0])
    if not made.together:  # PyTorch's own simulator knows no pairs that run as one
        moves = theirs._add_send_recv(dict(orders), lambda s: rank_of[s], stages)
        theirs._simulate_comms_compute(moves, lambda s: rank_of[s], stages)


def test_pytorchs_own_schedule_is_read_with_and_without_its_moves():
    """Their interleaved 1F1B, as their CSV says it, is ours."""
    orders = {rank: _theirs(rank) for rank in range(4)}
    text = _written(orders)
    read = from_csv(text)
    assert read.schedule == interleaved(4, 8, 2).schedule
    plain = {r: [a for a in actions if a is not None] for r, actions in orders.items()}
    moves = theirs._add_send_recv(plain, lambda s: s % 4, 8)
    assert "SEND_F" in _written(moves)
    assert from_csv(_written(moves)).schedule == read.schedule


def _theirs(rank: int):
    """Two stages on each of four ranks, eight microbatches."""
    warm = 4 + 2 * (3 - rank)

    def ahead(step: int) -> int:
        return step // 4 % 2 * 4 + rank

    def back(step: int) -> int:
        return (1 - (step - warm) // 4 % 2) * 4 + rank

    return theirs._get_1f1b_rank_ops(2, 4, warm, 16 - warm, warm, rank, ahead, back)


def _written(orders) -> str:
    out = io.StringIO()
    writer = csv.writer(out)
    for rank in sorted(orders):
        writer.writerow(["" if action is None else str(action) for action in orders[rank]])
    return out.getvalue()


def test_pairs_that_run_as_one_are_written():
    text = to_csv(dualpipe_v(2, 4))
    assert "OVERLAP_F_B" in text and text.count("(") == text.count(";")


@pytest.mark.parametrize(
    ("made", "reason"),
    [(dualpipe(2, 4), "stages on two workers"), (skip_pipe(4, 4), "paths that leave stages out")],
)
def test_what_the_format_cannot_say_is_refused(made, reason):
    with pytest.raises(OutsizeError, match=reason):
        to_csv(made)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0F0,0B0\n1F0,1Q0", r"x line 2: '1Q0' is no action; expected stage, F, B, I or W"),
        ("0F0,0B0\n0F1,0B1", r"x line 2: stage 0 is on line 1 too"),
        ("0F0,0B0\n2F0,2B0", r"x: stage 1 has no action"),
        ("", "x: it holds no action"),
        ("0F0,0B0\n1F0", r"x: schedule: worker 0, action 2 .*comes before|x: schedule: .*not"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1", "was not produced|not on worker 0"),
        ("0B0,0F0\n1F0,1B0", "x: schedule: worker"),
        ("0F0,0F0,0B0\n1F0,1B0", "runs a second time"),
        ("0F0,0I0\n1F0,1B0", "weight gradient of stage 0, microbatch 0 was not produced"),
        ("(0F0;0F1)OVERLAP_F_B", "expected a forward and a backward to run as one"),
        ("(0F0;what)OVERLAP_F_B", "'what' is no action"),
    ],
)
def test_errors_say_line_and_reason(text, reason):
    with pytest.raises(OutsizeError, match=reason) as caught:
        from_csv(text, "x")
    assert "\n" not in str(caught.value)


def test_waits_and_blank_lines_say_nothing():
    made = zb_v(2, 3)
    rows = to_csv(made).splitlines()
    spaced = "\r\n".join(",," + row.replace(",", ", ,") + "," for row in rows) + "\r\n\r\n"
    assert from_csv(spaced).schedule == made.schedule
