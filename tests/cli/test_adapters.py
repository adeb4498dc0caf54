"""LoRA from the command line: trained, gone on with, generated from, merged."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
import transformers
from run_files import files_of

import outsize
from outsize.collectives import Lone
from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.families import parse
from outsize.serve.load import on_mesh
from outsize.train.metrics import read_metrics

SETS = ("--set", "model=base", "--set", "adapt.lora.rank=4")


@pytest.fixture
def base(home, tiny_config):
    outsize.save(build(parse({**tiny_config, "vocab_size": 264}), seed=2), home / "base")
    return home / "base"


def last(run: Path) -> Path:
    return run / (run / "latest").read_text().strip()


def train(invoke, *words: object) -> str:
    result = invoke("train", *words)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_run_trains_an_adapter_that_peft_reads(invoke, home, base):
    said = train(invoke, "run.yaml", *SETS)
    checkpoint = last(home / "run")
    assert not list(checkpoint.glob("model*.safetensors")), "the base is stored once"
    parameters = 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64))
    states = sum(f.stat().st_size for f in checkpoint.glob("optimizer*.safetensors"))
    assert 2 * 4 * parameters < states < 2 * 4 * parameters + 20_000
    (totals,) = [r for r in read_metrics(home / "run") if "measured" in str(r)][-1:]
    assert "optimizer" in said and totals
    ids = torch.arange(12)[None]
    ours = outsize.load(home / "run")
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    again = peft.PeftModel.from_pretrained(plain, checkpoint).eval()
    torch.testing.assert_close(again(ids).logits, ours(ids), rtol=1e-4, atol=1e-5)
    assert not torch.equal(ours(ids), outsize.load(base)(ids)), "it has learnt"


def test_an_elastic_run_goes_on_bit_for_bit_and_its_middle_is_taken_out(invoke, home, base):
    drawing = (*SETS, "--set", "plan.approximate=[elastic-adapters]",
               "--set", "elastic-adapters.ranks=[4,3,2,1]", "--set", "learning_rate.shape=constant",
               "--set", "learning_rate.warmup=1", "--set", "sample.tokens=0")  # fmt: skip
    train(invoke, "run.yaml", *drawing, "--set", "output=whole")
    train(invoke, "run.yaml", *drawing, "--set", "train.steps=2", "--set", "output=parts")
    before = files_of(home / "parts")
    train(invoke, "--resume", "parts", "--set", "train.steps=3")
    assert files_of(home / "parts") == files_of(home / "whole") != before
    words = ("export", "whole", "--to", "peft", "--rank")
    assert invoke(*words, "middle", "--into", "sub").exit_code == 0
    assert json.loads((home / "sub" / "adapter_config.json").read_text())["r"] == 3
    for rank, reason in (("5", "expected 1 to 4"), ("half", "--rank is 'half'")):
        refused = invoke(*words, rank, "--into", "other")
        assert refused.exit_code == 2 and reason in refused.output


def test_generating_with_the_adapter_and_merged_gives_the_same_text(invoke, home, base):
    train(invoke, "run.yaml", *SETS, "--set", "optimizer.lr=0.05")
    outsize.save(outsize.merge(outsize.load(home / "run")), home / "merged")
    words = ("--prompt", "line", "--max-tokens", "8", "--tokenizer", "bytes")
    texts = [invoke("generate", where, *words).output for where in ("run", "merged", "base")]
    assert texts[0] == texts[1] != texts[2]
    outsize.save(outsize.load(home / "run"), home / "adapter")
    words_of = ["tokenizer.json", "tokenizer_config.json"]
    assert sorted(p.name for p in (home / "adapter").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", *words_of,
    ]  # fmt: skip
    for folder, name in ((home / x, y) for x in ("adapter", "merged") for y in words_of):
        assert (folder / name).read_bytes() == (last(home / "run") / name).read_bytes()
    assert invoke("generate", "adapter", *words).output == texts[0]
    refused = invoke("generate", "run", *words, "--memory", "1GiB")
    assert refused.exit_code == 2 and "holds an adapter alone" in refused.output
    unplanned = invoke("plan", "run", "--prompt-tokens", 5)
    assert unplanned.exit_code == 2 and "holds an adapter alone; expected" in unplanned.stderr
    assert invoke("plan", "merged", "--prompt-tokens", 5).exit_code == 0
    told = "was trained beside other weights than those in"
    asked = [("run",), ("base", "--adapter", "run"), ("merged", "--adapter", "run")]
    said = [told in invoke("generate", *one, *words).stderr for one in asked]
    assert said == [False, False, True], "of another model of this shape alone"


@pytest.mark.parametrize(("adapter", "size"), [("lora", {"rank": 2}), ("unipt", {"size": 4})])
def test_what_wants_a_whole_model_says_how_to_have_one(invoke, home, base, adapter, size):
    """Of an adapter that merges, and of one that no weight can take up."""
    made = outsize.adapt(outsize.load(home / "base"), adapter, **size)
    outsize.save(made, home / "own", adapter_only=True)
    remedy = "outsize merge own" if adapter == "lora" else "use it in memory on one worker"
    words = ("generate", "own", "--prompt", "line", "--tokenizer", "bytes")
    meshes = () if adapter == "lora" else (("--mesh", "tensor=2"),)
    for more in (("--memory", "64MiB"), *meshes):
        refused = invoke(*words, *more)
        assert refused.exit_code == 2 and remedy in refused.output
        assert "own holds an adapter alone; expected a whole model" in refused.output
    with pytest.raises(outsize.OutsizeError, match="own holds an adapter alone"):
        outsize.load(home / "own", memory="64MiB")


def test_a_run_file_says_it_and_random_weights_are_refused(invoke, home, base):
    text = (home / "run.yaml").read_text().replace("model: tiny", "model: base")
    (home / "run.yaml").write_text(text + "adapt: {lora: {rank: 4, targets: [q, v]}}\n")
    train(invoke, "run.yaml")
    said = json.loads((last(home / "run") / "adapter_config.json").read_text())
    assert said["target_modules"] == ["self_attn.q_proj", "self_attn.v_proj"] and said["r"] == 4
    refused = invoke("train", "run.yaml", "--set", "model=tiny", "--set", "output=other")
    assert refused.exit_code == 2 and "an adapter trains beside weights" in refused.output
    refused = invoke("train", "run.yaml", "--set", "model=run", "--set", "output=other")
    assert refused.exit_code == 2 and f"outsize merge {last(Path('run'))} --into" in refused.output
    with pytest.raises(OutsizeError, match="merge: model is a dict"):
        outsize.merge({})


def test_an_adapter_around_branches_is_trained_kept_and_merged_into_nothing(invoke, home, base):
    train(invoke, "run.yaml", "--set", "model=base", "--set", "adapt.serial.size=3",
          "--set", "optimizer.lr=0.05")  # fmt: skip
    checkpoint = last(home / "run")
    assert not list(checkpoint.glob("model*.safetensors")), "the base is stored once"
    states = sum(f.stat().st_size for f in checkpoint.glob("optimizer*.safetensors"))
    parameters = 2 * 2 * (2 * 3 * 32 + 3 + 32)
    assert 2 * 4 * parameters < states < 2 * 4 * parameters + 20_000
    words = ("--prompt", "line", "--max-tokens", "8", "--tokenizer", "bytes")
    found, plain = (invoke("generate", where, *words) for where in ("run", "base"))
    assert found.exit_code == 0 and found.output != plain.output
    refused = invoke("merge", "run", "--into", "merged")
    assert refused.exit_code == 2 and "what no weight of the model can take up" in refused.stderr
    assert not (home / "merged").exists()


def test_virtual_tokens_are_trained_gone_on_with_exported_and_generated_behind(invoke, home, base):
    sets = ("--set", "model=base", "--set", "adapt.prefix.tokens=3", "--set", "sample.tokens=4",
            "--set", "optimizer.lr=0.5", "--set", "learning_rate.shape=constant",
            "--set", "learning_rate.warmup=1")  # fmt: skip
    train(invoke, "run.yaml", *sets, "--set", "output=whole")
    train(invoke, "run.yaml", *sets, "--set", "train.steps=2", "--set", "output=parts")
    train(invoke, "--resume", "parts", "--set", "train.steps=3")
    assert files_of(home / "parts") == files_of(home / "whole")
    assert not list(last(home / "whole").glob("model*.safetensors")), "the base is stored once"
    words = ("--prompt", "line", "--max-tokens", "8", "--tokenizer", "bytes")
    texts = [invoke("generate", where, *words) for where in ("whole", "base")]
    assert texts[0].exit_code == 0 and texts[0].output != texts[1].output
    assert invoke("export", "whole", "--to", "peft", "--into", "out").exit_code == 0
    ids, ours = torch.arange(12)[None], outsize.load(home / "whole")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base)
    again = peft.PeftModel.from_pretrained(theirs, home / "out").eval()
    torch.testing.assert_close(again(ids).logits, ours(ids), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["lora", "dora", "ia3"])
def test_an_adapters_own_directory_is_opened_for_a_mesh(home, base, method):
    """Its base's weights take it up while they are read: by each worker its part of them."""
    made = outsize.adapt(outsize.load(base, torch.float64), method)
    with torch.no_grad():
        for name, value in made.named_parameters():
            if ".beside." in name:
                value.add_(torch.randn(value.shape, dtype=torch.float64), alpha=0.1)
    outsize.save(made, home / "own", adapter_only=True)
    ids = torch.arange(12)[None]
    expected, plain = made(ids), outsize.load(base, torch.float64)(ids)
    assert not torch.allclose(expected, plain, rtol=1e-3)
    with on_mesh(home / "own", Lone(), torch.float64) as model:
        torch.testing.assert_close(model(ids), expected, rtol=1e-10, atol=1e-10)
        assert model.origin == base


@pytest.mark.parametrize("said", ["[1]", "1", "rank", "null"])
def test_settings_that_are_no_mapping_say_what_there_is(invoke, home, said):
    refused = invoke("train", "run.yaml", "--set", f"adapt={{lora: {said}}}")
    assert refused.exit_code == 2
    assert "expected true, false, or a mapping of rank, alpha, targets" in refused.output


@pytest.mark.parametrize("weight", ["nan", "inf", "x", ""])
def test_a_weight_of_an_adapter_is_a_finite_number(invoke, home, base, weight):
    refused = invoke("generate", "base", "--adapter", f"own={weight}")
    assert refused.exit_code == 2 and f"'{weight}' is no finite number" in refused.output
