"""Tables of published runs, read row by row into what a forecast asks and what was measured.

Columns are those of outsize/foresight/data/published_training.csv. What a row leaves unsaid comes
from data/sources.yaml and data/models.yaml, and is named among what the layout assumes.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from outsize.errors import OutsizeError, nearest
from outsize.foresight.layout import Layout, Stack
from outsize.foresight.shape import Shape, read_shape
from outsize.hardware.cluster import Cluster
from outsize.hardware.devices import ROWS
from outsize.hardware.spec import parse_spec
from outsize.texts import read_text

COLUMNS = (
    "source", "model", "params_b", "layers", "hidden", "heads", "seq", "vocab", "gpus", "gpu_type",
    "tp", "pp", "cp", "dp", "ep", "micro_batch", "global_batch", "interleave", "recompute",
    "measured_metric", "measured_value", "precision", "sharding", "notes",
)  # fmt: skip
TIMES = {  # metrics of time, and whether more is better
    "step_time_s": False, "tokens_per_s_per_gpu": True, "tokens_per_s": True, "mfu_pct": True,
    "hfu_pct": True, "hfu_or_mfu_pct": True, "tflops_per_gpu": True, "hfu_tflops_per_gpu": True,
    "train_days_300B_tokens": False, "gpu_hours_total": False,
}  # fmt: skip
MEMORY = {
    "peak_mem_gb": 1e9, "peak_alloc_gib": 2.0**30, "peak_mem_gib": 2.0**30,
    "act_mem_gib_per_gpu": 2.0**30, "params_opt_mem_gib_per_gpu": 2.0**30,
}  # fmt: skip
METRICS = (*TIMES, *MEMORY, "oom")
INTEGERS = ("layers", "hidden", "heads", "seq", "vocab", "gpus", "tp", "pp", "cp", "dp", "ep",
            "micro_batch", "global_batch", "interleave")  # fmt: skip
SHIPPED = "published_training.csv"


@dataclass(frozen=True)
class Source:
    """A publication: its stack and what its figures count."""

    name: str
    stack: Stack
    operations: str
    node: int = 0
    network: float = 0.0
    memory: str = "reserved"
    chunks: str = "one"
    recompute: str = ""
    selective: str = "attention"
    batch: int = 0
    frozen: str = ""  # in the source of rows whose weights stay as they are
    variants: Mapping[str, str] = field(default_factory=dict)  # stacks by a row's words
    counts: Mapping[str, str] = field(default_factory=dict)  # other counts of operations, likewise
    recomputes: Mapping[str, str] = field(default_factory=dict)  # what recipes compute again
    wides: Mapping[str, int] = field(default_factory=dict)  # layers that stay in 16 bits


@dataclass(frozen=True)
class Run:
    """A row. missing: why it cannot be forecast, else "". value: None where nothing is measured."""

    line: int
    source: Source
    model: str
    device: str
    metric: str
    value: float | None
    missing: str = ""
    shape: Shape | None = None
    layout: Layout | None = None
    cluster: Cluster | None = None
    table: str = ""  # the source in the words of the table
    limited: bool = False  # whether its devices were held to less power than their sheets have

    @property
    def sweep(self) -> tuple[Any, ...]:
        """What runs share that are compared with each other."""
        assert self.layout is not None
        lay = self.layout
        narrow = lay.precision if lay.narrow else "16"
        return (self.source.name, self.model, self.device, lay.devices, lay.sequence, narrow)


def read_runs(text: str, name: str) -> list[Run]:
    """The rows of a table. Raises OutsizeError with line and column for a missing column, a metric
    or a unit that is unknown, and for what is no number."""
    return [_run(row, line, name) for line, row in cells(text, COLUMNS, name)]


def cells(text: str, columns: Sequence[str], name: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows with their lines. Raises OutsizeError for a column that the table lacks, and for a row
    with fewer cells than the table has columns, or more."""
    rows = csv.DictReader(io.StringIO(text), restkey="")
    found = tuple(rows.fieldnames or ())
    for column in columns:
        if column not in found:
            raise OutsizeError(
                f"{name}: line 1: column {column!r} is missing{nearest(column, found)}"
            )
    for line, row in enumerate(rows, 2):
        if "" in row and "" not in found:
            raise OutsizeError(f"{name}: line {line}: more cells than the {len(found)} columns")
        empty = next((column for column in found if row[column] is None), None)
        if empty is not None:
            raise OutsizeError(
                f"{name}: line {line}: column {empty!r} is missing, as all behind it"
            )
        yield line, row


def read_table(path: str | Path) -> list[Run]:
    """The rows of a file."""
    return read_runs(read_text(path, "name a table of published runs"), str(path))


@cache
def shipped() -> tuple[Run, ...]:
    """The table of the package."""
    return tuple(read_runs(data(SHIPPED), SHIPPED))


def data(name: str) -> str:
    """A file of this package's data."""
    return (files("outsize.foresight") / "data" / name).read_text()


# -- a row -----------------------------------------------------------------------------------------


