"""Hugging Face directories: the same model on both sides, every byte the same; damage named; the
memory needed to load, save and build measured as the system sees it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from outsize.checkpoint import hub, writing
from outsize.checkpoint.hub import load, read_config, save
from outsize.checkpoint.shards import open_shards
from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.decoder import Decoder
from outsize.models.families import parse

SIZES = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES | HEADS,
    "gpt2": {"vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "mixtral": SIZES | HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": SIZES | HEADS,
    "deepseek_v3": SIZES
    | {"num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1}
    | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24}
    | {"num_experts_per_tok": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8}
    | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
}
INDEX, SINGLE, SUMS = "model.safetensors.index.json", "model.safetensors", "outsize.json"
IDS = torch.arange(20).view(2, 10) * 7 % 256


def their_model(family: str) -> Any:
    torch.manual_seed(5)
    facts = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(facts)
    with torch.no_grad():
        for parameter in model.parameters():  # constants would hide an exchange
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def stored(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    return found


@pytest.fixture
def saved(tmp_path: Path, tiny_config: dict[str, Any]) -> Path:
    """A Llama as we save it, in several shards."""
    path = tmp_path / "saved"
    save(build(parse(tiny_config), seed=0), path, max_shard_bytes=60_000)
    return path


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """The same family as transformers saves it, in one file, without checksums."""
    their_model("llama").save_pretrained(tmp_path / "foreign")
    return tmp_path / "foreign"


@pytest.mark.parametrize("size", ["5GB", "20KB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_with_transformers(family: str, size: str, tmp_path: Path) -> None:
    theirs = their_model(family)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    assert (tmp_path / "theirs" / INDEX).exists() == (size == "20KB")

    ours = load(tmp_path / "theirs")
    save(ours, tmp_path / "ours", max_shard_bytes=20_000 if size == "20KB" else 5 << 30)
    before, after = stored(tmp_path / "theirs"), stored(tmp_path / "ours")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) and after[n].dtype == torch.float32 for n in before)
    assert (tmp_path / "ours" / INDEX).exists() == (size == "20KB")

    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert again.dtype == torch.float32
    state = theirs.state_dict()
    assert state.keys() == again.state_dict().keys()
    assert all(torch.equal(state[n], x) for n, x in again.state_dict().items())

    with torch.no_grad():
        expected = theirs(IDS).logits
        assert torch.equal(again.eval()(IDS).logits, expected)
        found = load(tmp_path / "ours", dtype=torch.float64)(IDS)
    # float32 rounding on their side; tests/models compare in float64
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_shards_keep_to_their_size_and_config_to_its_words(saved: Path) -> None:
    files = sorted(saved.glob("*.safetensors"))
    assert [f.name for f in files] == [
        f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))
    ]
    for file in files:
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(x.nbytes for x in tensors.values()) <= 60_000
    index = json.loads((saved / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in stored(saved).values())
    config = json.loads((saved / "config.json").read_text())
    save(load(saved, dtype=torch.bfloat16), saved.with_name("half"))
    half = json.loads((saved.with_name("half") / "config.json").read_text())
    assert half == config | {"torch_dtype": "bfloat16"}


@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16, torch.float16])
def test_dtype_is_that_of_the_files_or_the_request(
    foreign: Path, dtype: torch.dtype | None
) -> None:
    tensors = {n: x.bfloat16() for n, x in stored(foreign).items()}
    save_file(tensors, foreign / SINGLE)
    model = load(foreign, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype or torch.bfloat16}
    embedding = tensors["model.embed_tokens.weight"]
    assert torch.equal(model.prologue.tokens.weight, embedding.to(dtype or torch.bfloat16))


@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16])
def test_a_routers_correction_is_float32_at_least(
    tmp_path: Path, dtype: torch.dtype | None
) -> None:
    config = parse({"model_type": "deepseek_v3"} | FAMILIES["deepseek_v3"])
    save(build(config, seed=0, dtype=torch.bfloat16), tmp_path / "a")
    correction = load(tmp_path / "a", dtype).get_parameter("blocks.1.mlp.router.correction")
    assert correction.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not correction.requires_grad


def test_tied_weights_are_one_parameter_and_written_once(tmp_path: Path) -> None:
    their_model("gpt2").save_pretrained(tmp_path / "a")
    model = load(tmp_path / "a")
    assert model.epilogue.head.weight is model.prologue.tokens.weight
    assert not any("lm_head" in name for name in stored(tmp_path / "a"))


def test_a_tied_head_in_the_file_must_be_the_embedding(tmp_path: Path) -> None:
    their_model("gpt2").save_pretrained(tmp_path)
    tensors = stored(tmp_path)
    head = tensors["transformer.wte.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, tmp_path / SINGLE)
    load(tmp_path)
    head[3, 3] += 1
    save_file(tensors | {"lm_head.weight": head}, tmp_path / SINGLE)
    with pytest.raises(OutsizeError, match=r"'lm_head\.weight' is not the token embedding"):
        load(tmp_path)


def test_files_of_a_base_model_and_with_derived_buffers(tmp_path: Path) -> None:
    for family, prefix, buffers in (
        ("gpt2", "transformer.", ["h.0.attn.bias", "h.1.attn.masked_bias"]),
        ("llama", "model.", ["model.layers.0.self_attn.rotary_emb.inv_freq"]),
    ):
        path = tmp_path / family
        their_model(family).save_pretrained(path)
        tensors, expected = stored(path), load(path)(IDS)
        short = {name.removeprefix(prefix): x for name, x in tensors.items()}
        save_file(short | {name: torch.ones(3) for name in buffers}, path / SINGLE)
        assert torch.equal(load(path)(IDS), expected)


def test_random_weights_only_when_asked(tmp_path: Path, tiny_config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config | {"torch_dtype": "bfloat16"}))
    with pytest.raises(OutsizeError, match=r"no weights: expected model\.safetensors or "):
        load(tmp_path)
    first, other = (load(tmp_path, weights="random", seed=seed) for seed in (0, 1))
    assert first.prologue.tokens.weight.dtype == torch.bfloat16
    assert not torch.equal(first.prologue.tokens.weight, other.prologue.tokens.weight)
    same = build(read_config(tmp_path), seed=0, dtype=torch.bfloat16)
    assert torch.equal(first.blocks[1].mlp.down.weight, same.blocks[1].mlp.down.weight)


# Bad input: one line, naming file and tensor


def rewrite(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        tensors = stored(path)
        change(tensors)
        save_file(tensors, path / SINGLE)

    return damage


def reindex(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    """One shard behind an index."""

    def damage(path: Path) -> None:
        os.rename(path / SINGLE, path / "m-1.safetensors")
        mapped = dict.fromkeys(load_file(path / "m-1.safetensors"), "m-1.safetensors")
        change(mapped)
        (path / INDEX).write_text(json.dumps({"weight_map": mapped}))

    return damage


def pickled(path: Path) -> None:
    (path / SINGLE).unlink()
    (path / "pytorch_model.bin").write_bytes(b"PK")


NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no directory": (lambda p: shutil.rmtree(p), "is not a directory"),
    "no config": (lambda p: (p / "config.json").unlink(), r"has no config\.json; expected"),
    "config cut": (lambda p: os.truncate(p / "config.json", 20), "config.json is not valid JSON"),
    "family": (
        lambda p: (p / "config.json").write_text('{"model_type": "bert"}'),
        "foreign.*'bert'",
    ),
    "pickle": (pickled, r"pickle \(pytorch_model\.bin\).*convert it to safetensors"),
    "truncated": (lambda p: os.truncate(p / SINGLE, 30_000), rf"{SINGLE} is truncated in tensor"),
    "missing": (rewrite(lambda t: t.pop(UP)), f"'{UP}' is missing"),
    "missing two": (rewrite(lambda t: [t.pop(UP), t.pop(NORM)]), "and 1 more are missing"),
    "extra": (rewrite(lambda t: t.update(x=torch.ones(2))), f"'x' is unexpected.*{SINGLE}"),
    "layers": (
        rewrite(lambda t: t.update({UP.replace("1", "2"): torch.ones(48, 32)})),
        r"'model\.layers\.2\.mlp\.up_proj\.weight' is unexpected",
    ),
    "shape": (
        rewrite(lambda t: t.update({UP: torch.ones(48, 31)})),
        rf"{SINGLE}: tensor '{UP}' has shape \(48, 31\), expected \(48, 32\)",
    ),
    "dtype": (
        rewrite(lambda t: t.update({UP: t[UP].to(torch.int8)})),
        f"'{UP}' has dtype torch.int8.*not quantised",
    ),
    "index cut": (reindex(lambda m: m.clear()), "no weight_map"),
    "shard": (
        reindex(lambda m: m.update(x="m-2.safetensors")),
        r"shard m-2\.safetensors is missing",
    ),
    "not there": (
        reindex(lambda m: m.update(x="m-1.safetensors")),
        r"m-1\.safetensors: no tensor 'x'",
    ),
    "outside": (reindex(lambda m: m.update(x="../m.safetensors")), "plain name"),
    "absolute": (reindex(lambda m: m.update(x="/etc/m.safetensors")), "plain name"),
    "not a name": (reindex(lambda m: m.update(x=[1])), "plain name"),
    "not safetensors": (reindex(lambda m: m.update(x="config.json")), "plain name"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_directories(kind: str, foreign: Path) -> None:
    BAD[kind][0](foreign)
    with pytest.raises(OutsizeError, match=BAD[kind][1]) as caught:
        load(foreign)
    message = str(caught.value)
    assert "foreign" in message and "\n" not in message


def test_a_symbolic_link_in_the_cache_layout_of_the_hub_is_followed(foreign: Path) -> None:
    expected = load(foreign)(IDS)
    os.rename(foreign / SINGLE, foreign.with_name("blob"))
    os.symlink("../blob", foreign / SINGLE)
    assert torch.equal(load(foreign)(IDS), expected)


def test_a_tensor_in_two_shards_is_the_one_of_the_index(foreign: Path) -> None:
    expected = load(foreign)(IDS)
    save_file({UP: torch.zeros(48, 32), NORM: stored(foreign)[NORM]}, foreign / "m-2.safetensors")
    reindex(lambda m: m.update({NORM: "m-2.safetensors"}))(foreign)
    assert open_shards(foreign).where[NORM].path.name == "m-2.safetensors"
    assert torch.equal(load(foreign)(IDS), expected)


def test_any_flipped_bit_in_what_we_saved_is_found(saved: Path) -> None:
    """Bits of every shard, in header and tensors: refused, naming the shard."""
    assert isinstance(load(saved), Decoder)
    for file in sorted(saved.glob("*.safetensors")):
        good = file.read_bytes()
        for bit in [*range(0, 8 * 300, 97), *range(0, 8 * len(good), 99_991)]:
            bad = bytearray(good)
            bad[bit // 8] ^= 1 << bit % 8
            file.write_bytes(bad)
            with pytest.raises(OutsizeError, match=re.escape(file.name)):
                load(saved)
        file.write_bytes(good)


def test_the_damaged_tensor_is_named(saved: Path) -> None:
    header = open_shards(saved).where[NORM]
    with header.path.open("r+b") as file:
        file.seek(header.entries[NORM].start)
        file.write(b"\x01")
    with pytest.raises(OutsizeError, match=rf"{header.path.name}: tensor '{NORM}' is damaged"):
        load(saved)


def test_a_file_of_another_model_is_not_what_we_saved(saved: Path) -> None:
    (file, *_) = sorted(saved.glob("*.safetensors"))
    tensors = load_file(file)
    save_file(dict(reversed(tensors.items())), file, {"format": "other"})
    with pytest.raises(OutsizeError, match=rf"{file.name} is not the file that outsize\.json desc"):
        load(saved)
    (saved / SUMS).unlink()
    load(saved)


@pytest.mark.parametrize("text", ["{}", '{"format": 1}', '{"format": 1, "files": 3}', "[", "[]"])
def test_damaged_checksums(saved: Path, text: str) -> None:
    (saved / SUMS).write_text(text)
    with pytest.raises(OutsizeError, match=r"outsize\.json"):
        load(saved)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, "bfloat16"])
def test_dtypes_that_are_none(foreign: Path, dtype: Any) -> None:
    with pytest.raises(OutsizeError, match=r"dtype = .*expected None or one of torch\.float64"):
        load(foreign, dtype=dtype)


# Saving


def test_save_never_overwrites(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, before = load(saved), sorted(saved.parent.rglob("*"))
    with pytest.raises(OutsizeError, match="exists already"):
        save(model, saved)
    with pytest.raises(OutsizeError, match="exists already"):
        save(model, saved / "config.json")
    assert sorted(saved.parent.rglob("*")) == before
    (saved.parent / "empty").mkdir()
    half = saved.parent / ".empty.part"  # of one that was killed
    half.mkdir()
    (half / "model-00001-of-00009.safetensors").write_bytes(b"half")
    with writing.scratch(saved.parent / "other"), pytest.raises(OutsizeError, match="is being wr"):
        save(model, saved.parent / "other")
    assert not (saved.parent / "other").exists()
    save(model, saved.parent / "empty")
    assert not list((saved.parent / "empty").glob("*-of-00009*")), "what was half-written is gone"
    save(model, saved.parent / "new" / "deep")
    with monkeypatch.context() as at:
        full = OSError(28, "No space left on device", "read", None, "written")  # as shutil has it
        at.setattr(shutil, "copyfile", Mock(side_effect=full))
        (saved / "tokenizer.json").touch()
        with pytest.raises(OSError, match="'written'"):
            hub.copy_words(saved, saved.parent)
    assert not list(saved.parent.rglob(".*")), "nothing half-made is left"
    assert torch.equal(load(saved.parent / "empty")(IDS), load(saved.parent / "new" / "deep")(IDS))


def test_a_failed_save_leaves_nothing(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, before = load(saved), sorted(saved.parent.rglob("*"))

    def full(path: Path, value: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hub, "write_json", full)
    with pytest.raises(OutsizeError, match=r"cannot save to .*: No space left on device"):
        save(model, saved.parent / "other")
    assert sorted(saved.parent.rglob("*")) == before


def test_save_refuses_shapes_without_values(tiny_config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(OutsizeError, match=r"prologue\.tokens\.weight has no value"):
        save(build(parse(tiny_config)), tmp_path / "a")
    with pytest.raises(OutsizeError, match="max_shard_bytes = 0"):
        save(build(parse(tiny_config), seed=0), tmp_path / "a", max_shard_bytes=0)
    assert not list(tmp_path.iterdir())


# Memory, as the system sees it

PEAKS = """
import ctypes, gc, json, sys
from pathlib import Path
import torch
from outsize.checkpoint.hub import load, read_config, save
from outsize.models.build import build, segments
from outsize.models.names import layout

