"""The Python interface: load, generate, save, prepare."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import transformers

import outsize
from outsize.decode.generate import generate as plain_generate
from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.families import parse


@pytest.fixture
def directory(tmp_path, tiny_config):
    config = transformers.LlamaConfig(**{**tiny_config, "vocab_size": 264})
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def test_load_generate_save(directory, tmp_path):
    model = outsize.load(directory, dtype=torch.float64)
    assert model(torch.tensor([[1, 2, 3]])).shape == (1, 3, 264)
    ids = outsize.generate(model, [5, 6, 7], 6)
    reference = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float64)
    expected = reference.generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False, eos_token_id=None
    )
    assert ids == expected[0, 3:].tolist()
    pieces = []
    text = outsize.generate(model, "def", 9, temperature=1.0, seed=3, on_text=pieces.append)
    assert text == "".join(pieces) == outsize.generate(model, "def", 9, temperature=1.0, seed=3)
    outsize.save(model, tmp_path / "copy")
    again = outsize.load(tmp_path / "copy")
    assert all(
        torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True)
    )


def test_the_schedule_gives_what_the_plain_forward_gives(tiny_config):
    model = build(parse(tiny_config), seed=0, dtype=torch.float64)
    with torch.no_grad():
        assert outsize.generate(model, [1, 2], 8) == plain_generate(model, [1, 2], 8)


def test_prepare_takes_token_ids_of_a_native_model(directory):
    model = outsize.load(directory)
    job = outsize.prepare(model, optimizer="adamw", memory="1GiB")
    ids = torch.randint(0, 264, (2, 16))
    losses = [float(job.step(ids)) for _ in range(5)]
    assert losses[-1] < losses[0]


def test_a_model_without_a_tokenizer_says_so(tiny_config):
    model = build(parse({**tiny_config, "vocab_size": 1000}), seed=0)
    with pytest.raises(OutsizeError, match="tokenizer=DIRECTORY"):
        outsize.generate(model, "text")


def test_import_is_light():
    code = "import outsize, sys; assert 'torch' not in sys.modules; outsize.nothing"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "has no attribute 'nothing'" in run.stderr
