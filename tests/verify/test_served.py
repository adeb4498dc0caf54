"""outsize verify --serve: drawn settings hold, and a planted fault is found and said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from outsize.cli.main import main
from outsize.kernels import native, pages
from outsize.verify.draw_served import Subject, drawn, features
from outsize.verify.served import verified

COMPILED = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")


def invoke(*words: object) -> Result:
    return CliRunner().invoke(main, ["verify", "--serve", *map(str, words)])


@COMPILED
@pytest.mark.parametrize("seed", [4, 6, 20, 51])
def test_drawn_settings_hold(seed: int) -> None:
    """In float64 and below, with drafts, interruptions, a prompt that lacks pages before others
    under prompt-first (6), and on meshes."""
    setting = drawn(seed, None)
    worst, fault = verified(setting)
    assert not fault and worst < 1e-10, setting


def test_draws_are_of_their_seeds_and_many_kinds() -> None:
    seen = {name for seed in range(120) for name in features(drawn(seed, None))}
    assert {"pages below", "pages below that fail"} < seen
    assert {"draft lookup", "draft wrong", "memory below the weights", "interrupted"} < seen
    assert {"mesh pipeline=2", "mesh tensor=2"} < seen
    assert {"prompts in slices", "few slots", "asked late", "cancelled", "policy mixed"} < seen
    assert {"cache bf16", "cache int8", "cache int4", "cache contiguous"} < seen
    assert {"precision float64", "precision float32", "precision bfloat16"} < seen
    assert drawn(5, None) == drawn(5, None) != drawn(6, None)


def test_no_draw_is_longer_than_the_model() -> None:
    """Than its files say: with weights in files that context is asked for, and would be refused."""
    config = drawn(42, None).subject.config
    short = Subject(replace(config, source={**config.source, "max_position_embeddings": 40}))
    contexts = [drawn(seed, short).room.context for seed in range(20)]
    assert 30 < max(contexts) <= 40


def test_weights_that_stay_in_files(tmp_path: Path) -> None:
    """Of a config.json alone, in float64."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(drawn(42, None).subject.config.source))
    found = invoke(path, "--random", 1, "--seed", 30, "--precision", "float64", "--json")
    assert found.exit_code == 0 and json.loads(found.stdout)["held"] == 1


@COMPILED
def test_another_order_of_sums_is_found_and_what_repeats_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By bits alone: attention of gathered pages is right to rounding."""
    again = ("--random", 1, "--seed", 40)
    assert invoke(*again).exit_code == 0
    monkeypatch.setattr(pages, "fits", lambda *_: False)
    found = invoke(*again)
    assert found.exit_code == 1 and "0 of 1 draws" in found.stdout
    assert "request" in found.stdout and "has log-probability" in found.stdout
    assert f"outsize verify --serve {' '.join(map(str, again))}" in found.stdout
