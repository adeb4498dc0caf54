"""`outsize generate --mesh` and `--workers`: the text of one worker, and what is refused."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import forked, until
from torchrun import free_port

import outsize
from outsize.models.build import build
from outsize.models.families import parse

WORDS = ("--prompt", "ab", "--max-tokens", 12, "--tokenizer", "bytes")


@pytest.fixture
def directory(tmp_path: Path, tiny_config: dict[str, Any]) -> Path:
    lively = {**tiny_config, "vocab_size": 264, "initializer_range": 0.3}
    outsize.save(build(parse(lively), seed=0, dtype=torch.float64), tmp_path / "hf")
    return tmp_path / "hf"


@pytest.fixture
def printed(capfd):
    """printed(*words): (exit code, standard output, standard error) of `outsize *words`, with what
    its workers print."""

    def run(*words: object) -> tuple[int, str, str]:
        from outsize.cli.main import main

        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words], "outsize")
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def test_the_text_is_that_of_one_worker(printed, directory):
    greedy, drawn = ("generate", directory, *WORDS), ("--temperature", 0.9, "--seed", 4)
    code, text, _ = printed(*greedy)
    assert code == 0 and text.startswith("ab") and len(text) > 8
    said = " on pipeline=2; a worker of each stage holds "
    code, many, plan = printed(*greedy, "--mesh", "pipeline=2")
    assert (code, many) == (0, text) and said in plan and plan.count("\n") == 1
    code, many, plan = printed(*greedy, "--mesh", "tensor=2", "--memory", "64MiB", "--timing")
    assert (code, many) == (0, text) and " on a worker of tensor=2, 3 of 3 parts stay in" in plan
    text = printed(*greedy, *drawn, "--no-echo")[1]
    both = ("--mesh", "pipeline=2,tensor=2", "--no-echo")
    assert printed(*greedy, *drawn, *both)[:2] == (0, text)


def test_the_text_of_a_run_ends_where_it_is_to_stop(printed, directory):
    """Every worker ends with the token that completes the stop string."""
    words = ("generate", directory, *WORDS, "--no-echo")
    text = printed(*words)[1]
    code, before, _ = printed(*words, "--workers", 4, "--stop", text[2:4])
    assert (code, before) == (0, text[: text.index(text[2:4])] + "\n")


@pytest.mark.parametrize("same", [True, False])
def test_workers_of_torchrun(same, printed, directory, tmp_path):
    port = free_port()
    homes, pids = [tmp_path / str(rank) for rank in range(2)], []
    for rank, home in enumerate(homes):
        home.mkdir()
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        seed = ("--seed", 0 if same else rank)
        pids.append(forked(home, place, "generate", directory, *WORDS, *seed))
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    out = [(home / "out").read_text() for home in homes]
    if same:
        assert codes == [0, 0] and out == [printed("generate", directory, *WORDS)[1], ""]
        return
    err = "".join((home / "err").read_text() for home in homes)
    assert set(codes) <= {1, 2} and out == ["", ""]
    assert "error: rank 1: worker on " in err and "differs from rank 0" in err
    assert "seed=1), there Sampling(" in err and err.count("error:") == 1


def test_text_appears_as_it_is_made_and_ctrl_c_ends_all(directory, tmp_path):
    words = ("--max-tokens", 20_000, "--tokenizer", "bytes", "--mesh", "pipeline=2")
    pid = forked(tmp_path, {}, "generate", directory, *words)
    out = tmp_path / "out"
    begun = until(lambda: out.exists() and out.stat().st_size > 50)
    assert begun, (tmp_path / "err").read_text()
    os.kill(pid, signal.SIGINT)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    _, end = (tmp_path / "err").read_text().splitlines()
    assert (code, end) == (130, "interrupted; nothing had begun that could be saved")


def test_a_reader_that_goes_ends_all_with_one_line(directory, tmp_path):
    words = ("--max-tokens", 20_000, "--tokenizer", "bytes", "--workers", 2)
    os.mkfifo(tmp_path / "out")
    reading = os.open(tmp_path / "out", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    pid = forked(tmp_path, {}, "generate", directory, *words, closing=reading)
    select.select([reading], [], [], 600.0)
    os.close(reading)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    _, end = (tmp_path / "err").read_text().splitlines()
    assert (code, end) == (2, "error: standard output was closed before the text had ended")


def test_a_fault_of_one_worker_ends_all_with_one_line(printed, tmp_path, tiny_config):
    model = build(parse({**tiny_config, "vocab_size": 264}), seed=0)
    with torch.no_grad():
        model.blocks[1].mlp.down.weight[0, 0] = float("inf")
    outsize.save(model, tmp_path / "hf")
    code, out, err = printed("generate", tmp_path / "hf", *WORDS, "--mesh", "pipeline=2")
    assert (code, out) == (2, "ab") and err.count("\n") == 2
    assert "error: rank 1: the model gave logits for new token 0 that are not finite" in err


REFUSED = {
    "data axis": (("--mesh", "data=2"), "data is 2, but a prompt has nothing to split over"),
    "stages": (("--workers", 5), "has 4 segments (prologue, 2 blocks, epilogue) and a worker"),
    "heads": (("--mesh", "tensor=3"), "the nearest that works is tensor=2"),
    "memory": (("--workers", 2, "--memory", "1KiB"), "--memory 1.00 KiB: "),
    "two numbers": (("--workers", 3, "--mesh", "tensor=2"), "has 2 workers, and there are 3"),
    "no workers": (("--workers", 0), "workers is 0; expected 1 or more"),
    "no such axis": (("--mesh", "pipelin=2"), "did you mean 'pipeline'?"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_one_line(case, invoke, directory):
    words, expected = case
    shown = invoke("generate", directory, *WORDS, *words)
    assert shown.exit_code == 2 and shown.stdout == ""
    assert shown.stderr.count("\n") == 1 and shown.stderr.startswith("error: ")
    assert expected in shown.stderr
