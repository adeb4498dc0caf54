"""A run that fine-tunes on chats: its defaults, each with the finding, and its early signs."""

from __future__ import annotations

from pathlib import Path

import chats
import pytest

import outsize
from outsize.models.build import build
from outsize.models.families import parse
from outsize.train.finetuning import findings, signs
from outsize.train.metrics import read_metrics
from outsize.train.resolve import recorded_values

SIZES = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 48, "vocab_size": 304,
    "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture
def said(tmp_path: Path) -> dict[str, str]:
    """Six lines as the issue has them, and no other."""
    outsize.save(build(parse(SIZES), 3), tmp_path / "model")
    chats.tokenizer(tmp_path / "model", chats.template("chatml", chats.PLAIN))
    records = [{"messages": chats.messages(chat)} for chat in chats.CHATS[:2] * 40]
    file = chats.jsonl(tmp_path / "chats.jsonl", records)
    return {
        "model.name": str(tmp_path / "model"), "data.path": str(file), "adapt.lora.rank": "4",
        "output": str(tmp_path / "run"), "sample.tokens": "0", "device": "cpu",
    }  # fmt: skip


def test_six_lines_train_by_the_findings_and_say_which(runs, said, monkeypatch) -> None:
    monkeypatch.setattr(
        runs, "sets", lambda **more: [f"{k}={v}" for k, v in {**said, **more}.items()]
    )
    printed = runs.train()
    found = recorded_values(Path(said["output"]))
    assert found.get("learning_rate.shape") == "constant" and not found.get("learning_rate.warmup")
    assert found.get("optimizer.lr") == 2e-4 and found.get("train.epochs.count") == 3
    assert found.get("train.batch_tokens") == 4 * 64
    assert "by the findings of Pareja et al., 2024: train.batch_tokens 256" in printed
    assert "by the findings of Dettmers et al., 2023: optimizer.lr 0.0002" in printed
    records = [record for record in read_metrics(Path(said["output"])) if "loss" in record]
    early = records[: round(0.1 * len(records))]
    norm = sum(record["gradient_norm"] for record in early) / len(early)
    assert f"(first {len(early)} steps): gradient norm {norm:.3g}" in printed


def test_what_is_said_stays_and_other_runs_have_none_of_it(runs, said, monkeypatch) -> None:
    own = {"optimizer.lr": "0.01", "learning_rate.shape": "linear", "train.steps": "2"}
    monkeypatch.setattr(
        runs, "sets", lambda **more: [f"{k}={v}" for k, v in {**said, **own}.items()]
    )
    printed = runs.train()
    found = recorded_values(Path(said["output"]))
    assert found.get("optimizer.lr") == 0.01 and found.get("learning_rate.shape") == "linear"
    assert found.get("train.steps") == 2 and "train.epochs" not in found.config.techniques
    assert "Dettmers" not in printed and "early signs" not in printed
    assert findings(recorded_values(Path(said["output"]))) == []


def test_a_short_run_has_no_early_signs() -> None:
    records = [{"step": step, "loss": 1.0, "gradient_norm": 2.0} for step in range(1, 31)]
    assert signs(records, 14) is None and "gradient norm 2, loss 1.000" in str(signs(records, 30))
