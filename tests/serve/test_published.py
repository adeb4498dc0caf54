"""`outsize score` on tables of published serving, and the price of steps on devices not here."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from outsize.cli.main import main
from outsize.errors import OutsizeError
from outsize.foresight.named import shape_of
from outsize.foresight.runs import data
from outsize.hardware import parse_spec
from outsize.hardware.cluster import NEAR
from outsize.serve.benched import Sums, bench
from outsize.serve.described import AHEAD, COMPUTED, KERNELS, PASSED, STARTED, STREAMED, Served
from outsize.serve.published import COLUMNS, SHIPPED, forecasts, read_serving, room_of, score

H100 = parse_spec("8 x H100-SXM").groups[0]
LLAMA = shape_of("llama3-70b")
ROWS = list(csv.DictReader(io.StringIO(data(SHIPPED))))
SAID = [row for row in ROWS if row["rate_req_s"] and "mis-scaled" not in row["notes"]]


def served(**more: Any) -> Served:
    asked = {"shape": LLAMA, "machines": H100, "tensor": 2, "precision": "bf16", "host": 3e-3}
    return Served(**{**asked, **more})


def table(path: Path, rows: list[dict[str, str]], columns: Any = COLUMNS) -> str:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def test_a_token_reads_the_weights_and_starts_every_kernel() -> None:
    """By hand: a layer's 856 million weights over two workers, two sums, a dozen kernels, and what
    norms, gate, rotation and cache read and write."""
    wide = 3.35e12 * STREAMED
    layer = 8192 * (80 * 128 + 8192) + 3 * 8192 * 28672
    sums = 2 * (NEAR + 2 * 8192 * 2 / 450e9)
    elements = 2 * 4 * 8192 + 3 * 28672 / 2 + 2 * (32 + 4) * 128 + 4 * 4 * 128
    passes = 2 * elements / (3.35e12 * PASSED)
    blocks = 3e-3 + 80 * (2 * layer / 2 / wide + sums + KERNELS * STARTED + passes)
    price = served().price()
    assert price.blocks(1) == pytest.approx(blocks, rel=1e-9)
    assert price.head(1) == pytest.approx(2 * 8192 * 128256 / 2 / wide)
    more = served(each=1e-3).price()
    assert more.head(16) - price.head(16) == pytest.approx(16e-3)
    assert price.load == pytest.approx(2 * 2 * 80 * 4 * 128 / wide)  # keys and values of a token


def test_many_tokens_compute() -> None:
    """4,096 of them: two operations a weight at what products reach of the peak, beside elementwise
    work, which reads and writes an eighth of a gigabyte and more in each pass."""
    one = served(tensor=1)
    made = one.price().blocks(4096) - 3e-3 - 80 * one._passes(4096)
    assert made == pytest.approx(2 * 4096 * LLAMA.working / (989e12 * COMPUTED), rel=0.01)
    assert 80 * one._passes(4096) > 0.03 * made
    eight = served(tensor=1, precision="fp8")  # casts read their inputs twice and write them once
    cast = 5 * (2 * 8192 + 64 * 128 + 28672) / (3.35e12 * PASSED)
    assert eight._passes(1) - one._passes(1) == pytest.approx(cast)


def test_large_sums_are_of_a_ring_that_waits_at_every_step() -> None:
    """512 tokens of 8,192 are 8 MiB, which eight workers sum in 14 steps; fewer ones are summed by
    the engine's own kernel. NCCL took 80 us of them on eight H100 (APEX's profile)."""
    one = served(tensor=8)
    moved = 2 * (8 << 20) / 450e9
    assert one._sum(8 << 20) == pytest.approx(8.4e-6 + 14 * 3.4e-6 + moved)
    assert one._sum(8 << 20) == pytest.approx(80e-6, rel=0.2)
    assert one._sum((8 << 20) - 2) == pytest.approx(NEAR + moved)


@pytest.mark.parametrize(("tokens", "rows"), [(257, 384), (384, 384), (385, 512)])
def test_products_compute_whole_tiles(tokens: int, rows: int) -> None:
    """By hand: a product of 257 tokens takes what one of 384 takes."""
    made = served()._product(tokens, 8192, 8192, "bf16")
    assert made == pytest.approx(2 * rows * 8192 * 8192 / (989e12 * COMPUTED))


@pytest.mark.parametrize(
    ("change", "fed"),
    [
        ({}, ("mixed", 512)),
        # 70B on two workers leave 35,984 tokens of 131,072: the engine wants a shorter length.
        ({"tp": "2"}, ("prompt-first", 32768)),
        ({"tp": "2", "max_batched_tokens": "4096"}, ("prompt-first", 4096)),
        ({"tp": "2", "engine": "vLLM 0.8.1"}, ("mixed", 2048)),
        ({"tp": "2", "engine": "sglang"}, ("prompt-first", 4096)),
        ({"model": "mixtral-8x7b"}, ("prompt-first", 32768)),  # made for no more than that
    ],
)
def test_prompts_are_cut_where_the_engine_does_by_default(change: Any, fed: Any) -> None:
    (row,) = read_serving(_text([{**SAID[0], **change}]), "t")
    assert (row.policy, row.budget) == fed and not row.missing


def test_casts_are_three_launches_and_one_kernels_work() -> None:
    """A prompt of 16 tokens in 8 bits on eight workers waits for the host: 12 kernels and 4 casts
    of three launches each a layer. 16 requests that draw are a recorded step."""
    wide, narrow = (served(tensor=8, precision=dtype) for dtype in ("bf16", "fp8"))
    launches = (LLAMA.layers * 20e-6 * count for count in (12, 12 + 3 * 4))
    for one, seconds in zip((wide, narrow), launches, strict=True):
        price = one.price()
        assert price.step(16, 1, 0.0) - price.head(1) == pytest.approx(one.host + seconds)
        assert price.step(16, 16, 0.0) - price.head(16) == price.blocks(16)
    price = narrow.price()
    assert price.step(16, 16, 0.0) < 0.5 * price.step(16, 1, 0.0)
    allowed = price.step(16, 1, 0.0)
    assert price.most(allowed / 2, 1, 16, 0.0, 0) == 1  # no room for a prompt's launches
    assert price.most(allowed * 1.01, 1, 16, 0.0, 0) == 16


def test_narrow_products_of_few_columns_leave_memory_idle() -> None:
    """In 8 bits, queries of one worker of eight are 14 tiles for 132 multiprocessors."""
    one = served(tensor=8, precision="fp8")
    assert one._product(1, 1792, 8192, "fp8") == pytest.approx(
        1792 * 8192 / (3.35e12 * STREAMED * AHEAD * 14 / 132)
    )
    assert one._product(1, 1792, 8192, "bf16") == pytest.approx(
        2 * 1792 * 8192 / (3.35e12 * STREAMED)
    )


def test_a_step_reads_the_experts_that_its_tokens_meet() -> None:
    mixtral = served(shape=shape_of("mixtral-8x7b"))
    one, many = (mixtral.price().blocks(n) - 3e-3 for n in (1, 32))
    s = mixtral.shape
    expert = 3 * s.hidden * s.expert_inner * 2 / 2 / (3.35e12 * STREAMED)
    met = s.experts * (1 - (1 - s.active / s.experts) ** 32) - s.active
    assert many - one == pytest.approx(s.layers * met * expert, rel=0.02)


def test_pages_are_what_weights_leave() -> None:
    room = room_of(served(tensor=4), 512)
    bytes_ = room.pages * room.page * served(tensor=4).cached + served(tensor=4).weights
    assert bytes_ == pytest.approx(0.9 * H100.device.memory_bytes, rel=1e-3)
    with pytest.raises(OutsizeError, match="leave no room for a cache"):
        room_of(served(tensor=1), 512)


def test_the_shipped_table() -> None:
    """First tokens within 12%, each further one within 15%; all others are named."""
    rows = read_serving(data(SHIPPED), SHIPPED)
    told = [row for row in rows if not row.missing]
    chats = [row for row in told[9:20] if row.workload == "lmsys"]
    made, order = (score(forecasts(some)) for some in (told[::3], chats))
    assert order.rank is not None and order.rank > 0.9
    assert made.tpot_mape is not None and made.tpot_mape < 0.06 and made.rows == 18
    assert made.ttft_mape is not None and made.ttft_mape < 0.12
    why = [row.missing for row in rows if row.missing]
    assert len(rows) == 88 and len(why) == 35
    assert sum("mis-scaled" in each for each in why) == 8
    assert sum(each == "the rate of requests is not said" for each in why) == 27


def test_more_requests_take_longer() -> None:
    (row,) = read_serving(_text([SAID[0]]), "t")
    assert row.bench is not None
    calm, busy = (
        forecasts([replace(row, bench=replace(row.bench, load=replace(row.bench.load, rate=rate)))])
        for rate in (0.1, 2.0)
    )
    assert busy[0].tpot > 1.1 * calm[0].tpot and busy[0].ttft > calm[0].ttft


def test_requests_are_as_many_and_as_unlike_as_the_source_says() -> None:
    """511 stories on one copy of Llama, as long on average as the row's sum says; half of lmsys's
    prompts have 19 tokens or fewer, a tenth hundreds. Of other sources a thousand, all alike."""
    source = "microsoft/apex_plus"
    one = bench(source, "Llama-3.1-70B", "creation", (8, 1), Sums(157563, 581628, False), 0.25)
    assert one.load.requests == 511 and one.load.prompt == pytest.approx(157563 / 511)
    copy = bench(source, "Llama-3.1-70B", "creation", (2, 4), Sums(65623, 140052, True), 0.25)
    assert copy.load.rate == 0.25 / 4 and copy.load.prompt == pytest.approx(65623 / 199.75)
    chat = bench(source, "Llama-3.1-70B", "lmsys", (8, 1), Sums(76061, 77104, False), 0.25)
    prompts = [come.prompt for come in chat.load.arrivals(60)]
    assert sorted(prompts)[29] < 25 and sum(prompt > 250 for prompt in prompts) == 6
    assert sum(prompts) / 60 == pytest.approx(76061 / 1023, rel=0.02)
    sums = Sums(76000, 77000, False)
    other = bench("another/source", "Llama-3.1-70B", "lmsys", (8, 1), sums, 0.25)
    assert {come.prompt for come in other.load.arrivals(5)} == {76} and not other.known


def test_a_server_that_goes_on_reports_the_means_of_all_its_runs() -> None:
    """The third run of Llama's four workers: 1,023 chats and 511 stories were before it, so that
    its 1,301 long prompts come out shorter than where each has a server of its own."""
    row = next(row for row in SAID if "llama_summarization_05_validation_4TP" in row["source"])
    fresh = {**row, "dp": "2", "rate_req_s": "1.0", "notes": "replica",
             "prompt_tokens_total": str(int(row["prompt_tokens_total"]) // 2)}  # fmt: skip
    after, alone = forecasts(read_serving(_text([row, fresh]), "t"))
    assert after.asked.bench is not None and len(after.asked.bench.before) == 2
    assert alone.asked.bench is not None and not alone.asked.bench.before
    assert after.ttft < 0.7 * alone.ttft


def test_a_model_that_the_table_leaves_open() -> None:
    row = next(row for row in ROWS if row["model"].startswith("mistral-family"))
    (read,) = read_serving(_text([row]), "t")
    assert read.served is not None and read.served.precision == "fp8" and not read.missing


def test_blank_measured_columns_give_the_same_forecasts(tmp_path: Path) -> None:
    rows = [dict(row) for row in SAID[::17]]
    full = CliRunner().invoke(main, ["score", table(tmp_path / "a.csv", rows), "--json"])
    for row in rows:
        row.update(dict.fromkeys(("ttft_mean_s", "tpot_or_itl_mean_s", "e2e_mean_s"), ""))
    blank = CliRunner().invoke(main, ["score", table(tmp_path / "b.csv", rows), "--json"])
    one, other = json.loads(full.output), json.loads(blank.output)
    assert one["forecasts"] == other["forecasts"] and len(one["forecasts"]) == len(rows)
    assert one["tpot_mape"] is not None and other["tpot_mape"] is None
    names = {"mape", "rank", "regret", "oom_precision", "oom_recall", "memory_mape", "rows"}
    assert names <= set(one) and names <= set(one["sources"]["microsoft/apex_plus"])
    assert blank.exit_code == 0 and full.exit_code == (1 if one["missed"] else 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rate_req_s": "often"}, "line 2: rate_req_s is 'often'; expected a number"),
        ({"tp": "-2"}, "line 2: tp is '-2'; expected a number"),
    ],
)
def test_bad_tables_name_line_and_column(tmp_path: Path, change: Any, said: str) -> None:
    path = table(tmp_path / "a.csv", [{**SAID[0], **change}])
    result = CliRunner().invoke(main, ["score", path])
    assert result.exit_code == 2 and said in " ".join(result.output.split())
    assert len(result.output.splitlines()) == 1


def test_a_missing_column_and_nothing_to_correct(tmp_path: Path) -> None:
    columns = [name for name in COLUMNS if name != "rate_req_s"]
    result = CliRunner().invoke(main, ["score", table(tmp_path / "a.csv", SAID[:1], columns)])
    assert result.exit_code == 2 and "line 1: column 'rate_req_s' is missing" in result.output
    path = table(tmp_path / "b.csv", SAID[:1])
    result = CliRunner().invoke(main, ["score", path, "--given", "3"])
    assert result.exit_code == 2 and "serving have no constant to correct" in result.output


def test_forecasts_are_printed_by_row(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["score", table(tmp_path / "a.csv", SAID[:2]), "--forecasts"])
    assert "tensor=4 x 2" in result.output and "microsoft/apex_plus" in result.output


def _text(rows: list[dict[str, str]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
