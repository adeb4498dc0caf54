"""What a run is, as data: every key that a run's file or `--set` can say, typed, with its meaning.

A key that is None was left open: outsize/train/derive.py fills it from the model, the data and the
machine, and says from what.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from outsize.errors import OutsizeError, nearest
from outsize.optim import OPTIMIZERS
from outsize.registry import TECHNIQUES, settings_of

T = TypeVar("T")


def _key(default: T, meaning: str) -> T:
    """A field with its meaning."""
    return dataclasses.field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class ModelKeys:
    name: str = _key("mini", "a preset, or a Hugging Face directory")
    weights: Literal["stored", "random"] | None = _key(
        None, "a directory's weights: those stored in it, or random ones drawn from train.seed"
    )
    vocabulary: int | None = _key(None, "ids that a preset has")


@dataclass(frozen=True)
class DataKeys:
    path: str | tuple[str, ...] = _key("stdlib", "files and directories, or stdlib")
    kind: Literal["auto", "text", "jsonl", "parquet"] = _key("auto", "auto goes by the suffix")
    field: str = _key("text", "the JSON field or Parquet column that holds the text")
    tokenizer: str | None = _key(None, "a directory with a tokenizer.json, or bytes")
    validation: float = _key(0.03, "part of the documents that is held out")
    cache: str | None = _key(None, "where tokenised data is kept")


@dataclass(frozen=True)
class TrainKeys:
    steps: int | None = _key(None, "optimizer steps")
    tokens: int | None = _key(None, "tokens to train on, instead of steps")
    minutes: float | None = _key(None, "predicted minutes of training, instead of steps")
    batch_tokens: int | None = _key(None, "tokens of a step")
    sequence: int | None = _key(None, "tokens of a row; documents are packed into rows")
    seed: int = _key(0, "of initial values, data order and the sample")
    dropout: float = _key(0.0, "part of what branches and the embedding give that becomes zero")
    label_smoothing: float = _key(0.0, "part of each target that all tokens share")
    z_loss: float = _key(0.0, "times the squared log of each token's softmax sum, in the loss")
    clip: float | None = _key(1.0, "largest norm of the whole gradient; null: any")
    evaluate_every: int | None = _key(None, "steps between validations; 0: only at the end")
    evaluate_tokens: int | None = _key(None, "validation tokens that are looked at each time")
    save_every: int | None = _key(None, "steps between checkpoints; 0: only at the end")
    keep: int | None = _key(2, "checkpoints kept; null: all")


@dataclass(frozen=True)
class OptimizerKeys:
    name: str = _key("adamw", "adamw, muon, sgd, or a technique's name")
    lr: float | None = _key(None, "learning rate at its highest")
    betas: tuple[float, float] = _key(
        (0.9, 0.95), "decay of the moments, of adamw and what is like it"
    )
    weight_decay: float = _key(0.1, "decoupled, of matrices only")


@dataclass(frozen=True)
class LearningRateKeys:
    shape: Literal["constant", "linear", "cosine", "wsd"] = _key("linear", "after the warm-up")
    warmup: int | None = _key(None, "steps in which the learning rate rises")
    final: float = _key(0.05, "the learning rate's last factor")
    decay: float = _key(0.2, "wsd: part of the steps in which it falls")


@dataclass(frozen=True)
class PlanKeys:
    microbatch_rows: int | None = _key(None, "rows that run at a time")
    recompute: tuple[str, ...] | None = _key(
        None, "[], [block], or parts of blocks to compute again instead of keeping"
    )
    loss_chunk: int | None = _key(None, "tokens whose logits exist at once; 0: all")
    mlp_tile: int | None = _key(None, "tokens whose feed-forward activations exist at once; 0: all")
    sequence_chunk: int | None = _key(
        None, "tokens in a block at once where blocks are recomputed whole; 0: all"
    )
    split_backward: bool = _key(False, "weight gradients apart from input gradients")
    zero: int | tuple[int, ...] | None = _key(
        None,
        "0 to 3: what the data axis cuts: optimizer, gradients, weights; or three numbers: the"
        " workers over which weights, gradients, optimizer states are cut",
    )
    pipeline: str | None = _key(
        None,
        "order of the pipeline axis, as 1f1b or interleaved:2 (chunks of a worker); with"
        " +vocabulary:1 or +vocabulary:2 behind it every worker has rows of embedding and head",
    )
    gathered: int | None = _key(
        None, "stages whose weights are gathered at once, where workers cut them; 2 by default"
    )
    sequence_parallel: bool = _key(
        False, "tokens between branches of blocks are cut over the tensor axis"
    )
    overlap: int = _key(
        0, "chunks of tokens whose sums over the tensor axis run beside the next one's product"
    )
    approximate: tuple[str, ...] = _key(
        (),
        "what may change the maths: bfloat16-weights, zeroth-order, frozen-by-dynamics,"
        " local-learning, partial-pipeline",
    )


@dataclass(frozen=True)
class SampleKeys:
    prompt: str = _key("import ", "what the sample at the end begins with")
    tokens: int = _key(240, "tokens of the sample; 0: none")
    temperature: float = _key(0.7, "0: the most probable token each time")


@dataclass(frozen=True)
class RunConfig:
    """A whole run. `memory` and `output` are as people write them. techniques: by key, the settings
    of those that the run switches on (outsize/registry.py)."""

    model: ModelKeys = dataclasses.field(default_factory=ModelKeys)
    data: DataKeys = dataclasses.field(default_factory=DataKeys)
    train: TrainKeys = dataclasses.field(default_factory=TrainKeys)
    optimizer: OptimizerKeys = dataclasses.field(default_factory=OptimizerKeys)
    learning_rate: LearningRateKeys = dataclasses.field(default_factory=LearningRateKeys)
    plan: PlanKeys = dataclasses.field(default_factory=PlanKeys)
    sample: SampleKeys = dataclasses.field(default_factory=SampleKeys)
    precision: Literal["float64", "float32", "bfloat16"] | None = _key(
        None, "of the computation; bfloat16 has a float32 master copy"
    )
    memory: str | int | None = _key(None, "most bytes on the device, as 2GiB; more is refused")
    host_memory: str | int | None = _key(None, "RAM beside the device's, where states may rest")
    disk: str | None = _key(None, "folders where states may rest, as DIR[,DIR][:SIZE]")
    tiers: tuple[str, ...] = _key((), "memory with a path where states may rest: NAME=PATH:SIZE")
    device: Literal["auto", "cpu", "cuda"] = _key("auto", "where it runs")
    threads: int | None = _key(None, "of the processor, for each worker")
    workers: int | None = _key(None, "processes that train together")
    mesh: str | None = _key(None, "workers on each axis, as data=2,tensor=2")
    plan_file: str | None = _key(None, "a plan of outsize plan --out, which the run then has")
    output: str | None = _key(None, "directory of the run: metrics, checkpoints, timeline")
    techniques: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def technique(self, key: str) -> Any:
        """The settings of a technique, None where the run does not switch it on."""
        return self.techniques.get(key)


# What `model: tiny` and `data: text` stand for.
SHORT: Mapping[str, str] = MappingProxyType({"model": "model.name", "data": "data.path"})

# Keys that have another name now.
MOVED: Mapping[str, str] = MappingProxyType(
    {
        "plan.epsilon": "zeroth-order.epsilon",
        "plan.frozen": "frozen-by-dynamics.share",
        "plan.frozen_keep": "frozen-by-dynamics.keep",
        "plan.local_groups": "local-learning.groups",
    }
)

# What those keys were where nobody said anything: files of older runs name every key.
UNSAID: Mapping[str, Any] = MappingProxyType(
    {"plan.epsilon": 1e-3, "plan.frozen": 0.5, "plan.frozen_keep": "whole", "plan.local_groups": 2}
)

# Keys of older runs that mean the same under another name.
RENAMED: Mapping[str, str] = MappingProxyType(
    {f"schedule.{name}": f"learning_rate.{name}" for name in ("shape", "warmup", "final", "decay")}
)

# What a resumed run may change: nothing here has a say in any number that the run computes,
# other than how long it goes on. Memory and tiers change where states rest; what of a plan decides
# in which order sums are taken stays as it was (outsize/train/setup.py, FIXED).
MAY_CHANGE = frozenset(
    {
        "data.cache",
        "device",
        "disk",
        "host_memory",
        "memory",
        "mesh",
        "output",
        "plan.overlap",
        "plan.gathered",
        "plan.pipeline",
        "plan.sequence_parallel",
        "plan.zero",
        "sample.prompt",
        "sample.temperature",
        "sample.tokens",
        "threads",
        "tiers",
        "train.evaluate_every",
        "train.evaluate_tokens",
        "train.keep",
        "train.save_every",
        "train.steps",
        "workers",
    }
)


@dataclass(frozen=True)
class Leaf:
    """A key: its type, default and meaning."""

    kind: Any
    default: Any
    meaning: str


@functools.cache
def leaves() -> Mapping[str, Leaf]:
    """Every key that any run has, by its full name, in order."""
    found: dict[str, Leaf] = {}
    hints = typing.get_type_hints(RunConfig)
    for outer in dataclasses.fields(RunConfig):
        if outer.name == "techniques":
            continue
        kind = hints[outer.name]
        if not dataclasses.is_dataclass(kind):
            found[outer.name] = Leaf(kind, outer.default, outer.metadata["meaning"])
            continue
        inner_hints = typing.get_type_hints(kind)
        for inner in dataclasses.fields(kind):
            name = f"{outer.name}.{inner.name}"
            found[name] = Leaf(inner_hints[inner.name], inner.default, inner.metadata["meaning"])
    return found


@functools.cache
def technique_leaves() -> Mapping[str, Leaf]:
    """Every key of a technique: its own, which switches it on, and those of its settings."""
    found: dict[str, Leaf] = {}
    for key, one in TECHNIQUES.items():
        found[key] = Leaf(bool, False, one.meaning)
        for each in settings_of(one):
            found[f"{key}.{each.name}"] = Leaf(each.kind, each.default, each.meaning)
    return found


def leaf(name: str) -> Leaf | None:
    """The key of a full name, None where there is none."""
    return leaves().get(name) or technique_leaves().get(name)


def _techniques(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of every technique of which something is said, and which is not switched off."""
    found: dict[str, Any] = {}
    for key, one in TECHNIQUES.items():
        mine = {f.name: f"{key}.{f.name}" for f in settings_of(one)}
        said = {name: values[full] for name, full in mine.items() if full in values}
        if values.get(key, bool(said)):
            found[key] = one.settings(**said)
    return found


