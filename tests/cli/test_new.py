"""`outsize new`: files of runs, every line explained, that run as they stand."""

from __future__ import annotations

from pathlib import Path

import chats
import pytest
import yaml

import outsize
from outsize.cli.new import KINDS
from outsize.models.build import build
from outsize.models.families import parse
from outsize.train.metrics import read_metrics
from outsize.train.resolve import resolve

SIZES = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 128, "vocab_size": 304,
    "max_position_embeddings": 192, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip


def test_every_line_is_explained_and_read(invoke, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert set(KINDS) == {"sft", "lora", "qlora", "pretrain"}
    for kind in KINDS:
        done = invoke("new", kind)
        assert done.exit_code == 0 and f"outsize train {kind}.yaml" in done.output
        lines = [line for line in Path(f"{kind}.yaml").read_text().splitlines() if line]
        assert lines[0].startswith("# ")
        assert all("  # " in line or line.endswith(":") for line in lines[1:]), kind
        assert resolve(f"{kind}.yaml").config.output == f"runs/{kind}"
        again = invoke("new", kind)
        assert again.exit_code == 2 and f"{kind}.yaml is there already" in again.output


@pytest.mark.parametrize("kind", ["sft", "lora", "qlora"])
def test_it_runs_as_it_stands(invoke, tmp_path, kind) -> None:
    model, output = tmp_path / "a model", tmp_path / "run"
    outsize.save(build(parse(SIZES), 3), model)
    chats.tokenizer(model, chats.template("chatml", chats.PLAIN))
    records = [{"messages": chats.messages(chat)} for chat in chats.CHATS * 4]
    file = chats.jsonl(tmp_path / 'the "chats".jsonl', records)
    path = tmp_path / "mine.yaml"
    said = ("--model", model, "--data", file, "--output", output)
    assert invoke("new", kind, path, *said).exit_code == 0
    assert yaml.safe_load(path.read_text())["data"]["path"] == str(file)
    assert yaml.safe_load(path.read_text())["train"]["sequence"] == 192
    done = invoke("train", path)
    assert done.exit_code == 0, done.output
    assert len([one for one in read_metrics(output) if "loss" in one]) >= 1
    assert (output / "latest").is_file()
