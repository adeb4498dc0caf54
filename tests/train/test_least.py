"""The least memory that a refusal names runs, and a byte less is refused, whatever the plan."""

from __future__ import annotations

import json
import random
import re

import pytest

import outsize
from outsize.errors import OutsizeError
from outsize.hardware import Rate, Tier
from outsize.models.build import build
from outsize.models.families import parse
from outsize.plan import from_yaml
from outsize.train.resolve import resolve
from outsize.train.setup import set_up

GPT2 = {  # its matrices rest transposed in files: they are converted when they are read
    "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128,
    "vocab_size": 300, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def known_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = Rate(1e9, "B/s", "test", "2026-11-21")
    monkeypatch.setattr(
        "outsize.train.tiers.measured", lambda spec, date: Tier(spec.name, spec.bytes, rate, rate)
    )


def drawn(rng: random.Random) -> dict[str, object]:
    """Values of a run; few tokens a step, so that the start holds as much as a step."""
    sequence = rng.choice((8, 16, 32))
    rows = rng.choice((1, 2, 3))
    return {
        "train__sequence": sequence,
        "train__batch_tokens": sequence * rows,
        "train__clip": rng.choice(("1.0", "null")),
        "plan__microbatch_rows": rng.choice((1, rows)),
        "precision": rng.choice(("float32", "bfloat16")),
        "optimizer__name": rng.choice(("adamw", "muon", "sgd")),
    }


def least_of(sets: list[str]) -> int:
    """The memory that a refusal names."""
    with pytest.raises(OutsizeError, match="too small") as caught:
        set_up(resolve(None, [*sets, "memory=1KiB"]))
    found = re.findall(r"\((\d+) bytes", str(caught.value))
    return int(found[-1])


# Of 1, 3 and 4: every optimizer and precision, either model with a disk, one without.
@pytest.mark.parametrize("seed", (1, 3, 4))
def test_the_least_runs_and_a_byte_less_is_refused(runs, seed) -> None:
    rng = random.Random(seed)
    keys = drawn(rng)
    keys |= {"train__steps": 2, "train__evaluate_every": 0, "train__save_every": 0}
    keys |= {"sample__tokens": 0, "data__validation": 0}
    if rng.random() < 0.75:
        keys["disk"] = f"{runs.home}:64MiB"
    if seed % 2:
        keys |= {"model__name": gpt2(runs.home), "data__tokenizer": "bytes"}
    least = least_of(runs.sets(**keys))
    with pytest.raises(OutsizeError, match="too small"):
        set_up(resolve(None, [*runs.sets(**keys), f"memory={least - 1}"]))
    runs.train(**keys, memory=least)
    assert from_yaml((runs.home / "run" / "plan.yaml").read_text()).rows >= 1


def gpt2(home) -> str:
    directory = home / "gpt2"
    outsize.save(build(parse(GPT2), 0), directory)
    assert json.loads((directory / "config.json").read_text())["model_type"] == "gpt2"
    return str(directory)
