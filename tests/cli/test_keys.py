"""`outsize keys`, words of other trainers, and keys that had other names."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from outsize.cli.main import main
from outsize.errors import OutsizeError
from outsize.registry import TECHNIQUES, settings_of
from outsize.train.config import RENAMED, leaf, leaves, technique_leaves
from outsize.train.other_trainers import OTHERS
from outsize.train.resolve import resolve


def invoke(*words: str) -> str:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    return result.output


def test_every_key_is_listed_with_its_meaning() -> None:
    listed = " ".join(invoke("keys").split())
    for name, key in {**leaves(), **technique_leaves()}.items():
        assert name in listed and key.meaning.split()[0] in listed
    assert len(leaves()) <= 60


def test_a_section_a_key_and_a_technique_are_listed_alone() -> None:
    assert len(invoke("keys", "learning_rate").splitlines()) == 1 + 4
    assert "from 1" in invoke("keys", "train.keep") and "2" in invoke("keys", "train.keep")
    one = TECHNIQUES.get("adapt.lora")
    assert len(invoke("keys", "adapt.lora").splitlines()) >= 2 + len(
        list(settings_of(one.settings))
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("adapt.lorra", "did you mean 'adapt.lora"),
        ("trains", "did you mean 'train'?"),
        ("bogus", "known: adafactor, adamw8bit, adapt, apollo, "),  # sections, not all keys
        ("gradient_accumulation_steps", "here it is plan.microbatch_rows"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name, said) -> None:
    result = CliRunner().invoke(main, ["keys", name])
    assert result.exit_code == 2 and said in result.output and result.output.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("epochs: 3", "epochs: unknown key; here it is train.epochs"),
        ("train: {gradient_accumulation: 4}", "here it is plan.microbatch_rows"),
        ("train: {early-stop: true}", "here it is callbacks: [early-stopping]"),
        ("lora: {r: 8}", "lora: unknown key; here it is adapt: {lora: {rank: 16}}"),
        ("lora.rank: 3", "lora.rank: unknown key; here it is adapt: {lora: {rank: 16}}"),
        ("learning_rate: 0.001", "expected a mapping of shape, warmup, final, decay; 0.001 itself"),
        ("optimizer: {learning-rate: 1}", "here it is optimizer.lr"),
    ],
)
def test_words_of_other_trainers_are_answered_with_ours(text, said, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(OutsizeError) as caught:
        resolve(tmp_path / "run.yaml")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_an_option_of_another_trainer_is_answered_too() -> None:
    result = CliRunner().invoke(main, ["train", "--max-grad-norm", "1"])
    assert result.exit_code == 2 and "Here it is train.clip." in result.output


def test_the_table_names_keys_that_there_are() -> None:
    for word, ours in OTHERS.items():
        first = ours.split(",")[0].split(":")[0].split(" or ")[0]
        known = leaf(first) is not None or first in ("missing", "adapt")
        assert known or first.startswith("outsize train"), (word, ours)
        assert leaf(word) is None or word in ("tokenizer",)


def test_old_names_are_taken_for_the_new_ones(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("schedule: {shape: cosine, warmup: 7}")
    found = resolve(tmp_path / "run.yaml", ["schedule.final=0.1"])
    assert found.config.learning_rate.shape == "cosine" and found.get("learning_rate.final") == 0.1
    assert found.get("learning_rate.warmup") == 7 and "schedule" not in found.to_yaml()
    (tmp_path / "run.yaml").write_text("plan: {epsilon: 0.001, frozen: 0.5, local_groups: 2}")
    assert not resolve(tmp_path / "run.yaml").config.techniques  # as runs that had none of them
    assert all(leaf(new) and not leaf(old) for old, new in RENAMED.items())