def _run(row: Mapping[str, str], line: int, name: str) -> Run:
    numbers = {column: _integer(row, column, line, name) for column in INTEGERS}
    metric = (row["measured_metric"] or "").strip()
    if metric and metric not in METRICS:
        raise OutsizeError(
            f"{name}: line {line}: measured_metric {metric!r} is unknown{nearest(metric, METRICS)}"
        )
    value = _number(row, "measured_value", line, name)
    source, device = source_named(row["source"]), device_named(row["gpu_type"])
    counted = _variant(source.counts, row)
    source = replace(source, operations=counted or source.operations)
    run = Run(line, source, row["model"], device or row["gpu_type"], metric, value)
    run = replace(run, table=row["source"].strip(), limited="limited" in row["gpu_type"])
    if not device:
        return replace(run, missing=f"device {row['gpu_type']!r} is not in the catalogue")
    billions = _number(row, "params_b", line, name)
    numbers["params"] = None if billions is None else int(billions * 1e9)
    shape = shape_named(row["model"], numbers)
    if shape is None:
        return replace(run, missing=f"the shape of {row['model']!r} is not known")
    if not numbers["gpus"] or not numbers["seq"]:
        return replace(run, missing="devices or sequence length not given")
    if row["precision"].strip() and not _precision(row):
        return replace(run, missing=f"precision {row['precision']!r} is not known")
    if numbers["tp"] is None:
        return replace(run, missing="the mesh is not given")
    if numbers["global_batch"] is None and not source.batch:
        return replace(run, missing="rows of a step not given")
    try:
        layout = _layout(row, numbers, source)
        cluster = cluster_of(device, layout.devices, source.node, source.network)
    except OutsizeError as error:
        return replace(run, missing=str(error))
    return replace(run, shape=shape, layout=layout, cluster=cluster)


def _integer(row: Mapping[str, str], column: str, line: int, name: str) -> int | None:
    value = _number(row, column, line, name)
    if value is not None and (value != int(value) or value < 0):
        raise OutsizeError(f"{name}: line {line}: {column} is {row[column]!r}; expected a count")
    return None if value is None else int(value)