def config_of(values: Mapping[str, Any]) -> RunConfig:
    """The RunConfig of values by full name; what is not named has its default."""
    hints = typing.get_type_hints(RunConfig)
    sections: dict[str, dict[str, Any]] = {}
    plain: dict[str, Any] = {}
    for name, value in values.items():
        if name not in leaves():
            continue
        section, dot, key = name.partition(".")
        if dot:
            sections.setdefault(section, {})[key] = value
        else:
            plain[name] = value
    made = {section: hints[section](**inner) for section, inner in sections.items()}
    return RunConfig(**made, **plain, techniques=_techniques(values))


@dataclass(frozen=True)
class Range:
    """Numbers a key may have."""

    least: float
    most: float = float("inf")

    def __str__(self) -> str:
        lower = "" if self.least == -float("inf") else f"{self.least:g}"
        upper = "" if self.most == float("inf") else f"{self.most:g}"
        if lower and upper:
            return f"{lower} to {upper}"
        return f"from {lower}" if lower else f"to {upper}"


RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "data.validation": Range(0, 0.5),
        "model.vocabulary": Range(1),
        "train.steps": Range(1, 10**12),
        "train.tokens": Range(1, 10**18),
        "train.minutes": Range(0, 10**7),
        "train.batch_tokens": Range(1, 10**12),
        "train.sequence": Range(1, 10**9),
        "train.seed": Range(0),
        "train.clip": Range(0),
        "train.dropout": Range(0, 0.99),
        "train.evaluate_every": Range(0),
        "train.evaluate_tokens": Range(1),
        "train.save_every": Range(0),
        "train.keep": Range(1),
        "optimizer.lr": Range(0),
        "optimizer.weight_decay": Range(0),
        "learning_rate.warmup": Range(0),
        "learning_rate.final": Range(0, 1),
        "learning_rate.decay": Range(0, 1),
        "plan.microbatch_rows": Range(1),
        "plan.loss_chunk": Range(0),
        "plan.mlp_tile": Range(0),
        "plan.sequence_chunk": Range(0),
        "sample.tokens": Range(0),
        "sample.temperature": Range(0),
        "threads": Range(1),
        "workers": Range(1),
        "plan.zero": Range(0, 3),
        "plan.gathered": Range(1),
        "train.label_smoothing": Range(0, 0.99),
        "train.z_loss": Range(0),
    }
)


