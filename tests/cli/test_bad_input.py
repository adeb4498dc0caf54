"""Bad input: each gives one line that names it, exit code 2, and nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def tokenizer_of(count: int, directory: Path) -> None:
    """A word tokenizer with `count` ids."""
    from tokenizers import Tokenizer, models

    words = {f"w{i}": i for i in range(count)}
    directory.mkdir(exist_ok=True)
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "w1"}')


def hub_directory(config: dict, directory: Path) -> None:
    """A Hugging Face directory with weights in two shards."""
    import outsize
    from outsize.models.build import build
    from outsize.models.families import parse

    outsize.save(build(parse({**config, "vocab_size": 300}), 0), directory, max_shard_bytes=1 << 17)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-7] ^= 4
    path.write_bytes(data)


def damaged(spoil: Callable[[Path], None]) -> Callable[[Path, dict], list[str]]:
    def prepare(home: Path, config: dict) -> list[str]:
        hub_directory(config, home / "hub")
        spoil(sorted((home / "hub").glob("*.safetensors"))[-1])
        return ["train", "run.yaml", "--set", "model=hub"]

    return prepare


def unknown_key(home: Path, config: dict) -> list[str]:
    (home / "run.yaml").write_text("train: {stpes: 3}")
    return ["train", "run.yaml"]


def wrong_type(home: Path, config: dict) -> list[str]:
    return ["train", "run.yaml", "--set", "train.steps=many"]


def missing_run_file(home: Path, config: dict) -> list[str]:
    return ["train", "none.yaml"]


def missing_data(home: Path, config: dict) -> list[str]:
    return ["train", "run.yaml", "--set", "data=nowhere"]


def empty_data(home: Path, config: dict) -> list[str]:
    (home / "empty.txt").write_text("")
    return ["train", "run.yaml", "--set", "data=empty.txt"]


def binary_data(home: Path, config: dict) -> list[str]:
    (home / "blob.txt").write_bytes(bytes(range(256)) * 10)
    return ["train", "run.yaml", "--set", "data=blob.txt"]


def large_tokenizer(home: Path, config: dict) -> list[str]:
    hub_directory(config, home / "hub")
    tokenizer_of(400, home / "words")
    return ["train", "run.yaml", "--set", "model=hub", "--set", "data.tokenizer=words"]


def unknown_family(home: Path, config: dict) -> list[str]:
    (home / "hub").mkdir()
    (home / "hub" / "config.json").write_text(json.dumps({**config, "model_type": "lama"}))
    return ["train", "run.yaml", "--set", "model=hub"]


def unknown_model(home: Path, config: dict) -> list[str]:
    return ["train", "run.yaml", "--set", "model=tinny"]


def other_model(home: Path, config: dict) -> list[str]:
    subprocess_train(home)
    return ["train", "--resume", "run", "--set", "model.name=small"]


def small_budget(home: Path, config: dict) -> list[str]:
    return ["train", "run.yaml", "--memory", "1MiB"]


def no_size(home: Path, config: dict) -> list[str]:
    return ["train", "run.yaml", "--memory", "much"]


def file_as_output(home: Path, config: dict) -> list[str]:
    (home / "taken").write_text("")
    return ["train", "run.yaml", "--set", "output=taken/run"]


def closed_output(home: Path, config: dict) -> list[str]:
    return ["train", "run.yaml", "--set", "output=/proc/run"]


def no_weights(home: Path, config: dict) -> list[str]:
    (home / "hub").mkdir()
    (home / "hub" / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    return ["train", "run.yaml", "--set", "model=hub"]


def existing_run(home: Path, config: dict) -> list[str]:
    subprocess_train(home)
    return ["train", "run.yaml"]


def no_run(home: Path, config: dict) -> list[str]:
    return ["train", "--resume", "text"]


def uneven_batch(home: Path, config: dict) -> list[str]:
    return ["train", "run.yaml", "--set", "train.batch_tokens=100"]


def long_sequence(home: Path, config: dict) -> list[str]:
    return ["train", "run.yaml", "--set", "train.sequence=512"]


def no_model(home: Path, config: dict) -> list[str]:
    return ["generate", "text", "--prompt", "a"]


def wrong_temperature(home: Path, config: dict) -> list[str]:
    return ["generate", "text", "--temperature", "-1"]


def wrong_option(home: Path, config: dict) -> list[str]:
    return ["generate", "text", "--max-tokens", "many"]


def subprocess_train(home: Path) -> None:
    from click.testing import CliRunner

    from outsize.cli.main import main

    assert CliRunner().invoke(main, ["train", str(home / "run.yaml")]).exit_code == 0


CASES = [
    (unknown_key, ["run.yaml: train.stpes: unknown key; did you mean 'steps'?"]),
    (wrong_type, ["train.steps: 'many'; expected a whole number"]),
    (missing_run_file, ["none.yaml", "No such file"]),
    (missing_data, ["nowhere", "does not exist"]),
    (empty_data, ["empty"]),
    (binary_data, ["blob.txt", "binary"]),
    (large_tokenizer, ["400 ids", "vocabulary of 300"]),
    (unknown_family, ["'lama'", "did you mean 'llama'?"]),
    (unknown_model, ["'tinny'", "did you mean 'tiny'?"]),
    (damaged(Path.unlink), ["model-00002-of-00002", "missing", "copy or download"]),
    (damaged(cut), ["model-00002-of-00002", "bytes"]),
    (damaged(flip), ["model-00002-of-00002", "tensor", "damaged", "checksum"]),
    (other_model, ["model.name is 'small'", "'tiny'", "another directory"]),
    (small_budget, ["1.00 MiB", "bytes missing", "set memory to"]),
    (no_size, ["'much'", "512MiB"]),
    (file_as_output, ["taken/run", "Not a directory"]),
    (closed_output, ["/proc/run", "choose another"]),
    (no_weights, ["hub", "model.weights=random"]),
    (existing_run, ["holds a run already", "--resume run"]),
    (no_run, ["no run in text", "run.yaml is missing"]),
    (uneven_batch, ["train.batch_tokens is 100", "128"]),
    (long_sequence, ["train.sequence is 512", "256 positions"]),
    (no_model, ["text holds no model"]),
    (wrong_temperature, ["temperature is -1"]),
    (wrong_option, ["--max-tokens", "many"]),
]


@pytest.mark.parametrize(
    ("prepare", "words"),
    CASES,
    ids=[str(i) + getattr(c, "__name__", "") for i, (c, _) in enumerate(CASES)],
)
def test_one_line_and_exit_code_2(prepare, words, home, invoke, tiny_config) -> None:
    result = invoke(*prepare(home, tiny_config))
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    for word in words:
        assert word in result.stderr, result.stderr


def test_an_output_that_may_not_be_written(home, invoke) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    (home / "closed").mkdir(mode=0o500)
    result = invoke("train", "run.yaml", "--set", "output=closed/run")
    assert result.exit_code == 2
    assert "closed/run" in result.stderr and "Permission denied" in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_an_output_whose_disk_is_full_is_said_in_one_line() -> None:
    """By a command and by the group of commands, in a process of their own."""
    told = (
        "import sys\n"
        "from outsize.cli.main import main\n"
        "for words in (['new', '--help'], ['--help'], ['--version'], ['--bogus']):\n"
        "    try: main(words)\n"
        "    except SystemExit as end: print(end.code, file=sys.stderr)\n"
    )
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", told]
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    line = "error: No space left on device, where output or a file goes; free some space there"
    assert run.stderr.splitlines() == [*[line, "2"] * 3, "error: No such option '--bogus'.", "2"]


def test_two_runs_in_one_directory(home, invoke) -> None:
    from outsize.checkpoint.store import Store

    with Store(home / "run"):
        result = invoke("train", "run.yaml")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: directory 'run' is in use by process")
    assert result.stderr.count("\n") == 1


def test_a_full_disk_leaves_the_last_checkpoint(home, invoke) -> None:
    """A tmpfs with room for one checkpoint and not for the next."""
    small = home / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2500k", "none", str(small)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        sets = [
            "--set",
            "output=small/run",
            "--set",
            "train.save_every=2",
            "--set",
            "train.steps=9",
        ]
        result = invoke("train", "run.yaml", *sets)
        assert result.exit_code == 2
        assert "No space left" in result.stderr and result.stderr.count("\n") == 1
        assert "step 2 is saved: outsize train --resume small/run" in result.stderr
        from outsize.checkpoint.store import Store

        store = Store(small / "run")
        assert store.latest() == 2
        store.load().verify()
        assert invoke("generate", "small/run", "--max-tokens", 2).exit_code == 0
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_no_traceback_from_the_command_itself(home) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "outsize", "schedule", "gpipe", "--devices", "4"],  # without PyTorch
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
