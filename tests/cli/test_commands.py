"""The commands do what they say, and `--help` does not wait for PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom outsize.cli.main import main\n"
        "for words in ([], ['train'], ['generate'], ['plan']):\n"
        " try: main([*words, '--help'])\n except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'numpy', 'rich', 'yaml', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage:") == 4


def test_train_then_generate_from_run_and_checkpoint_and_go_on(home, invoke) -> None:
    assert invoke("train", "run.yaml").exit_code == 0
    words = ("--prompt", "line 3", "--max-tokens", 12)
    from_run = invoke("generate", "run", *words)
    assert from_run.exit_code == 0
    assert from_run.stdout.startswith("line 3")
    assert len(from_run.stdout.rstrip("\n")) > len("line 3")
    assert invoke("generate", "run/step-00000003", *words).stdout == from_run.stdout
    bare = invoke("generate", "run", *words, "--no-echo").stdout
    assert from_run.stdout == "line 3" + bare
    drawn = ("--temperature", 1.5, "--top-k", 50, "--top-p", 0.95)
    one, same, other = (
        invoke("generate", "run", *words, *drawn, "--seed", seed).stdout for seed in (1, 1, 2)
    )
    assert one == same != other
    first = bare[0]
    stopped = invoke("generate", "run", *words, "--no-echo", "--stop", first)
    assert stopped.stdout == "\n"
    greedy_text_is_the_argmax_of_the_logits(invoke)
    again = invoke("train", "--resume", "run")
    assert again.exit_code == 0 and "is finished: step 3 of 3" in again.stdout
    longer = invoke("train", "--resume", "run/step-00000003", "--set", "train.steps=4")
    assert longer.exit_code == 0 and "going on from step 3 of 4" in longer.stdout


def greedy_text_is_the_argmax_of_the_logits(invoke) -> None:
    import outsize
    from outsize.checkpoint.adapters import model_directory

    model = outsize.load(model_directory("run"))
    ids = [256, *b"line"]
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(model(torch.tensor(ids))[-1].argmax()))
    expected = bytes(i for i in ids[5:] if i < 256).decode("utf-8", "replace")
    result = invoke("generate", "run", "--prompt", "line", "--max-tokens", 6, "--no-echo")
    assert result.stdout.rstrip("\n") == expected.rstrip("\n")


def test_explain_names_every_origin_and_starts_nothing(home, invoke) -> None:
    result = invoke("train", "run.yaml", "--set", "train.seed=7", "--explain")
    assert result.exit_code == 0
    assert not Path("run").exists()
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    assert "run.yaml" in rows["train.steps"] and " 3 " in rows["train.steps"]
    assert "--set" in rows["train.seed"] and " 7 " in rows["train.seed"]
    assert "default" in rows["train.clip"]
    assert "derived: adamw from random weights" in rows["optimizer.lr"]
    from outsize.train.config import leaves

    assert set(leaves()) <= set(rows)


def test_output_is_a_fresh_directory_by_default(home, invoke) -> None:
    for number in (1, 2):
        done = invoke("train", "run.yaml", "--set", "output=null", "--set", "train.steps=1")
        assert done.exit_code == 0
        assert Path(f"runs/tiny-{number}/latest").is_file()


def test_plan_tells_bytes_and_time(home, invoke) -> None:
    shown = invoke("plan", "run.yaml")
    assert shown.exit_code == 0
    for word in (
        "prologue",
        "block 0 to 1, each",
        "epilogue",
        "at the peak",
        "fits",
        "FORWARD",
        "optimizer",
    ):
        assert word in shown.stdout
    plain = json.loads(invoke("plan", "run.yaml", "--json").stdout)
    from outsize.models.build import build
    from outsize.models.families import parse
    from outsize.models.presets import PRESETS

    count = sum(p.numel() for p in build(parse(PRESETS["tiny"])).parameters())
    exact = {"parameters": 4 * count, "gradients": 4 * count, "optimizer": 8 * count}
    assert exact.items() <= plain["static"].items()
    assert plain["peak"] > 16 * count and plain["step_seconds"] > 0
    assert not Path("run").exists()


def test_plan_takes_a_preset_and_a_model_directory(home, invoke, tiny_config) -> None:
    large = invoke("plan", "llama-1.1b", "--set", "data.tokenizer=bytes")
    assert large.exit_code == 0 and "does not fit" in large.stdout
    directory = Path("hub")
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**tiny_config, "vocab_size": 300}))
    named = invoke("plan", "hub", "--set", "model.weights=random")
    assert named.exit_code == 0 and "block 0 to 1, each" in named.stdout
