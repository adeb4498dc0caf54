"""Every key of a run, changed: the numbers of the run are those of a plain loop that is written out
from the keys (plain_run.py), and each key that says something of the numbers changes that loop's.

Keys go into a few runs together: one key more costs the plain loop again, which takes a moment.
What must not change numbers is in the same runs, and the loop knows nothing of it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plain_run import Home, apart, flat, foretold, sampled, spelled

import outsize.search.request as requests
from outsize.data import open_data
from outsize.data.packing import permutation
from outsize.errors import OutsizeError
from outsize.kernels.entropy import LossOptions
from outsize.models.dropout import Noise
from outsize.optim import OPTIMIZERS
from outsize.plan import from_yaml
from outsize.registry import TECHNIQUES
from outsize.search import planner
from outsize.train.config import leaves, technique_leaves
from outsize.train.metrics import read_metrics
from outsize.train.model import adapter_of, subject
from outsize.train.recipe import data_config, options_of, recipe_of
from outsize.train.resolve import resolve
from outsize.train.setup import request_of

ROWS, SEQUENCE = 4, 12

# A run whose numbers depend on every one of these.
BASE = {
    "precision": "float64", "model.weights": "random", "train.steps": 6,
    "train.batch_tokens": ROWS * SEQUENCE, "train.sequence": SEQUENCE, "train.seed": 5,
    "train.dropout": 0.125, "train.label_smoothing": 0.1, "train.z_loss": 0.01,
    "train.clip": 0.3, "train.evaluate_every": 4, "train.evaluate_tokens": 30,
    "optimizer.name": "adamw", "optimizer.lr": 0.03, "optimizer.betas": [0.8, 0.9],
    "optimizer.weight_decay": 0.3, "learning_rate.shape": "cosine", "learning_rate.warmup": 2,
    "learning_rate.final": 0.25, "learning_rate.decay": 0.2,
    "sgd.momentum": 0.9, "muon.momentum": 0.95,
}  # fmt: skip

# Of a run with these values, one of these keys changed alone changes its numbers.
RUNS = {
    "adamw, cosine": (
        {},
        {
            "train.steps": 5, "train.sequence": 8, "train.batch_tokens": 2 * SEQUENCE,
            "train.seed": 6, "train.dropout": 0.25, "train.label_smoothing": 0.2,
            "train.z_loss": 0.02, "train.clip": None, "train.evaluate_every": 3,
            "train.evaluate_tokens": 48, "optimizer.name": "sgd", "optimizer.lr": 0.02,
            "optimizer.betas": [0.8, 0.95], "optimizer.weight_decay": 0.2,
            "learning_rate.shape": "linear", "learning_rate.warmup": 1,
            "learning_rate.final": 0.5, "model.weights": "stored",
        },
        {"plan.microbatch_rows": 1, "plan.recompute": ["block"], "plan.sequence_chunk": 5,
         "plan.loss_chunk": 7, "train.save_every": 2, "train.keep": 1, "sample.tokens": 3,
         "sample.prompt": "def", "sample.temperature": 0.0, "threads": 1, "device": "cpu"},
    ),
    "sgd, warm-up, stable, decay": (
        {"optimizer.name": "sgd", "learning_rate.shape": "wsd", "learning_rate.decay": 0.6,
         "train.seed": 6},
        {"sgd.momentum": 0.5, "learning_rate.decay": 0.3},
        {"plan.split_backward": True, "plan.mlp_tile": 5, "sample.tokens": 0,
         "plan.microbatch_rows": 4, "plan.loss_chunk": 0, "plan.recompute": []},
    ),
    "muon, from stored weights": (
        {"optimizer.name": "muon", "model.weights": "stored", "train.clip": None,
         "learning_rate.shape": "constant"},
        {"muon.momentum": 0.5, "optimizer.betas": [0.7, 0.9]},
        {"sample.tokens": 9, "sample.prompt": "def", "sample.temperature": 0.8,
         "plan.microbatch_rows": 3, "plan.loss_chunk": 5, "plan.mlp_tile": 0,
         "plan.recompute": []},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Home:
    torch.manual_seed(0)
    return Home(tmp_path_factory.mktemp("keys"))


@pytest.fixture(autouse=True)
def rehearsed_once(monkeypatch):
    """One rehearsal a list of stages: numbers do not follow from what it finds."""
    real, known = requests.rehearse, {}

    def rehearsed(plan, job_of, batch_of, *more, **said):
        key = len(plan.stages), plan.split_backward
        if key not in known:
            known[key] = real(plan, job_of, batch_of, *more, **said)
        return known[key]

    for module in (requests, planner):
        monkeypatch.setattr(module, "rehearse", rehearsed)


@pytest.fixture
def train(home, monkeypatch):
    """Trains with these values; gives what was written down, and the plan."""
    from rates import known_hardware
    from rich.console import Console

    from outsize.train.run import start

    monkeypatch.setattr("outsize.train.setup.probe", lambda device: known_hardware())

    def trained(values: dict, name: str):
        directory = home.home / name
        sets = home.sets(values, output=directory)
        assert start(resolve(None, sets), Console(quiet=True)) == 0
        return flat(read_metrics(directory)), from_yaml((directory / "plan.yaml").read_text())

    return trained


@pytest.mark.parametrize("name", RUNS)
def test_a_run_has_the_numbers_that_its_keys_say(home, train, name):
    changes, moved, same = RUNS[name]
    values = BASE | changes
    got, plan = train(values | same, name)
    expected = flat(foretold(home, values))
    assert [n for n, _ in got] == [n for n, _ in expected]
    assert [v for _, v in got] == pytest.approx([v for _, v in expected], rel=1e-10)
    for key, value in moved.items():
        more = {"train.batch_tokens": ROWS * 8} if key == "train.sequence" else {}
        other = flat(foretold(home, values | {key: value} | more))
        assert apart(other, expected), f"{key}: the numbers do not follow from it"
    if same["sample.tokens"]:
        last = home.home / name / f"step-{values['train.steps']:08d}"
        said = (same[f"sample.{key}"] for key in ("prompt", "tokens", "temperature"))
        expected = sampled(last, *said, values["train.seed"])
        assert (home.home / name / "sample.txt").read_text() == expected
    for key, value in same.items():  # what is said of a plan is in the plan
        field = key.removeprefix("plan.")
        if field == "recompute":
            assert plan.stages[1].recompute == tuple(value)
        elif key.startswith("plan."):
            assert getattr(plan, field) == value, key


def test_a_seed_orders_rows_anew_and_dropout_is_new_each_step(home):
    """The parts of the plain loop that share functions with a run, by themselves."""
    data = home.data().train
    assert ROWS * BASE["train.steps"] > data.tokens // SEQUENCE, "the run has a second epoch"
    orders = [permutation(what, seed, epoch, 9).tolist()
              for what in ("rows", "documents") for seed in (5, 6) for epoch in (0, 1)]  # fmt: skip
    noises = [Noise(0.5, seed, step)(torch.ones(8, 8), name).flatten().tolist()
              for seed in (5, 6) for step in (0, 1) for name in ("a", "b")]  # fmt: skip
    for found in (orders, noises):
        assert len({tuple(one) for one in found}) == len(found)


# What a plan is asked for, by key: the field of the request and what is in it.
REQUESTED = {
    "train.dropout": (0.25, "dropout", 0.25),
    "mesh": ("data=2,tensor=2", "mesh", None),
    "plan.zero": (3, "shards", None),
    "plan.gathered": (3, "gathered", 3),
    "plan.pipeline": ("zb-h1", "pipeline", "zb-h1"),
    "plan.sequence_parallel": (True, "sequence_parallel", True),
    "plan.overlap": (3, "settings", None),
    "plan.gather_bits": (8, "settings", None),
    "plan.collect_bits": (8, "settings", None),
    "plan.reduce_bits": (4, "settings", None),
    "plan.sequence_chunk": (9, "settings", None),
    "plan.approximate": (["local-learning"], "approximate", ("local-learning",)),
    "plan.microbatch_rows": (3, "microbatch_rows", 3),
    "plan.recompute": (["mlp"], "recompute", ("mlp",)),
    "plan.loss_chunk": (5, "loss_chunk", 5),
    "plan.mlp_tile": (5, "mlp_tile", 5),
    "plan.split_backward": (True, "split_backward", True),
    "precision": ("bfloat16", "precision", None),
    "memory": ("64MiB", "budget", 64 << 20),
    "train.clip": (0.5, "clip", 0.5),
    "optimizer.lr": (0.5, "optimizer", None),
}


@pytest.mark.parametrize("key", REQUESTED)
def test_the_planner_is_asked_for_what_a_key_says(home, key):
    value, field, expected = REQUESTED[key]
    wide = {"mesh": "data=2"} if key in ("plan.zero", "plan.gathered") else {}
    wide |= {"plan.zero": 3} if key == "plan.gathered" else {}
    before, after = (
        request_of(resolve(None, home.sets(BASE | wide | more))) for more in ({}, {key: value})
    )
    changed = [n for n in vars(before) if getattr(before, n) != getattr(after, n)]
    assert changed == [field] and expected in (None, getattr(after, field))


# Keys of data: another value makes other documents, or other tokens of them.
DATA = {
    "data.path": lambda home: home.home / "other",
    "data.kind": lambda home: "auto",  # the .txt beside it too
    "data.field": lambda home: "text",
    "data.tokenizer": lambda home: home.home / "tokens",
    "data.validation": lambda home: 0.5,
    "data.evaluation.path": lambda home: home.home / "other",
}


@pytest.mark.parametrize("key", DATA)
def test_a_key_of_data_changes_what_is_read(home, key):
    from tokenizers import Tokenizer, models

    (home.home / "other").mkdir(exist_ok=True)
    (home.home / "other" / "b.jsonl").write_text('{"body": "one"}\n{"body": "two"}\n' * 2)
    (home.home / "tokens").mkdir(exist_ok=True)
    vocabulary = {chr(i): i for i in range(32, 127)} | {"\n": 0, "</s>": 1}
    Tokenizer(models.WordLevel(vocabulary, "a")).save(str(home.home / "tokens" / "tokenizer.json"))
    (home.home / "tokens" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')

    def prints(sets):
        config = resolve(None, sets).config
        found = open_data(data_config(config, config.data.tokenizer))
        return found.train.fingerprint, found.validation.fingerprint

    one = prints(home.sets(BASE))
    assert prints(home.sets(BASE)) == one
    assert prints([*home.sets(BASE), f"{key}={DATA[key](home)}"]) != one


ADAPTERS = (
    "dora", "ia3", "loha", "lokr", "lora", "masked_lora", "mixlora", "oft", "p_tuning", "parallel",
    "pissa", "prefix", "prompt", "pyra", "serial", "sparse", "unipt", "vera",
)  # fmt: skip
# Settings of techniques: what switches the technique on, and a value.
ON = {
    "adamw8bit": {"optimizer.name": "adamw8bit", "plan.approximate": ["adamw8bit"]},
    **{f"adapt.{name}": {"model.weights": "stored", f"adapt.{name}": True} for name in ADAPTERS},
    "data.chat": {"data.chat": True},
    "frozen-by-dynamics": {"plan.approximate": ["frozen-by-dynamics"]},
    "four-bit-derivatives": {"plan.approximate": ["four-bit-derivatives"]},
    "local-learning": {"plan.approximate": ["local-learning"]},
    "lisa": {"plan.approximate": ["lisa"]},
    "pela": {"plan.approximate": ["pela"]},
    "badam": {"plan.approximate": ["badam"]},
    "elastic-adapters": {
        "model.weights": "stored",
        "adapt.lora": True,
        "plan.approximate": ["elastic-adapters"],
    },
    "zeroth-order": {"plan.approximate": ["zeroth-order"]},
    "sgd": {"optimizer.name": "sgd"},
    "muon": {"optimizer.name": "muon"},
    **{
        name: {"optimizer.name": name, "plan.approximate": [name][TECHNIQUES.get(name).exact :]}
        for name in (
            "schedule-free",
            "lion",
            "adafactor",
            "galore",
            "fira",
            "apollo",
            "frugal",
            "sophia",
        )
    },
    "weights": {"model.weights": "stored", "adapt.lora": True, "weights": "int4"},
    "factored_weights": {"factored_weights": True},
    "refactored": {"factored_weights": True, "plan.approximate": ["refactored"]},
    "train.only": {"train.only": "blocks.0"},
    "optimizer.rates": {"optimizer.rates": ["blocks.1=0.5"]},
}
SETTINGS = {
    "adamw8bit.block": 64, "adamw8bit.least": 100, "adapt.lora.rank": 3, "adapt.lora.alpha": 8.0,
    "adapt.lora.targets": ["mlp"], "adapt.lora.rank_stabilised": True, "adapt.lora.rate_ratio": 4.0,
    "data.chat.form": "alpaca", "data.chat.field": "talk", "data.chat.long": "leave",
    "data.chat.template": "chatml",
    "adapt.pissa.rank": 3, "adapt.pissa.alpha": 8.0, "adapt.pissa.targets": ["mlp"],
    "adapt.pissa.rank_stabilised": True, "adapt.masked_lora.rank": 3,
    "adapt.masked_lora.alpha": 8.0, "adapt.masked_lora.targets": ["mlp"],
    "adapt.dora.rank": 3, "adapt.dora.alpha": 8.0, "adapt.dora.targets": ["mlp"],
    "adapt.dora.rank_stabilised": True, "adapt.loha.rank": 3, "adapt.loha.alpha": 3.0,
    "adapt.loha.targets": ["mlp"], "adapt.lokr.rank": 3, "adapt.lokr.alpha": 3.0,
    "adapt.lokr.targets": ["mlp"], "adapt.ia3.outputs": ["mlp.up"], "adapt.ia3.inputs": ["mlp.up"],
    "adapt.oft.block": 4, "adapt.oft.targets": ["mlp"],
    "adapt.prefix.tokens": 3, "adapt.prompt.tokens": 3, "adapt.p_tuning.tokens": 3,
    "adapt.mixlora.experts": 4, "adapt.mixlora.chosen": 1, "adapt.mixlora.rank": 3,
    "adapt.mixlora.alpha": 8.0, "adapt.mixlora.balance": 0.5, "adapt.mixlora.attention": ["q"],
    "adapt.p_tuning.hidden": 4, "adapt.unipt.size": 4, "adapt.unipt.of": ["0"],
    "adapt.unipt.sees": "all",
    "adapt.pyra.merged": [3, 2], "adapt.pyra.kept": 2, "adapt.pyra.rank": 3,
    "adapt.pyra.alpha": 4.0, "adapt.pyra.targets": ["q_proj"],
    "adapt.vera.rank": 3, "adapt.vera.initial": 0.5,
    "adapt.vera.targets": ["mlp"], "adapt.sparse.of": 4, "adapt.sparse.targets": ["mlp"],
    "adapt.serial.size": 4, "adapt.serial.behind": ["mlp"], "adapt.parallel.size": 4,
    "adapt.parallel.scale": 2.0, "adapt.parallel.beside": ["attention"],
    "frozen-by-dynamics.share": 0.25, "frozen-by-dynamics.keep": "int8",
    "local-learning.groups": 3, "local-learning.auxiliary": "block",
    "local-learning.momentum": 0.5, "zeroth-order.epsilon": 0.01,
    "sgd.momentum": 0.5, "muon.momentum": 0.5, "train.only.patterns": ["blocks.1"],
    "weights.format": "nf4",
    "optimizer.rates.factors": ["blocks.0=2"], "lion.betas": [0.9, 0.95],
    "elastic-adapters.ranks": [16, 2], "four-bit-derivatives.rest": "whole",
    "schedule-free.betas": [0.9, 0.99], "factored_weights.rank": 3, "factored_weights.alpha": 8.0,
    "refactored.gap": 9, "refactored.reset": False, "refactored.recovery": 3,
    "sophia.betas": [0.9, 0.95], "sophia.gamma": 0.5, "sophia.gap": 3,
    "pela.teacher": "full", "pela.features": 0.5, "pela.perturbation": 0.5, "pela.epsilon": 0.5,
    "lisa.count": 1, "lisa.gap": 3, "badam.gap": 3, "badam.order": "random",
    "adafactor.decay": -0.5, "adafactor.clip": 2.0, "adafactor.least": 0.01,
    "galore.rank": 3, "galore.gap": 9, "galore.scale": 1.0,
    "fira.rank": 3, "fira.gap": 9, "fira.growth": 1.1,
    "apollo.rank": 3, "apollo.gap": 9, "apollo.scale": 2.0, "apollo.growth": 1.1,
    "apollo.scaling": "matrix", "frugal.rank": 3, "frugal.gap": 9, "frugal.others": 0.5,
    "frugal.subspace": "svd",
}  # fmt: skip


@pytest.mark.parametrize("key", SETTINGS)
def test_a_setting_of_a_technique_is_in_what_the_run_is_made_of(home, key):
    """The optimizer, the adapter, the source of documents or the method get it."""
    name, _, field = key.rpartition(".")
    one = home.sets(BASE | ON[name])
    value = SETTINGS[key]

    def made(sets):
        config = resolve(None, sets).config
        config = replace(config, optimizer=replace(config.optimizer, lr=config.optimizer.lr or 1.0))
        return recipe_of(config), adapter_of(config), data_config(config, "bytes").source

    before, after = made(one), made([*one, f"{key}={spelled(value)}"])
    value = tuple(value) if isinstance(value, list) else value
    assert before != after
    if name == "zeroth-order" or OPTIMIZERS.find(name) is not None:
        assert before[0].optimizer != after[0].optimizer
    elif name.startswith("adapt."):
        assert getattr(after[1], field) == value
    elif name == "data.chat":
        assert getattr(after[2][1], field) == value
    else:
        assert getattr(after[0].of(name), field) == value


def test_a_preset_has_the_vocabulary_that_is_asked_for():
    _, found = subject(resolve(None, ["model=tiny", "model.vocabulary=300", "train.steps=1"]))
    assert found.config.vocab == 300


# Keys that are tested where they act, by the file that changes them.
ELSEWHERE = {
    "model.name": "tests/train/test_run.py",
    "data.cache": "tests/train/test_every_key.py",
    "train.tokens": "tests/train/test_config.py",
    "train.minutes": "tests/train/test_config.py",
    "host_memory": "tests/train/test_run_tiers.py",
    "disk": "tests/train/test_run_tiers.py",
    "tiers": "tests/train/test_run_tiers.py",
    "workers": "tests/cli/test_workers.py",
    "plan_file": "tests/train/test_given_plan.py",
    "output": "tests/train/test_run.py",
    "callbacks.names": "tests/train/test_callbacks.py",
    "callbacks.patience": "tests/train/test_callbacks.py",
    "train.epochs.count": "tests/train/test_run.py",
}


def test_every_key_is_changed_somewhere():
    """A key that is added later has its entry in this file, or a test that it names."""
    every = {*leaves(), *technique_leaves()}
    own = {*(k for _, moved, same in RUNS.values() for k in (*moved, *same)), *REQUESTED, *DATA,
           *SETTINGS, *TECHNIQUES.names(), "model.vocabulary"}  # fmt: skip
    assert sorted(every - own - {*ELSEWHERE}) == [], "keys that no test changes"
    assert sorted((own | {*ELSEWHERE}) - every) == [], "these are no keys"
    top = Path(__file__).parents[2]
    for key, file in ELSEWHERE.items():
        spelled = (key, key.replace(".", "__"), f"--{key.replace('_', '-')}", f"--{key[:-1]}")
        text = (top / file).read_text()
        assert any(one in text for one in spelled), f"{file} says nothing of {key}"


def test_the_schedule_and_the_options_of_a_run_are_those_of_its_keys(home):
    config = resolve(None, home.sets(BASE)).config
    assert options_of(config) == LossOptions(0.1, 0.01)
    with pytest.raises(OutsizeError, match="changes the maths"):
        recipe_of(resolve(None, [*home.sets(BASE), "zeroth-order.epsilon=0.1"]).config)
