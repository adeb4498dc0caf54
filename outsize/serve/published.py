"""Tables of published serving, each row played by the real policies and books of pages.

Columns are those of outsize/foresight/data/published_serving.csv. A row says its model, engine,
workers, load and what was measured; requests come by chance at its rate, alike in their tokens. No
measured figure feeds a forecast.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from outsize.errors import OutsizeError
from outsize.foresight.named import published
from outsize.foresight.runs import cells, cluster_of, data, device_named
from outsize.foresight.score import rank_correlation
from outsize.foresight.shape import Shape, read_shape
from outsize.memory.sizes import format_bytes
from outsize.serve.asks import Room
from outsize.serve.benched import Bench, Load, Sums, bench, model_of
from outsize.serve.described import Served
from outsize.serve.played import play
from outsize.serve.policies import POLICIES
from outsize.texts import read_text

SHIPPED = "published_serving.csv"
COLUMNS = (
    "source", "engine", "model", "precision", "gpu_type", "gpus", "tp", "ep", "dp", "workload",
    "rate_req_s", "prompt_tokens_total", "output_tokens_total", "ttft_mean_s",
    "tpot_or_itl_mean_s", "e2e_mean_s", "max_batched_tokens", "notes",
)  # fmt: skip
MEASURED = {"ttft": "ttft_mean_s", "tpot": "tpot_or_itl_mean_s", "e2e": "e2e_mean_s"}
COUNTS = ("gpus", "tp", "ep", "dp", "prompt_tokens_total", "output_tokens_total",
          "max_batched_tokens")  # fmt: skip
REQUESTS = 60  # that are played
KEPT = 0.9  # of a device's memory, for weights and pages (vLLM's default)
PAGE, SLOTS, BUDGET = 16, 256, 4096
# Tokens of the longest request up to which vLLM until 0.8 feeds prompts whole by default (its
# EngineArgs: beyond them profiling whole prompts would run out of memory).
LONG = 32768
FRONT = 10e-3  # seconds before a request is in line
# Seconds of the processor in a step, and for each request of it: of vLLM until 0.8 (its notes of
# 0.6: they take as long as an 8B model computes, 5 to 8 ms), and of its second core.
HOST, LATER = (3e-3, 0.5e-3), (2e-3, 0.05e-3)
SWEEP = 5  # rows that make a rank
# What is aimed at: mean errors, and the rank within sweeps.
BARS = {"e2e_mape": 0.10, "ttft_mape": 0.12, "tpot_mape": 0.15}
RANK = 0.9
# What a model's name says, beside the names of models.yaml.
NAMES = {"llama-3.1-70b": "llama3-70b", "llama-3.1-8b": "llama3-8b", "llama-2-70b": "llama2-70b",
         "llama-2-7b": "llama2-7b", "mixtral-8x7b": "mixtral-8x7b",
         "mistral-large": "mistral-large-123b"}  # fmt: skip
# Tokens of the longest request, of models that are made for more than LONG (config.json).
CONTEXTS = {"llama-3.1": 131072, "mistral-large": 131072}
DTYPES = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}


@dataclass(frozen=True)
class Asked:
    """A row. missing: why it cannot be forecast, else "". measured: seconds, by name."""

    line: int
    source: str
    model: str
    measured: Mapping[str, float]
    missing: str = ""
    served: Served | None = None
    bench: Bench | None = None
    budget: int = BUDGET
    policy: str = "prompt-first"
    layout: tuple[int, int] = (1, 1)
    workload: str = ""


@dataclass(frozen=True)
class Forecast:
    """Mean seconds: to the first token, from token to token, and of a request."""

    asked: Asked
    ttft: float
    tpot: float
    e2e: float

    def error(self, name: str) -> float | None:
        measured = self.asked.measured.get(name)
        return None if measured is None else float(getattr(self, name)) / measured - 1


@dataclass(frozen=True)
class Score:
    """Of rows: mean errors by figure, and the rank within sweeps of a model and workload."""

    rows: int
    e2e_mape: float | None
    ttft_mape: float | None
    tpot_mape: float | None
    rank: float | None


def is_serving(text: str) -> bool:
    """Whether a table is one of serving, by its first line."""
    return "ttft_mean_s" in text.partition("\n")[0]


def read_serving(text: str, name: str) -> list[Asked]:
    """The rows. OutsizeError with line and column for a missing column and for no number."""
    return [_asked(row, line, name) for line, row in cells(text, COLUMNS, name)]


def read_file(path: Path) -> list[Asked]:
    return read_serving(read_text(path, "name a table of published serving"), str(path))


def _asked(row: Mapping[str, str], line: int, name: str) -> Asked:
    numbers = {column: _number(row, column, line, name) for column in (*COUNTS, "rate_req_s")}
    measured = {key: value for key, column in MEASURED.items()
                if (value := _number(row, column, line, name)) is not None}  # fmt: skip
    source = re.split(r"\s", row["source"].strip())[0]
    asked = Asked(line, "/".join(source.split("/")[:2]), row["model"], measured)
    if "mis-scaled" in row["notes"]:
        return replace(asked, missing="its notes say that its figures are mis-scaled")
    model, precision = model_of(asked.source, row["model"]) or (row["model"], row["precision"])
    device, shape = device_named(row["gpu_type"]), _shape(model)
    dtype = DTYPES.get(precision.strip().lower(), "")
    for known, why in (
        (numbers["rate_req_s"], "the rate of requests is not said"),
        (numbers["prompt_tokens_total"] and numbers["output_tokens_total"],
         "tokens of requests are not said"),
        (device, f"device {row['gpu_type']!r} is not in the catalogue"),
        (shape, f"the shape of {row['model']!r} is not known"),
        (dtype, f"precision {row['precision']!r} is not known"),
        (shape is None or not shape.parts.recurring, "reading recurrent states is not priced"),
    ):  # fmt: skip
        if not known:
            return replace(asked, missing=why)
    assert shape is not None
    tensor, copies = int(numbers["tp"] or 1), int(numbers["dp"] or 1)
    if shape.heads % tensor:
        return replace(asked, missing=f"{shape.heads} heads over {tensor} workers")
    new = re.search(r"vLLM (\d+)\.(\d+)", row["engine"])
    served = Served(shape, cluster_of(device, tensor, 0, 0.0).groups[0], tensor, dtype,
                    *(LATER if _later(new) else HOST))  # fmt: skip
    policy, budget = _feeding(new, served, model)
    return replace(
        asked,
        served=served,
        bench=bench(
            asked.source, row["model"], row["workload"], (tensor, copies),
            Sums(numbers["prompt_tokens_total"] or 0, numbers["output_tokens_total"] or 0,
                 "replica" in row["notes"]),
            numbers["rate_req_s"] or 0.0,
        ),
        budget=int(numbers["max_batched_tokens"] or budget),
        policy=policy,
        layout=(tensor, copies),
        workload=row["workload"],
    )  # fmt: skip


def _feeding(version: re.Match[str] | None, served: Served, model: str) -> tuple[str, int]:
    """The policy and the tokens of a step, by default. vLLM cuts prompts to 2,048 tokens a step;
    until 0.8 to 512, and only where requests may be longer than LONG. It does not start where its
    pages hold less than the longest request that the model is made for: who runs it then has said a
    shorter one, taken to be no longer than LONG."""
    if version is None:
        return "prompt-first", BUDGET
    if _later(version):
        return "mixed", 2048
    made = next((most for name, most in CONTEXTS.items() if name in model.lower()), LONG)
    held = _pages(served, _kept(served)) * PAGE
    if LONG < made <= held:
        return "mixed", 512
    return "prompt-first", max(2048, min(LONG, held))


def _later(version: re.Match[str] | None) -> bool:
    return bool(version and (int(version[1]), int(version[2])) >= (0, 8))


def _number(row: Mapping[str, str], column: str, line: int, name: str) -> float | None:
    text = (row[column] or "").strip()
    try:
        value = float(text) if text else None
    except ValueError:
        value = math.nan
    if value is not None and not 0 <= value < math.inf:
        raise OutsizeError(f"{name}: line {line}: {column} is {text!r}; expected a number")
    return value


def _shape(model: str) -> Shape | None:
    for name, known in NAMES.items():
        if name in model.lower():
            return read_shape(published()[known]["shape"], model)
    return None


# -- playing ---------------------------------------------------------------------------------------


def forecasts(rows: Sequence[Asked]) -> list[Forecast]:
    """Of rows that can be forecast."""
    return [_forecast(row) for row in rows if not row.missing]


def _forecast(asked: Asked) -> Forecast:
    """Means as the source has them: of all that its server had until then."""
    assert asked.served is not None and asked.bench is not None
    bench = asked.bench
    loads = (*bench.before, bench.load)
    first, apart, requests, gaps, tokens = 0.0, 0.0, 0.0, 0.0, 0.0
    for load in loads:
        ttft, tpot = _means(asked.served, asked.policy, asked.budget, load)
        first, requests = first + ttft * load.requests, requests + load.requests
        gaps += tpot * load.requests * (load.output - 1)
        tokens += load.requests * (load.output - (0 if bench.known else 1))
        apart = ttft + tpot * (load.output - 1)
    return Forecast(asked, first / requests, gaps / tokens if tokens else 0.0, apart)


@cache
def _means(served: Served, policy: str, budget: int, load: Load) -> tuple[float, float]:
    """Seconds to the first token, and from token to token."""
    room = room_of(served, budget)
    fates = play(room, POLICIES.get(policy), load.arrivals(REQUESTS), sharing=False).fates
    return _mean([fate.ttft for fate in fates]) + FRONT, _mean([fate.tpot for fate in fates])


def room_of(served: Served, budget: int, memory: float | None = None) -> Room:
    """Pages in what the weights leave of the memory that is kept for both, or of so many bytes."""
    memory = _kept(served) if memory is None else memory
    pages = _pages(served, memory)
    if pages < 1:
        raise OutsizeError(
            f"weights of {format_bytes(int(served.weights))} leave no room for a cache in"
            f" {format_bytes(int(memory))}"
        )
    return Room(pages, PAGE, SLOTS, budget, 1 << 40, pages * PAGE, served.price())


def _kept(served: Served) -> float:
    """Bytes of a device for weights and pages."""
    return KEPT * served.machines.device.memory_bytes


def _pages(served: Served, memory: float) -> int:
    """Less than one where the weights leave no room."""
    return int((memory - served.weights) / (served.cached * PAGE))


def score(rows: Sequence[Forecast]) -> Score:
    """Of rows."""

    def off(name: str) -> float | None:
        errors = [abs(e) for row in rows if (e := row.error(name)) is not None]
        return _mean(errors) if errors else None

    sweeps: dict[tuple[str, str, str], list[Forecast]] = {}
    for row in rows:
        if {"ttft", "tpot"} <= set(row.asked.measured):
            key = (row.asked.source, row.asked.model, row.asked.workload)
            sweeps.setdefault(key, []).append(row)
    ranks = [
        rank_correlation([row.e2e for row in mine], [_whole(row) for row in mine])
        for mine in sweeps.values()
        if len(mine) >= SWEEP
    ]
    return Score(len(rows), off("e2e"), off("ttft"), off("tpot"), _mean(ranks) if ranks else None)


def missed(made: Score) -> list[str]:
    """Bars that the figures of a table do not reach, of those that it has."""
    found = [
        f"{name.partition('_')[0]}: {value:.3f}, expected under {bar:g}"
        for name, bar in BARS.items()
        if (value := getattr(made, name)) is not None and value >= bar
    ]
    if made.rank is not None and made.rank <= RANK:
        found.append(f"rank within sweeps: {made.rank:.3f}, expected over {RANK:g}")
    return found


def by_source(rows: Sequence[Forecast]) -> dict[str, Score]:
    """Of each source, in the order of the table."""
    names = dict.fromkeys(row.asked.source for row in rows)
    return {name: score([row for row in rows if row.asked.source == name]) for name in names}


def shipped() -> list[Asked]:
    """The table of the package."""
    return read_serving(data(SHIPPED), SHIPPED)


def _whole(row: Forecast) -> float:
    """Seconds of a request as measured."""
    made, bench = row.asked.measured, row.asked.bench
    assert bench is not None
    return made.get("e2e", made["ttft"] + made["tpot"] * (bench.load.output - 1))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
