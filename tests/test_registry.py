"""Techniques as keys of a run's file: switched on, set, refused."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from outsize.errors import OutsizeError
from outsize.plan import Plan
from outsize.plan.plan import per_segment
from outsize.registry import TECHNIQUES, Registry, Technique, setting
from outsize.train import config
from outsize.train.resolve import resolve


@dataclass(frozen=True)
class Settings:
    rank: int = setting(8, "columns of the factors", least=1)
    scale: float = setting(1.0, "of their product")


@pytest.fixture
def lowrank(monkeypatch):
    TECHNIQUES.names()
    entry = Technique("adapt.test-factors", Settings, "a technique of this test")
    monkeypatch.setitem(TECHNIQUES._entries, entry.key, entry)
    config.technique_leaves.cache_clear()
    yield entry
    config.technique_leaves.cache_clear()


def test_what_is_not_said_is_off(lowrank):
    assert resolve(None).config.technique(lowrank.key) is None


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("adapt: {test-factors: {rank: 16}}", Settings(rank=16)),
        ("adapt: {test-factors: {}}", Settings()),
        ("adapt: {test-factors: true}", Settings()),
        ("adapt: {test-factors: false}", None),
    ],
)
def test_a_file_switches_a_technique_on(lowrank, tmp_path, text, wanted):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    resolved = resolve(file)
    assert resolved.config.technique(lowrank.key) == wanted
    file.write_text(resolved.to_yaml())
    assert resolve(file).config.technique(lowrank.key) == wanted


def test_set_reaches_a_setting(lowrank):
    made = resolve(None, ["adapt.test-factors.scale=0.5"])
    assert made.config.technique(lowrank.key) == Settings(scale=0.5)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("adapt.test-factors.rnak=1", "did you mean 'rank'?"),
        ("adapt.test-factors.rank=0", "expected at least 1"),
        ("adapt.test-factors.rank=much", "expected a whole number"),
        ("adapt.test-factorz.rank=1", "did you mean"),
    ],
)
def test_what_is_wrong_is_refused(lowrank, said, words):
    with pytest.raises(OutsizeError, match=words.replace("?", r"\?")):
        resolve(None, [said])


def test_a_name_has_one_owner():
    registry = Registry[int]("number")
    registry.add("one", 1)
    with pytest.raises(OutsizeError, match="registered twice"):
        registry.add("one", 2)
    with pytest.raises(OutsizeError, match="did you mean 'one'"):
        registry.get("onee")


BACKWARD = "both change the backward pass; leave one of them out"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("local-learning", "zeroth-order"), f"local-learning and zeroth-order {BACKWARD}"),
        (("zeroth-order", "frozen-by-dynamics"), f"zeroth-order and frozen-by-dynamics {BACKWARD}"),
        (("local-learning", "frozen-by-dynamics"), BACKWARD),
        (("zeroth-order", "adamw8bit"), "zeroth-order and adamw8bit both change optimizer states"),
    ],
)
def test_two_that_change_the_same_thing_are_refused_in_a_plan(names, said):
    with pytest.raises(OutsizeError, match=said):
        Plan(4, per_segment(4), approximate=names)


@pytest.mark.parametrize("name", ["muon", "sgd", "adamw8bit"])
def test_an_optimizer_beside_a_technique_that_has_none_of_its_states(name):
    """It was dropped without a word."""
    own = ", adamw8bit" if name == "adamw8bit" else ""
    sets = [f"optimizer.name={name}", f"plan.approximate=[zeroth-order{own}]"]
    with pytest.raises(OutsizeError, match=f"^{name} and zeroth-order both change optimizer stat"):
        resolve(None, sets)
    sets[1] = f"plan.approximate=[local-learning{own}]"
    assert resolve(None, sets).config.optimizer.name == name
