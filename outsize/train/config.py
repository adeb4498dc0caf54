"""What a run is, as data: every key that a run's file or `--set` can say, typed, with its meaning.

A key that is None was left open: outsize/train/derive.py fills it from the model, the data and the
machine, and says from what.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from outsize.errors import OutsizeError, nearest
from outsize.optim import OPTIMIZERS
from outsize.plan.settings import NONE, PLAN_SETTINGS, Extended, Settings, extended
from outsize.registry import TECHNIQUES, Setting, setting, settings_of


@dataclass(frozen=True)
class ModelKeys:
    name: str = setting("mini", "a preset, or a Hugging Face directory")
    weights: Literal["stored", "random"] | None = setting(
        None, "a directory's weights: those stored in it, or random ones drawn from train.seed"
    )
    vocabulary: int | None = setting(None, "ids that a preset has", least=1)


@dataclass(frozen=True)
class DataKeys:
    path: str | tuple[str, ...] | Mapping[str, float] = setting(
        "stdlib", "files, directories, patterns, or stdlib; {a: 3, b: 1}: shares of the rows"
    )
    kind: Literal["auto", "text", "jsonl", "json", "csv", "parquet"] = setting(
        "auto", "auto goes by the suffix"
    )
    field: str = setting("text", "the JSON field or Parquet column that holds the text")
    tokenizer: str | None = setting(
        None, "a directory with a tokenizer.json, bytes, or bpe:IDS, one trained on the data"
    )
    validation: float = setting(0.03, "part of the documents that is held out", least=0, most=0.5)
    cache: str | None = setting(None, "where tokenised data is kept", may_change=True)


@dataclass(frozen=True)
class TrainKeys:
    steps: int | None = setting(None, "optimizer steps", least=1, most=10**12, may_change=True)
    tokens: int | None = setting(None, "tokens to train on, instead of steps", least=1, most=10**18)
    minutes: float | None = setting(
        None, "predicted minutes of training, instead of steps", least=0, most=10**7
    )
    batch_tokens: int | None = setting(None, "tokens of a step", least=1, most=10**12)
    sequence: int | None = setting(
        None, "tokens of a row; documents are packed into rows", least=1, most=10**9
    )
    seed: int = setting(0, "of initial values, data order and the sample", least=0)
    dropout: float = setting(
        0.0, "part of what branches and the embedding give that becomes zero", least=0, most=0.99
    )
    label_smoothing: float = setting(
        0.0, "part of each target that all tokens share", least=0, most=0.99
    )
    z_loss: float = setting(
        0.0, "times the squared log of each token's softmax sum, in the loss", least=0
    )
    clip: float | None = setting(1.0, "largest norm of the whole gradient; null: any", least=0)
    evaluate_every: int | None = setting(
        None, "steps between validations; 0: only at the end", least=0, may_change=True
    )
    evaluate_tokens: int | None = setting(
        None, "validation tokens that are looked at each time", least=1, may_change=True
    )
    save_every: int | str | None = setting(
        None,
        "steps between checkpoints, or a time, as 10min; 0: only at the end",
        least=0,
        may_change=True,
    )
    keep: int | None = setting(2, "checkpoints kept; null: all", least=1, may_change=True)


@dataclass(frozen=True)
class OptimizerKeys:
    name: str = setting("adamw", "adamw, muon, sgd, or a technique's name")
    lr: float | None = setting(None, "learning rate at its highest", least=0)
    betas: tuple[float, float] = setting(
        (0.9, 0.95), "decay of the moments, of adamw and what is like it"
    )
    weight_decay: float = setting(0.1, "decoupled, of matrices only", least=0)


@dataclass(frozen=True)
class LearningRateKeys:
    shape: Literal["constant", "linear", "cosine", "wsd"] = setting("linear", "after the warm-up")
    warmup: int | None = setting(None, "steps in which the learning rate rises", least=0)
    final: float = setting(0.05, "the learning rate's last factor", least=0, most=1)
    decay: float = setting(0.2, "wsd: part of the steps in which it falls", least=0, most=1)


@extended
@dataclass(frozen=True)
class PlanKeys(Extended):
    microbatch_rows: int | None = setting(None, "rows that run at a time", least=1)
    recompute: tuple[str, ...] | None = setting(
        None, "[], [block], or parts of blocks to compute again instead of keeping"
    )
    loss_chunk: int | None = setting(None, "tokens whose logits exist at once; 0: all", least=0)
    mlp_tile: int | None = setting(
        None, "tokens whose feed-forward activations exist at once; 0: all", least=0
    )
    split_backward: bool = setting(False, "weight gradients apart from input gradients")
    zero: int | tuple[int, ...] | None = setting(
        None,
        "0 to 3: what the data axis cuts: optimizer, gradients, weights; or three numbers: the"
        " workers over which weights, gradients, optimizer states are cut",
        least=0,
        most=3,
        may_change=True,
    )
    pipeline: str | None = setting(
        None,
        "order of the pipeline axis, as 1f1b or interleaved:2 (chunks of a worker); auto: what the"
        " planner finds for the predicted costs and the memory, orders of its own too; with"
        " +vocabulary:1 or +vocabulary:2 behind it every worker has rows of embedding and head",
        may_change=True,
    )
    gathered: int | None = setting(
        None,
        "stages whose weights are gathered at once, where workers cut them; 2 by default",
        least=1,
        may_change=True,
    )
    sequence_parallel: bool | None = setting(
        None,
        "whether tokens between branches of blocks are cut over the tensor axis",
        may_change=True,
    )
    approximate: tuple[str, ...] = setting(
        (),
        "what may change the maths: bfloat16-weights, zeroth-order, frozen-by-dynamics,"
        " local-learning, partial-pipeline",
    )
    settings: Settings = NONE  # those of techniques, each a key of its own


@dataclass(frozen=True)
class SampleKeys:
    prompt: str | None = setting(
        None,
        "what the sample at the end begins with; null: a chat's question, else 'import '",
        may_change=True,
    )
    tokens: int = setting(240, "tokens of the sample; 0: none", least=0, may_change=True)
    temperature: float = setting(
        0.7, "0: the most probable token each time", least=0, may_change=True
    )


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
    precision: (
        Literal[
            "float64", "float32", "bfloat16", "float16", "float32+invariant", "bfloat16+invariant"
        ]
        | None
    ) = setting(
        None,
        "of the computation; 16 bits have a float32 master copy, float16 scaled losses;"
        " +invariant: log-probabilities are those of serving, bit for bit",
    )
    memory: str | int | None = setting(
        None, "most bytes on the device, as 2GiB; more is refused", may_change=True
    )
    host_memory: str | int | None = setting(
        None, "RAM beside the device's, where states may rest", may_change=True
    )
    disk: str | None = setting(
        None, "folders where states may rest, as DIR[,DIR][:SIZE]", may_change=True
    )
    tiers: tuple[str, ...] = setting(
        (), "memory with a path where states may rest: NAME=PATH:SIZE", may_change=True
    )
    device: str = setting(
        "auto", "where it runs: cpu, or an accelerator as PyTorch calls it", may_change=True
    )
    threads: int | None = setting(
        None, "of the processor, for each worker", least=1, most=1024, may_change=True
    )
    workers: int | None = setting(None, "processes that train together", least=1, may_change=True)
    mesh: str | None = setting(None, "workers on each axis, as data=2,tensor=2", may_change=True)
    plan_file: str | None = setting(None, "a plan of outsize plan --out, which the run then has")
    output: str | None = setting(
        None, "directory of the run: metrics, checkpoints, timeline", may_change=True
    )
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


@functools.cache
def _sections() -> Mapping[str, Any]:
    """The types of a run's fields; to read them anew takes milliseconds."""
    return typing.get_type_hints(RunConfig)