def _technique_range(name: str) -> Range | None:
    key, _, field = name.rpartition(".")
    one = TECHNIQUES.find(key) if key and name not in leaves() else None
    for each in settings_of(one) if one else ():
        if each.name == field and (each.least, each.most) != (-float("inf"), float("inf")):
            return Range(each.least, each.most)
    return None


def range_of(name: str) -> Range | None:
    """The numbers that a key may have, None where it may have any, or is no number."""
    return RANGES.get(name) or _technique_range(name)


def check(name: str, value: Any, source: str) -> None:
    """Refuse a number out of its key's range, a name that its registry does not have. Lists are
    checked where they are used."""
    if name == "optimizer.name" and OPTIMIZERS.find(value) is None:
        raise OutsizeError(f"{source}: {name}: {value!r}{nearest(value, OPTIMIZERS.names())}")
    allowed = range_of(name)
    if allowed is None or value is None or isinstance(value, tuple):
        return
    if allowed.least <= value <= allowed.most:
        return
    upper = "" if allowed.most == float("inf") else f" and at most {allowed.most:g}"
    text = f"{value:g}" if isinstance(value, int) and abs(value) > 10**15 else str(value)
    raise OutsizeError(f"{source}: {name}: {text}; expected at least {allowed.least:g}{upper}")
