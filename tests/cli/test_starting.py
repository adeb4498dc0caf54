"""How little a command imports and reads before it works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import outsize
from outsize.checkpoint import files, hub
from outsize.cli.main import main
from outsize.data import tokenizer as tokenizers
from outsize.models.build import build
from outsize.models.families import parse

MODEL = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 48, "vocab_size": 257,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    outsize.save(build(parse(MODEL), 0), tmp_path / "model")
    return tmp_path / "model"


def imported(code: str) -> set[str]:
    text = f"{code}\nimport sys; print(*[m for m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    return set(run.stdout.split("\n")[-2].split())


def test_help_and_the_package_itself_come_without_pytorch() -> None:
    assert "torch" not in imported("import outsize, outsize.cli.main")


def test_ctrl_c_before_a_command_begins_is_answered_as_in_one() -> None:
    """While commands are imported, and while the group reads what was asked of it; a signal that is
    ignored stays so."""
    code = """
import os, signal, sys
where = sys.argv.pop()
ignored = where == "ignored"  # or not, whoever started the tests
signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "outsize.cli.keys":
            if where != "parsing":
                os.kill(os.getpid(), signal.SIGINT)
            else:
                import click
                made = click.Context.__init__
                def stopped(*args, **more):
                    click.Context.__init__ = made
                    os.kill(os.getpid(), signal.SIGINT)
                    made(*args, **more)
                click.Context.__init__ = stopped

sys.meta_path.insert(0, Finder())
from outsize.cli.entry import main
sys.argv[1:] = ["new", "--help"]
main()
"""
    for where in ("importing", "parsing", "ignored"):
        done = subprocess.run([sys.executable, "-c", code, where], capture_output=True, text=True)
        if where == "ignored":
            assert done.returncode == 0 and "Usage:" in done.stdout
        else:
            assert (done.returncode, done.stdout) == (130, "")
            assert done.stderr == "interrupted; nothing had begun that could be saved\n"


def test_generate_imports_under_half_of_the_modules_that_it_did(directory) -> None:
    """278 of 395 (issue 11); none of planning, of training, of several workers."""
    code = f"import outsize; outsize.generate(outsize.load({str(directory)!r}), [1], 2)"
    found = {name for name in imported(code) if name.partition(".")[0] == "outsize"}
    assert len(found) < 278 / 2
    assert not {
        n
        for n in found
        if n.startswith(("outsize.search", "outsize.simulate", "outsize.collectives.c10d"))
        or n in ("outsize.serve.files", "outsize.serve.meshed", "outsize.serve.workers")
    }


def test_kernels_without_memory_come_when_fake_tensors_ask(directory) -> None:
    """A command that plans nothing leaves them out, whatever weights become, and all techniques but
    the format's; PyTorch's own fake tensors find them."""
    words = ["generate", str(directory), "--prompt", "a", "--max-tokens", "1"]
    words += ["--weights", "int4:16"]
    code = f"""
from outsize.cli.main import main
main({[*words, "--tokenizer", "bytes"]!r}, standalone_mode=False)
import sys, torch
assert not [m for m in ("torch._decomp", "torch._refs", "sympy") if m in sys.modules]
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    assert torch.nn.functional.embedding(torch.ones(3).long(), torch.ones(4, 5)).shape == (3, 5)
assert torch.ones(2, device="meta").relu().shape == (2,)
assert torch._meta_registrations.meta_index_Tensor
import outsize.serve.engine, outsize.serve.room
"""
    found = imported(code)
    assert "torch._decomp" in found
    techniques = {name for name in found if name.startswith("outsize.techniques.")}
    assert techniques == {f"outsize.techniques.quant{name}" for name in ("", ".int4")}
    several = {"collectives.joined", "launch.local", "parallel.tensor", "serve.meshed"}
    streamed = {"runtime.tokens", "schedule.pipelines", "serve.files"}
    assert not {f"outsize.{name}" for name in several | streamed} & found  # one, all in memory


def test_memory_is_asked_for_once_for_all_tensors_of_a_file(directory, monkeypatch) -> None:
    asked, own = list[None](), files.host.memory
    monkeypatch.setattr(files, "SMALL", 0)
    monkeypatch.setattr(files.host, "memory", lambda: asked.append(None) or own())
    outsize.load(directory)
    assert len(asked) == 1


def test_config_tokenizer_and_prompt_are_read_once(directory, monkeypatch) -> None:
    read: list[str] = []

    def counting(module, name):
        own = getattr(module, name)

        def call(*args):
            read.append(name)
            return own(*args)

        monkeypatch.setattr(module, name, call)

    counting(hub, "read_config")
    counting(tokenizers, "open_tokenizer")
    counting(tokenizers.ByteTokenizer, "encode")
    words = ["generate", str(directory), "--prompt", "ab", "--max-tokens", "2"]
    result = CliRunner().invoke(main, [*words, "--tokenizer", "bytes"])
    assert result.exit_code == 0, result.output
    assert sorted(read) == ["encode", "open_tokenizer", "read_config"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--max-tokens", "-3"), "--max-tokens is -3; expected 0 or more"),
        (("--top-k", "0"), "--top-k is 0; expected at least 1"),
        (("--temperature", "-1"), "--temperature is -1.0; expected"),
    ],
)
def test_messages_name_the_option_that_was_typed(directory, words, said) -> None:
    result = CliRunner().invoke(main, ["generate", str(directory), "--tokenizer", "bytes", *words])
    assert result.exit_code == 2 and result.output.startswith(f"error: {said}")
    assert "max_tokens" not in result.output and "top_k" not in result.output


def _step(model: object, lr: object) -> None:
    import torch

    outsize.prepare(model, "adamw").step(torch.ones(1, 4, dtype=torch.int64), lr)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda model: outsize.generate(3, [1]), "model is a int; expected what outsize.load"),
        (lambda model: outsize.generate(model, [1.5]), "prompt is \\[1.5\\]; expected a text"),
        (lambda model: outsize.generate(model, 3), "prompt is 3; expected a text"),
        (lambda model: outsize.generate(model, [999], 1), "token 999; expected 0 to 256"),
        (lambda model: outsize.load(3), "directory is 3; expected the path of a run or a model"),
        (lambda model: outsize.plan(3), "model.*3"),
        (lambda model: outsize.prepare(model, "adamw", memory=-5), "memory size '?-5"),
        (lambda model: _step(model, -0.1), "step: lr is -0.1; expected a finite number, 0 or more"),
        (lambda model: _step(model, "fast"), "step: lr is 'fast'; expected a finite number"),
        (lambda model: outsize.save(3, "x"), "save: model is a int; expected a decoder"),
        (lambda model: outsize.prepare(3, "adamw"), "model is a int; expected a torch.nn.Module"),
    ],
)
def test_foreign_values_are_refused_in_one_line(directory, call, said) -> None:
    with pytest.raises(outsize.OutsizeError, match=said) as caught:
        call(outsize.load(directory))
    assert "\n" not in str(caught.value)