@functools.cache
def leaves() -> Mapping[str, Setting]:
    """Every key that any run has, by its full name, in order."""
    hints = _sections()
    made = (field for field in dataclasses.fields(RunConfig) if not field.metadata)
    sections = {f.name: hints[f.name] for f in made if f.name != "techniques"}
    found = {f"{name}.{k.name}": k for name, kind in sections.items() for k in settings_of(kind)}
    found |= {f"plan.{name}": one.leaf for name, one in PLAN_SETTINGS.items() if one.run}
    return found | {key.name: key for key in settings_of(RunConfig)}


@functools.cache
def technique_leaves() -> Mapping[str, Setting]:
    """Every key of a technique: its own, which switches it on, and those of its settings."""
    found: dict[str, Setting] = {}
    for key, one in TECHNIQUES.items():
        found[key] = Setting(key, bool, False, one.meaning)
        found.update({f"{key}.{each.name}": each for each in settings_of(one.settings)})
    return found


def leaf(name: str) -> Setting | None:
    """The key of a full name, None where there is none."""
    return leaves().get(name) or technique_leaves().get(name)


def full_name(name: str, value: object) -> str:
    """What a key stands for beside a plain value: of a technique that has a short form, the setting
    that is said; else itself."""
    own = TECHNIQUES.find(name) if name in technique_leaves() else None
    short = own is not None and own.short and not isinstance(value, bool)
    return f"{name}.{own.short}" if own is not None and short else name


