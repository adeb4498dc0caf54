"""Histograms of documents' lengths in a plan for other hardware, beside sums by hand and rows of
the documents' own length."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner, Result

from outsize.cli.main import main
from outsize.foresight.layout import Layout
from outsize.foresight.memory import memory
from outsize.foresight.named import shape_of
from outsize.foresight.planning.choose import Planned, forecast
from outsize.foresight.planning.layouts import STACK
from outsize.foresight.planning.lengths import Lengths, lengths
from outsize.hardware import parse_spec


def test_lengths_are_weighed_by_their_tokens_and_packed_whole() -> None:
    found = lengths("1024:1,3072:1", 4096)
    assert found.seen == (1024**2 + 3072**2) // 4096
    assert 0.99 < found.filled <= 1  # the rule takes documents as they come
    assert lengths("3000", 4096) == Lengths(3000, 3000 / 4096)  # two are never in one row
    assert lengths("2048:7,3000:7", 4096).filled == pytest.approx((2048 + 3000) / (2048 + 4096))


def test_attention_of_documents_is_that_of_rows_of_their_length() -> None:
    shape, cluster = shape_of("llama3-8b"), parse_spec("8xH100-SXM")

    def priced(lay: Layout) -> Planned:
        return forecast(shape, [lay], cluster, [memory(shape, lay)], 1 << 40)[0]

    long = Layout(8, 1, 64, 4096, STACK, shards=8)
    short = replace(long, rows=4, batch=256, sequence=1024)
    one, other, whole = priced(replace(long, seen=1024)), priced(short), priced(long)
    assert one.lanes == pytest.approx(other.lanes)
    assert one.operations == other.operations
    assert one.lanes["attention"] < whole.lanes["attention"] / 2
    assert one.lanes["matmul"] == whole.lanes["matmul"]


def asked(*more: str) -> Result:
    return CliRunner().invoke(main, ["plan", "llama3-8b", "--hardware", *more])


def test_a_plan_says_what_documents_fill() -> None:
    small = ("8xH100-SXM", "--set", "train.batch_tokens=256K", "--require", "zero=3", "--json")
    plain, filled = (
        json.loads(asked(*small, "--tokens", "1B", *more).output)
        for more in ((), ("--lengths", "3000"))
    )
    assert (plain["filled"], plain["document_tokens"]) == (1.0, 4096)
    assert (filled["filled"], filled["document_tokens"]) == (3000 / 4096, 3000)
    longer = filled["plans"][0]["step_seconds"] / plain["plans"][0]["step_seconds"] * 4096 / 3000
    assert filled["days"] / plain["days"] == pytest.approx(longer)


@pytest.mark.parametrize("said", ["", "512:0", "512:-1", "a", "0", "512:70,", "512:nan", "512:x"])
def test_what_is_no_histogram_is_refused_in_one_line(said: str) -> None:
    found = asked("8xH100-SXM", f"--lengths={said}")
    assert found.exit_code == 2
    assert "--lengths is " in found.output
    assert len(found.output.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("8xH100-SXM", "--lengths", "8192"), "documents of 8192 tokens, and a row has 4096"),
        (("H100-SXM + A100-SXM-80", "--lengths", "512"), "--lengths is given beside unlike"),
        (("8xH100-SXM", "--serve", "--lengths", "512"), "--lengths is given beside --serve"),
    ],
)
def test_lengths_that_nothing_is_made_of_are_refused(more: tuple[str, ...], words: str) -> None:
    found = asked(*more)
    assert found.exit_code == 2
    assert words in found.output