libc = ctypes.CDLL(None)
libc.mallopt(-3, 1 << 16)  # what is freed goes back at once; else MiBs stay, others in each run
torch.set_num_threads(1)

def status(key):
    line = next(x for x in open("/proc/self/status") if x.startswith(key))
    return int(line.split()[1]) * 1024

def peak(action):
    gc.collect(); libc.malloc_trim(0)
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    result = action()
    return result, status("VmHWM") - before

for path in map(Path, sys.argv[1:]):
    small = path.with_suffix(".small")  # brings in whatever is imported and made once
    save(build(read_config(small), seed=0), small / "model")
    load(small / "model")
    model, built = peak(lambda: build(read_config(path), seed=0))
    del model
    model, loaded = peak(lambda: load(path))
    _, saved = peak(lambda: save(model, path / "again", max_shard_bytes=16 << 20))
    parts = dict(model.named_parameters())
    sizes = {s: sum(parts[n].nbytes for n in names) for s, names in segments(model)}
    print(json.dumps({"built": built, "loaded": loaded, "saved": saved,
                      "model": sum(sizes.values()), "block": max(sizes.values()),
                      "compiler": "torch._dynamo" in sys.modules}))
    del model, parts
"""
WIDE = {"hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 5, "vocab_size": 512}
LARGE: dict[str, dict[str, Any]] = {  # experts to be stacked; fused and transposed weights
    "mixtral": FAMILIES["mixtral"] | WIDE | {"intermediate_size": 480},
    "gpt2": FAMILIES["gpt2"] | {"n_embd": 384, "n_layer": 5},
}
MIB = 1 << 20


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_peak_memory_is_the_model_and_one_block(tmp_path: Path) -> None:
    """Resident memory in a fresh process. Models have 5 blocks, so that a second copy of the model
    would be found 4 times over; 5 MiB are left for pieces in flight and the allocator."""
    for family, facts in LARGE.items():
        save(build(parse({"model_type": family} | facts), seed=0), tmp_path / family)
        (tmp_path / f"{family}.small").mkdir()
        small = json.dumps({"model_type": family} | FAMILIES[family])
        (tmp_path / f"{family}.small" / "config.json").write_text(small)
    command = [sys.executable, "-c", PEAKS, *(str(tmp_path / family) for family in LARGE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for family, line in zip(LARGE, done.stdout.splitlines(), strict=True):
        found = json.loads(line)
        model, block = found["model"], found["block"]
        assert model > 4 * block > 24 * MIB, (family, found)
        assert found["built"] < model + 5 * MIB, (family, found)
        assert found["loaded"] < model + block + 5 * MIB, (family, found)
        assert found["saved"] < block + 5 * MIB, (family, found)
        assert not found["compiler"], f"{family} imported torch.compile"