def may_change(name: str) -> bool:
    """Whether a resumed run may change a key. Memory and tiers change where states rest; what of a
    plan decides in which order sums are taken stays as it was (outsize/train/setup.py, FIXED)."""
    found = leaf(name)
    return found is not None and found.may_change


# What a run may go on with otherwise though its numbers are others from there on; it says so.
RESTATED = ("optimizer.lr", "optimizer.weight_decay", "optimizer.betas", "learning_rate.",
    "train.batch_tokens", "train.clip", "train.dropout", "train.label_smoothing", "train.z_loss",
    "data.")  # fmt: skip
_KEPT = ("data.tokenizer",)


def restated(name: str) -> bool:
    """Whether a resumed run may change a key that has a say in its numbers."""
    return name.startswith(RESTATED) and name not in _KEPT and not may_change(name)


def _techniques(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of every technique of which something is said, and which is not switched off."""
    found: dict[str, Any] = {}
    for key, one in TECHNIQUES.items():
        mine = {f.name: f"{key}.{f.name}" for f in settings_of(one.settings)}
        said = {name: values[full] for name, full in mine.items() if full in values}
        if values.get(key, bool(said)):
            found[key] = one.settings(**said)
    return found


def config_of(values: Mapping[str, Any]) -> RunConfig:
    """The RunConfig of values by full name; what is not named has its default."""
    hints = _sections()
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


def had_of(values: Mapping[str, Any], name: str) -> Any:
    """What a run of these values has of a key: of a technique's own whether it is on, and of a
    setting of one that is off None."""
    key = max((k for k in TECHNIQUES.names() if f"{name}.".startswith(f"{k}.")), default="")
    run, found = config_of(values), leaf(name)
    on = key in {*run.techniques, run.optimizer.name, *run.plan.approximate}
    if name == key:
        return on
    assert found is not None, "a key that is not known is refused where it is read"
    return values.get(name, found.default) if on or not key else None


def check(name: str, value: Any, source: str) -> None:
    """Refuse a number out of its key's range, a name that its registry does not have. Lists are
    checked where they are used."""
    if name == "optimizer.name" and OPTIMIZERS.find(value) is None:
        raise OutsizeError(f"{source}: {name}: {value!r}{nearest(value, OPTIMIZERS.names())}")
    if name == "train.save_every" and isinstance(value, str):
        seconds_of(value, source)
        return
    allowed = leaf(name)
    if allowed is None or not allowed.range or value is None or isinstance(value, tuple):
        return
    if allowed.least <= value <= allowed.most:
        return
    upper = "" if allowed.most == float("inf") else f" and at most {allowed.most:g}"
    text = f"{value:g}" if isinstance(value, int) and abs(value) > 10**15 else str(value)
    raise OutsizeError(f"{source}: {name}: {text}; expected at least {allowed.least:g}{upper}")


_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def seconds_of(text: str, source: str = "train.save_every") -> float:
    """The seconds of a time as "90s", "10min", "2h". OutsizeError for another text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|h)", text)
    if found is None or not float(found[1]):
        raise OutsizeError(
            f"{source}: train.save_every: {text!r}; expected steps, or a time as 90s, 10min, 2h"
        )
    return float(found[1]) * _UNITS[found[2]]
