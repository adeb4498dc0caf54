"""Run configuration: what is refused and how, where values come from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from outsize.errors import OutsizeError
from outsize.registry import TECHNIQUES, Technique, setting
from outsize.train.config import SHORT, leaves, technique_leaves
from outsize.train.resolve import Resolved, apply_text, lengths, resolve, values_of
from outsize.train.workers import mesh_of

IN_FILE = [
    ("train: {stpes: 3}", "run.yaml: train.stpes: unknown key; did you mean 'steps'?"),
    ("trian: {steps: 3}", "run.yaml: trian: unknown key; did you mean 'train'?"),
    ("steps: 3", "run.yaml: steps: unknown key; did you mean 'train.steps'?"),
    ("train: {steps: many}", "run.yaml: train.steps: 'many'; expected a whole number"),
    ("train: {steps: 2.5}", "run.yaml: train.steps: 2.5; expected a whole number"),
    ("train: {steps: true}", "run.yaml: train.steps: True; expected a whole number"),
    ("train: {steps: 0}", "run.yaml: train.steps: 0; expected at least 1"),
    ("data: {validation: 0.7}", "run.yaml: data.validation: 0.7; expected at least 0 and at most"),
    ("train: {clip: .nan}", "run.yaml: train.clip: nan; expected a finite number"),
    ("precision: fp8", "run.yaml: precision: 'fp8'; expected one of float64, float32, bfloat16"),
    ("optimizer: {betas: [0.9]}", "optimizer.betas: [0.9]; expected a list of 2, each a number"),
    ("optimizer: {name: adam}", "optimizer.name: 'adam'; did you mean 'adamw'?"),
    ("optimizer: {betas: [0.9, 1.5]}", "optimizer: betas is [0.9, 1.5]; expected 0 or more and"),
    ("{optimizer: {name: sgd}, sgd: {momentum: 1}}", "optimizer: momentum is 1; expected 0 or"),
    ("sgd: {momentum: 0.5}", "sgd is set, and optimizer.name is adamw; leave it out, or set"),
    ("optimizer: {name: adamw8bit}", "adamw8bit changes the maths: name adamw8bit there"),
    ("plan: {approximate: [adamw8bit]}", "which is not the optimizer of this run; leave"),
    ("adamw8bit: {block: 64}", "adamw8bit is set, and optimizer.name is adamw; leave it"),
    ("adamw8bit: {blok: 64}", "adamw8bit.blok: unknown key; did you mean 'block'?"),
    (
        "{optimizer: {name: adamw8bit}, plan: {approximate: [adamw8bit]}, adamw8bit: {block: 48}}",
        "adamw8bit.block is 48; expected a power of two from 32 to 4096",
    ),
    ("train: 5", "run.yaml: train: 5; expected a mapping of steps, tokens"),
    ("[1]", "run.yaml: [1]; expected a mapping"),
    ("train: {steps: 1, steps: 2}", "run.yaml: not YAML: key 'steps' occurs twice"),
    ("train: {", "run.yaml: not YAML"),
]


@pytest.mark.parametrize(("text", "complaint"), IN_FILE)
def test_a_wrong_file_is_refused_with_its_place(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(OutsizeError) as error:
        resolve(path)
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.csv", "a.txt", "a.json.gz"])
def test_data_in_the_place_of_a_runs_file_is_said(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"PAR1\xff" if "parquet" in name else b'[{"messages": []}]')
    with pytest.raises(OutsizeError, match="is data; expected a run's file") as error:
        values_of(str(path))
    assert f"outsize new sft --data {path} writes" in str(error.value)
    assert f"outsize train MODEL --set data={path} runs" in str(error.value)
    path = tmp_path / "run.json"  # JSON is YAML
    path.write_text('{"train": {"steps": 3}}')
    assert resolve(path).get("train.steps") == 3


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("train.stpes=3", "--set: train.stpes: unknown key; did you mean 'steps'?"),
        ("data.template=plain", "data.template: unknown key; did you mean 'data.chat.template'?"),
        ("adapt.alpha=8", "unknown key; did you mean one of adapt.dora.alpha, adapt.loha.alpha, "),
        ("train.steps", "--set 'train.steps': expected key=value"),
        ("train.steps=x", "--set: train.steps: 'x'; expected a whole number"),
        ("train.minutes=2", "train.steps and train.minutes are given together"),
        ("train=5", "--set: train: 5; expected a mapping of steps, tokens"),
        ("adapt={lora:{rank:4}}", "--set: adapt.lora.rank:4: unknown key; did you mean 'rank'?"),
        ("train.clip=0", "train.clip is 0, and no gradient would move a weight; expected more"),
        ("threads=5000", "--set: threads: 5000; expected at least 1 and at most 1024"),
    ],
)
def test_a_wrong_set_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(OutsizeError) as error:
        resolve(None, ["train.steps=2", text])
    assert complaint in str(error.value)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("adapt={lora: {rank: 4}}", "adapt.lora.rank", 4),
        ("adapt.lora={rank: 4}", "adapt.lora.rank", 4),
        ("plan={zero: 2}", "plan.zero", 2),
        ("model={name: small}", "model.name", "small"),
        ("data={a: 3}", "data.path", {"a": 3.0}),
    ],
)
def test_a_section_is_set_as_a_file_says_it(text: str, name: str, value: object) -> None:
    found = resolve(None, [text])
    assert found.get(name) == value and found.typed(name)


@pytest.mark.parametrize("length", ["train.minutes: 2", "train.tokens: 512", "train.epochs: 3"])
def test_a_length_that_is_set_stands_for_that_of_the_file(length: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    key, _, value = length.removeprefix("train.").partition(": ")
    path.write_text(f"train: {{{key}: {value}}}")
    assert lengths(resolve(path)) == [f"train.{key}"]
    assert lengths(resolve(path, ["train.steps=7"])) == ["train.steps"]
    path.write_text("train: {steps: 7}")
    found = resolve(path, [f"train.{key}={value}"])
    assert lengths(found) == [f"train.{key}"] and found.get("train.steps") is None


def test_a_missing_and_a_binary_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OutsizeError, match="cannot be read: No such file"):
        resolve(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OutsizeError, match="not text"):
        resolve(tmp_path / "binary.yaml")


def test_values_are_read_as_they_were_meant(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: tiny\noptimizer: {lr: 3e-4}\ntrain: {tokens: 1e6, keep: null}\n")
    sets = ["output=2024", "data.path=[a, b]", "optimizer.betas=[0, 0.5]", "memory=2GiB"]
    config = resolve(path, sets).config
    assert config.model.name == "tiny"
    assert config.optimizer.lr == 3e-4 and config.optimizer.betas == (0.0, 0.5)
    assert config.train.tokens == 1_000_000 and isinstance(config.train.tokens, int)
    assert config.train.keep is None
    assert config.output == "2024" and config.memory == "2GiB"
    assert config.data.path == ("a", "b")


def test_origins_are_kept_and_the_last_word_counts(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("train: {steps: 5, seed: 3}")
    resolved = resolve(path, ["train.steps=7"]).derive("train.sequence", 64, "a test")
    rows = {name: (value, origin) for name, value, origin, _ in resolved.rows()}
    assert rows["train.steps"] == ("7", "--set")
    assert rows["train.seed"] == ("3", "mine.yaml")
    assert rows["train.clip"] == ("1", "default")
    assert rows["train.sequence"] == ("64", "derived: a test")
    assert resolved.derive("train.sequence", 9, "late").get("train.sequence") == 64


def test_written_values_read_back_equal() -> None:
    resolved = resolve(None, ["model=tiny", "data.path=[a, b]", "plan.recompute=[mlp]", "memory=5"])
    again = apply_text(Resolved(), resolved.to_yaml(), "again.yaml")
    assert again.config == resolved.config


def test_there_are_at_most_sixty_keys_and_each_says_what_it_means() -> None:
    table = leaves()
    assert len(table) <= 60
    assert all(leaf.meaning for leaf in table.values())
    assert set(SHORT.values()) <= set(table)


@pytest.mark.parametrize(
    ("said", "started", "mesh"),
    [
        ({}, None, "pipeline=2"),
        ({"workers": 2}, None, "pipeline=2"),
        ({}, 2, "pipeline=2"),
        ({"mesh": "tensor=2"}, 2, "tensor=2"),
        ({"workers": 1}, None, "1"),
        ({}, 4, "data=4"),
    ],
)
def test_a_run_goes_on_with_the_mesh_it_had(tmp_path: Path, said, started, mesh) -> None:
    """Where no other number of workers, and no mesh, is said."""
    (tmp_path / "run.yaml").write_text("{data: text, mesh: pipeline=2, workers: 2}")
    values = apply_text(Resolved(), str(said), "said")
    assert str(mesh_of(values, tmp_path, started)) == mesh


def test_a_plain_value_under_a_techniques_key_is_its_short_setting(monkeypatch) -> None:
    @dataclasses.dataclass(frozen=True)
    class Only:
        patterns: tuple[str, ...] = setting((), "names")

    made = Technique("train.short", Only, "for this test", short="patterns")
    monkeypatch.setitem(TECHNIQUES._entries, "train.short", made)
    technique_leaves.cache_clear()
    try:
        for said in ("train.short=[a, b]", "train.short.patterns=[a, b]"):
            assert resolve(None, [said]).config.technique("train.short") == Only(("a", "b"))
        found = apply_text(Resolved(), "train: {short: [c]}", "a file")
        assert found.config.technique("train.short") == Only(("c",))
        assert resolve(None, ["train.short=true"]).config.technique("train.short") == Only()
    finally:
        technique_leaves.cache_clear()