def _number(row: Mapping[str, str], column: str, line: int, name: str) -> float | None:
    text = (row[column] or "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise OutsizeError(f"{name}: line {line}: {column} is {text!r}; expected a number")
    return value


def _layout(row: Mapping[str, str], numbers: Mapping[str, int | None], source: Source) -> Layout:
    """The row's mesh, with what it leaves unsaid."""
    assumed = [] if numbers["layers"] else ["shape"]
    gpus, sequence = numbers["gpus"] or 1, numbers["seq"] or 1
    t, p, c = (numbers[name] or 1 for name in ("tp", "pp", "cp"))
    data_axis = max(1, gpus // (t * p * c))
    batch = numbers["global_batch"] or source.batch
    if numbers["micro_batch"] is None:
        assumed.append("microbatch")
    rows = numbers["micro_batch"] or _said_rows(row["notes"], p) or 1
    rows = max(1, min(rows, batch // data_axis or 1))
    chunks = numbers["interleave"] or _said_chunks(row["notes"])
    if not chunks:
        chunks = 1 if source.chunks == "one" or p == 1 else max(1, (numbers["layers"] or 1) // p)
        if p > 1:
            assumed.append("chunks")
    if not row["recompute"].strip() and not source.recompute:
        assumed.append("recompute")
    precision = _precision(row) or "bf16"
    cut = row["sharding"].strip() or ("dist-opt" if source.stack.sharded else "")
    shards, states, gradients = _sharding(cut, data_axis * c)
    frozen = bool(source.frozen and re.search(source.frozen, row["source"]))
    other = _variant(source.variants, row)
    stack = _stack(other) if other else source.stack
    return Layout(
        gpus, rows, batch, sequence, stack, t, p, c, numbers["ep"] or 1, chunks,
        _recompute(row, source), precision, shards, gradients, states,
        _attention(row["notes"]) or source.stack.attention, _sequence(row, source, t),
        _vocabulary(row["notes"]), frozen, tuple(assumed), wide=_variant(source.wides, row) or 0,
    )  # fmt: skip


def _variant(named: Mapping[str, Any], row: Mapping[str, str]) -> Any:
    """What the first regular expression names that fits a row's words; "" where none does."""
    keys = ("source", "model", "gpu_type", "sharding", "precision", "notes")
    said = " ".join((f"{row['gpus']}x", *(row[key] for key in keys)))
    return next((name for match, name in named.items() if re.search(match, said)), "")


def _precision(row: Mapping[str, str]) -> str:
    return _first("precisions", row["precision"].lower(), "precision")


def _said_rows(notes: str, stages: int) -> int:
    """torchtitan cuts a worker's rows into as many microbatches as there are stages where nothing
    else is said (its option pipeline_parallel_microbatches)."""
    found = re.search(r"local batch (\d+)", notes)
    return max(1, int(found[1]) // stages) if found else 0


def _said_chunks(notes: str) -> int:
    """torchtitan's interleaved schedule has two chunks where nothing else is said."""
    return 2 if "Interleaved1F1B" in notes else 0


def _recompute(row: Mapping[str, str], source: Source) -> Any:
    said = row["recompute"].strip().lower()
    if said == "":
        return _variant(source.recomputes, row) or source.recompute or "none"
    if said.startswith("selective"):
        return source.selective
    if said in ("full", "none"):
        return said
    return "norms"


def _sharding(text: str, copies: int) -> tuple[int, int, bool]:
    """(shards of parameters, of optimizer states, whether parameters stay from forward to back)."""
    said = text.lower().replace("_", "-")
    number = re.search(r"(?:fsdp|zero1=)(\d+)$", said)
    some = min(int(number[1]), copies) if number else copies
    if said == "fsdp2":
        some = copies
    if said == "hsdp":
        return min(8, copies), min(8, copies), False
    if "grad-op" in said:
        return copies, copies, True
    if "zero-2" not in said and (
        said.startswith("fsdp") or "fsdp=true" in said or "zero-3" in said
    ):
        return some, some, False
    if any(word in said for word in ("zero-1", "zero-2", "zero1", "dist-opt")):
        return 1, some, False
    return 1, 1, False


def _attention(notes: str) -> str:
    found = re.search(r"kernel=([a-z_0-9.]+)", notes)
    if not found:
        return ""
    kernels = {"flash_attention2": "flash", "fused": "fused", "torch": "plain"}
    return kernels.get(found[1], "flash1" if found[1].startswith("flash") else "")


def _sequence(row: Mapping[str, str], source: Source, tensor: int) -> bool:
    """Whether norms are cut over the tensor axis."""
    said = re.search(r"seqpar=(\d)", row["notes"])
    if said:
        return said[1] == "1" and tensor > 1
    return tensor > 1 and (source.stack.sequence or "SP" in row["recompute"])


def _vocabulary(notes: str) -> Any:
    if notes.startswith(("Vocab-", "Interlaced")):
        return "cut" if notes.startswith("Vocab-") else "interlaced"
    return "moved" if notes.startswith("Redis") else "last"


# -- names -----------------------------------------------------------------------------------------


@cache
def _facts() -> Any:
    return yaml.safe_load(data("sources.yaml"))


@cache
def _models() -> Any:
    return yaml.safe_load(data("models.yaml"))


@lru_cache(maxsize=4096)
def _first(section: str, text: str, key: str) -> str:
    for entry in _facts()[section]:
        if re.search(entry["match"], text):
            return str(entry[key])
    return ""


def device_named(text: str) -> str:
    """A device of the catalogue by what a table calls it; "" for none."""
    return text if text in ROWS else _first("devices", text, "device")


@lru_cache(maxsize=4096)
def source_named(text: str) -> Source:
    """The publication of a table's source; one of its own where nobody knows it."""
    for entry in _facts()["sources"]:
        if re.search(entry["match"], text):
            said = {key: value for key, value in entry.items() if key not in ("match", "stack")}
            return Source(stack=_stack(entry["stack"]), **said)
    return Source(text, _stack("megatron-core"), "causal")


def _stack(name: str) -> Stack:
    return Stack(name, **_facts()["stacks"][name])


def shape_named(model: str, numbers: Mapping[str, int | None]) -> Shape | None:
    """A model's shape: what the row says before what is published of its name; None where that is
    not enough."""
    said = {key: numbers[key] for key in ("layers", "hidden", "heads", "vocab") if numbers[key]}
    for entry in _models():
        if re.search(entry["match"], model, re.IGNORECASE):
            known = {**entry["shape"], **said}
            break
    else:
        known = dict(said)
    if not {"layers", "hidden"} & set(known) and known.get("assume") and numbers["params"]:
        known |= _of_parameters(numbers["params"])
    known.pop("assume", None)
    if "heads" not in known and "hidden" in known:
        known["heads"] = max(1, known["hidden"] // 128)
    if not all(key in known for key in ("layers", "hidden", "heads", "vocab")):
        return None
    if known.get("positions") == "sequence":
        known["positions"] = numbers["seq"] or 0
    inner = known.get("inner", 0)
    if isinstance(inner, str):  # a part of the hidden size, rounded up to 256
        known["inner"] = math.ceil(Fraction(inner) * known["hidden"] / 256) * 256
    return read_shape(known, model)


def _of_parameters(count: int) -> dict[str, int]:
    """Layers and hidden size of a GPT of so many parameters, 128 of hidden size a layer, as those
    of Narayanan et al. (2021) have on the whole."""
    hidden = round((count * 128 / 12) ** (1 / 3) / 128) * 128 or 128
    layers = max(1, round(count / 12 / hidden**2))
    return {"layers": layers, "hidden": hidden, "vocab": 51200}


@lru_cache(maxsize=4096)
def cluster_of(device: str, count: int, node: int, network: float) -> Cluster:
    """So many devices on whole machines of what the publication says, else of the catalogue's."""
    domain = node or ROWS[device].domain or count
    if domain == 72:
        domain = 64  # jobs take 64 of a domain's 72 devices
    each = min(count, domain)
    nodes = -(-count // each)
    if nodes == 1:
        return parse_spec(f"{each} x {device}")
    rate = f" @ {network}GB/s" if network else ""
    return parse_spec(f"{nodes} x {each} {device}{rate}")
