"""Models as other programs read them, and what each format of weights costs."""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import outsize
from outsize.checkpoint import gguf
from outsize.checkpoint.gguf_model import unpack
from outsize.cli.evaluate import keys_of
from outsize.cli.main import main
from outsize.data import open_data
from outsize.data.template import stored
from outsize.data.tokenizer import ends_in, open_tokenizer
from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.coding import decoded, format_of
from outsize.models.families import parse
from outsize.serve import export as exporting
from outsize.serve.export import export, merge
from outsize.train.recipe import data_config

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 257, "max_position_embeddings": 64,
    "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 256,
}  # fmt: skip


def saved(folder: Path, family: str, **facts: object) -> Path:
    model = build(parse({"model_type": family, **SIZES, **facts}), 3)
    with torch.no_grad():
        for one in model.parameters():
            if one.dim() == 1:
                one.add_(torch.rand(one.shape, generator=torch.Generator().manual_seed(5)))
    outsize.save(model, folder / family)
    return folder / family


def read(path: Path) -> tuple[dict, dict]:
    """A GGUF file by its specification: facts, and (shape, type, bytes) of the tensors."""
    raw, at = path.read_bytes(), 4

    def number(form: str):
        nonlocal at
        (value,) = struct.unpack_from(form, raw, at)
        at += struct.calcsize(form)
        return value

    def text() -> str:
        nonlocal at
        size = number("<Q")
        at += size
        return raw[at - size : at].decode()

    def value(kind: int):
        if kind == 8:
            return text()
        if kind == 9:
            inner = number("<I")
            return [value(inner) for _ in range(number("<Q"))]
        return number({4: "<I", 5: "<i", 6: "<f", 7: "<?"}[kind])

    assert raw[:4] == b"GGUF" and number("<I") == 3
    tensors, facts = number("<Q"), number("<Q")
    said = {}
    for _ in range(facts):
        name = text()
        said[name] = value(number("<I"))
    spans = {}
    for _ in range(tensors):
        name = text()
        shape = tuple(number("<Q") for _ in range(number("<I")))[::-1]
        spans[name] = (shape, number("<I"), number("<Q"))
    start = -(-at // 32) * 32
    ends = sorted([offset for *_, offset in spans.values()] + [len(raw) - start])
    held = {}
    for name, (shape, kind, offset) in spans.items():
        end = ends[ends.index(offset) + 1]
        held[name] = (shape, kind, raw[start + offset : start + end])
    return said, held


def floats(held: tuple) -> torch.Tensor:
    shape, kind, raw = held
    dtype = {0: torch.float32, 1: torch.float16}[kind]
    count = torch.Size(shape).numel()
    return torch.frombuffer(bytearray(raw), dtype=dtype)[:count].float().view(shape)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_gguf_file_has_the_models_facts_and_weights(family, tmp_path):
    directory = saved(tmp_path, family, tie_word_embeddings=family == "qwen2")
    (directory / "tokenizer.json").write_text(exporting_bytes())
    said = export(directory, "gguf:Q8_0", tmp_path / "m.gguf")
    assert said == [f"{tmp_path / 'm.gguf'}: Q8_0"]
    facts, held = read(tmp_path / "m.gguf")
    assert facts["general.architecture"] == family
    assert facts[f"{family}.attention.head_count_kv"] == 2
    assert facts[f"{family}.rope.dimension_count"] == 16
    assert len(facts["tokenizer.ggml.tokens"]) == 257
    assert (
        facts["tokenizer.ggml.token_type"][256] == 3 and facts["tokenizer.ggml.eos_token_id"] == 256
    )
    model = outsize.load(directory)
    assert ("output.weight" in held) is (family == "llama")
    assert torch.equal(floats(held["blk.1.ffn_norm.weight"]), model.blocks[1].mlp_norm.weight)
    shape, kind, raw = held["blk.1.attn_q.weight"]
    q = model.blocks[1].attention.q.weight.detach()
    if family == "llama":  # features that turn together lie in pairs there
        q = torch.stack((q.view(4, 2, 8, 64)[:, 0], q.view(4, 2, 8, 64)[:, 1]), 2).reshape(64, 64)
    form = format_of("q8_0")
    codes = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(64, -1)
    assert (shape, kind) == ((64, 64), 8)
    assert torch.equal(codes, form.encode(q)[0])


def test_what_a_tokenizer_says_of_texts_and_chats_comes_back(tmp_path):
    """Its start, all that ends an answer, and its template."""
    directory = saved(tmp_path, "llama", eos_token_id=[256, 3], vocab_size=258)
    words = json.loads(exporting_bytes())
    words["added_tokens"].append({**words["added_tokens"][0], "id": 257, "content": "<s>"})
    words["post_processor"] = {
        "type": "Sequence",
        "processors": [
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False},
            {"type": "TemplateProcessing", "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
             "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                        {"Sequence": {"id": "A", "type_id": 0}}],
             "special_tokens": {"<s>": {"id": "<s>", "ids": [257], "tokens": ["<s>"]}}},
        ],
    }  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(words))
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    export(directory, "gguf:Q8_0", tmp_path / "m.gguf")
    unpack(tmp_path / "m.gguf", tmp_path / "read")
    text = open_tokenizer(str(tmp_path / "read"))
    assert text.framed("a") == open_tokenizer(str(directory)).framed("a") and text.start == 257
    assert ends_in(tmp_path / "read", 258) == {256, 3}
    assert stored(tmp_path / "read") == "{{ messages[0].content }}"


def exporting_bytes() -> str:
    from outsize.train.tokenizer_files import byte_tokenizer

    return byte_tokenizer()


GEMMA = {"head_dim": 256, "sliding_window": 5}  # the size by which transformers scales scores
MOE = {"num_experts": 4, "moe_intermediate_size": 768, "num_experts_per_tok": 2}
KINDS = {  # by family: what it has beside the sizes; the architecture
    "llama": ({}, "llama"),
    "llama with biases": ({"attention_bias": True, "mlp_bias": True}, "llama"),
    "mistral": ({"sliding_window": 32}, "llama"),
    "mixtral": ({"num_local_experts": 4, "num_key_value_heads": 2}, "llama"),
    "qwen2": ({}, "qwen2"),
    "qwen3": ({"head_dim": 128}, "qwen3"),
    "qwen3_moe": ({**MOE, "norm_topk_prob": True, "head_dim": 16}, "qwen3moe"),
    "gemma2": (GEMMA, "gemma2"),
    "gemma3_text": ({**GEMMA, "num_hidden_layers": 7}, "gemma3"),
    "phi3": ({"partial_rotary_factor": 0.5}, "phi3"),
    "gpt2": ({"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}, "gpt2"),
    "starcoder2": ({}, "starcoder2"),
    "olmo2": ({}, "olmo2"),
}  # fmt: skip
# Whose facts transformers reads of a file.
THEIRS = ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text")
LAYER = "model.layers.1"
RAW = {  # tensors that are the directory's own, as llama.cpp's converter has them
    "phi3": {
        "blk.1.attn_qkv.weight": f"{LAYER}.self_attn.qkv_proj.weight",
        "blk.1.ffn_up.weight": f"{LAYER}.mlp.gate_up_proj.weight",
    },
    "gpt2": {
        "blk.1.attn_qkv.bias": "transformer.h.1.attn.c_attn.bias",
        "position_embd.weight": "transformer.wpe.weight",
    },
    "mixtral": {"blk.1.ffn_gate_inp.weight": f"{LAYER}.block_sparse_moe.gate.weight"},
}  # fmt: skip


@pytest.mark.parametrize("label", KINDS)
def test_files_of_every_family_are_read_to_the_same_logits(label, tmp_path):
    """By us and, where it knows the facts, by transformers; with names of ggml's own tables."""
    import gguf as package
    import transformers

    family, (facts, kin) = label.partition(" ")[0], KINDS[label]
    directory, file = saved(tmp_path, family, **facts), tmp_path / "m.gguf"
    said, model = export(directory, "gguf:F32", file), outsize.load(directory)
    short = family == "mistral"  # llama.cpp knows no window of it
    line = "its context is 32 tokens: the architecture has no window, which the model has"
    assert (line in said) == short
    arch = next(x for x, name in package.MODEL_ARCH_NAMES.items() if name == kin)
    known = {package.TENSOR_NAMES[one] for one in package.MODEL_TENSORS[arch]}
    read = package.GGUFReader(file)
    assert {
        re.sub(r"blk\.\d+", "blk.{bid}", x.name).rpartition(".")[0] for x in read.tensors
    } <= known
    assert read.fields[f"{kin}.context_length"].contents() == (32 if short else 64)
    held, hub = {x.name: x.data for x in read.tensors}, load_file(directory / "model.safetensors")
    for theirs, own in RAW.get(family, {}).items():
        assert torch.equal(torch.tensor(held[theirs]), hub[own])
    if family == "gpt2":
        own = hub["transformer.h.1.attn.c_attn.weight"]
        assert torch.equal(torch.tensor(held["blk.1.attn_qkv.weight"]), own.T)
    for ours, theirs in (
        zip("123", ("gate", "down", "up"), strict=True) if label == "mixtral" else ()
    ):
        own = hub[f"{LAYER}.block_sparse_moe.experts.3.w{ours}.weight"]
        assert torch.equal(torch.tensor(held[f"blk.1.ffn_{theirs}_exps.weight"][3]), own)
    ids = torch.randint(0, 257, (2, 9), generator=torch.Generator().manual_seed(1))
    unpack(file, tmp_path / "again", torch.float32)
    with torch.no_grad():
        wanted = model(ids)
        again = outsize.load(tmp_path / "again")(ids)
        torch.testing.assert_close(again, wanted, rtol=1e-5, atol=1e-5)
        if label in THEIRS:
            found = transformers.AutoModelForCausalLM.from_pretrained(
                tmp_path, gguf_file="m.gguf", dtype=torch.float32
            )
            torch.testing.assert_close(found(ids).logits, wanted, rtol=1e-4, atol=1e-4)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "again")
    assert (theirs.pad_token_id or 0) < theirs.vocab_size, "else it makes no model of it"


@pytest.mark.parametrize("family", ["phi3", "gpt2", "mixtral"])
def test_codes_of_joined_tensors_come_back(family, tmp_path):
    """Rows of one tensor as those of several modules; codes of experts as numbers."""
    export(saved(tmp_path, family, **KINDS[family][0]), "gguf:Q8_0", tmp_path / "m.gguf")
    ids = torch.arange(9).unsqueeze(0)
    found = []
    for name, dtype in (("codes", None), ("wide", torch.float32)):
        unpack(tmp_path / "m.gguf", tmp_path / name, dtype)
        found.append(outsize.load(tmp_path / name))
    assert (found[0].config.coding is None) == (family == "mixtral")
    with torch.no_grad():
        torch.testing.assert_close(found[0](ids), found[1](ids), rtol=1e-4, atol=1e-4)


def test_what_gguf_has_no_name_for_is_refused(tmp_path):
    rope = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    directory = saved(tmp_path, "opt", ffn_dim=96, word_embed_proj_dim=64)
    with pytest.raises(OutsizeError, match="no name here for the family opt"):
        export(directory, "gguf", tmp_path / "m.gguf")
    for family, facts, what in (
        ("llama", {"hidden_act": "gelu"}, "the activation gelu"),
        ("qwen3", {"attention_bias": True}, "other biases"),
        ("starcoder2", {"use_bias": False}, "other biases"),
        ("gemma2", {"head_dim": 16}, "scores scaled otherwise"),
        ("gemma2", {**GEMMA, "tie_word_embeddings": False}, "a head of its own"),
        ("gemma2", {**GEMMA, "final_logit_softcapping": None}, "no caps on scores and logits"),
        ("gemma3_text", {**GEMMA, "final_logit_softcapping": 3.0}, "caps on scores or logits"),
        ("gemma3_text", {**GEMMA, "rope_local_base_freq": 1e3}, "turns of another base"),
        ("gemma3_text", {**GEMMA, "sliding_window_pattern": 2}, "windows in other layers"),
        ("qwen3_moe", MOE, "experts chosen otherwise"),
    ):
        with pytest.raises(OutsizeError, match=f"the model has {what}"):
            gguf.check(parse({"model_type": family, **SIZES, **facts}), "F16")
    with pytest.raises(OutsizeError, match="has llama3, which is not written"):
        export(saved(tmp_path, "qwen2", rope_scaling=rope), "gguf", tmp_path / "m.gguf")
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
    with pytest.raises(OutsizeError, match="has yarn, which is not written"):
        export(saved(tmp_path, "llama", rope_scaling=rope), "gguf", tmp_path / "m.gguf")
    for kind, words in (("gguf:Q5", "gguf:Q5 is not known"), ("onnx", "'onnx' is not known")):
        with pytest.raises(OutsizeError, match=words):
            export(directory, kind, tmp_path / "m")
    with pytest.raises(OutsizeError, match="has no adapter"):
        export(directory, "peft", tmp_path / "m")
    assert not (tmp_path / "m.gguf").exists()


def test_codes_are_exported_as_what_they_stand_for(tmp_path, monkeypatch):
    directory = saved(tmp_path, "llama")
    outsize.save(outsize.load(directory, weights="int4:16"), tmp_path / "int4")
    assert len(export(tmp_path / "int4", "hf", tmp_path / "hf")) == 1
    plain, form = outsize.load(tmp_path / "hf"), format_of("int4:16")
    wanted = decoded(form, *form.encode(outsize.load(directory).blocks[0].mlp.up.weight.detach()))
    assert torch.equal(plain.blocks[0].mlp.up.weight, wanted)
    assert "quantization_config" not in plain.config.source
    real = exporting.save

    def damaged(model, place):
        with torch.no_grad():
            model.epilogue.norm.weight.mul_(1.5)
        real(model, place)
        with torch.no_grad():
            model.epilogue.norm.weight.div_(1.5)

    monkeypatch.setattr(exporting, "save", damaged)
    found = CliRunner().invoke(
        main, ["export", str(directory), "--to", "hf", "--into", str(tmp_path / "other")]
    )
    assert found.exit_code == 0 and "has other logits than the model" in found.output


def test_an_adapter_beside_codes_is_read_back_so_and_peft_is_told(tmp_path):
    base, ids = saved(tmp_path, "llama"), torch.arange(20)[None]
    (base / "tokenizer.json").write_text(exporting_bytes())
    made = outsize.adapt(outsize.load(base, weights="int4:16"), "dora", rank=2)
    for name, one in made.named_parameters():
        if ".beside." in name:
            torch.manual_seed(len(name))
            one.data.add_(torch.randn_like(one), alpha=0.1)
    outsize.save(made, tmp_path / "own")
    said = export(tmp_path / "own", "peft", tmp_path / "again")
    apart = (outsize.load(tmp_path / "own", weights="plain")(ids) - made(ids)).abs().max() > 0.01
    assert apart and len(said) == 2 and "trained beside int4" in said[1], said
    for folder in ("own", "again"):
        assert torch.equal(outsize.load(tmp_path / folder)(ids), made(ids))
        assert outsize.load(tmp_path / folder).generate("a", 2) == made.generate("a", 2)
        (tmp_path / folder / "tokenizer.json").read_bytes()
    put = outsize.adapt(outsize.load(base, weights="int4:16"), tmp_path / "own")
    assert torch.equal(put(ids), made(ids)), "beside the codes that it was trained beside"
    words = ["generate", str(base), "--prompt", "a", "--max-tokens", "1"]
    for more, code, reason in (
        ([], 0, "was trained beside int4:16, and the weights in"),
        (["--weights", "int4:16"], 2, "the weights are int4:16, which take up no adapter"),
    ):
        found = CliRunner().invoke(main, [*words, "--adapter", str(tmp_path / "own"), *more])
        assert found.exit_code == code and reason in found.output, found.output


def test_an_adapter_is_not_saved_as_beside_weights_that_took_up_another(tmp_path):
    base = saved(tmp_path, "llama")
    merged = outsize.merge(outsize.adapt(outsize.load(base), "lora", rank=2))
    outsize.remove_adapter(outsize.adapt(merged, "ia3"))
    assert merged.origin == base
    with pytest.raises(OutsizeError, match="have taken up another one"):
        outsize.save(outsize.adapt(merged, "lora", rank=2), tmp_path / "own")
    outsize.save(outsize.remove_adapter(merged), tmp_path / "merged")


def test_what_cannot_be_written_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    base = outsize.load(saved(tmp_path, "llama"))
    outsize.save(outsize.adapt(base, "serial", size=2), tmp_path / "own")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    monkeypatch.setattr(exporting.adapters, "load", None)
    for path, to, into, reason in (
        ("own", "hf", "new", "no weight of the model can take up"),
        ("own", "gguf", "new", "no weight of the model can take up"),
        ("own", "peft", "new", "give the run to outsize generate, chat or eval"),
        ("llama", "hf", "there", "exists already"),
        ("llama", "gguf", "there", "exists already"),
    ):
        with pytest.raises(OutsizeError, match=reason):
            export(tmp_path / path, to, tmp_path / into)
    with pytest.raises(OutsizeError, match="no weight of the model can take up"):
        merge(tmp_path / "own", tmp_path / "new")
    outsize.save(outsize.adapt(outsize.remove_adapter(base), "lora"), tmp_path / "mergeable")
    with pytest.raises(OutsizeError, match="exists already"):
        merge(tmp_path / "mergeable", tmp_path / "there")


def test_formats_are_a_table_of_bytes_and_bits(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for i in range(40):
        (text / f"{i}.txt").write_text(f"The {i}th of forty short texts.\n")
    directory = saved(tmp_path, "llama")
    asked = ["formats", str(directory), "--on", str(text), "--tokens", "64"]
    found = CliRunner().invoke(main, asked)
    assert found.exit_code == 0, found.output
    rows = {line.split()[0]: line.split() for line in found.output.splitlines() if line.strip()}
    assert set(rows) >= {"plain", "int8:32", "int4:32", "nf4:32", "q8_0", "q4_0"}
    assert "q4_k is left out: weights: q4_k has groups of 256" in found.output
    assert rows["plain"][3] == "32.000"
    blocks, rest = 2 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 96), 2 * 257 * 64 + 5 * 64
    bits = (blocks * 4.5 + rest * 32) / (blocks + rest)
    assert float(rows["q4_0"][3]) == pytest.approx(bits, abs=1e-3)
    model = outsize.load(directory, weights="int4:32")
    assert float(rows["int4:32"][1]) == pytest.approx(
        sum(p.nbytes for p in model.parameters()) / 1024, abs=0.01
    )
    assert "int8:32+a8" in rows and "of 16 requests behind 128 each" in found.output
    assert all(float(rate.replace(",", "")) > 0 for rate in rows["int8:32+a8"][-3:])
    assert float(rows["plain"][4]) > 6 and abs(float(rows["q8_0"][5].rstrip("%"))) < 5


def test_formats_are_measured_on_the_answers_of_chats(tmp_path):
    """Of the half that is held out, each by itself and in a plain loop."""
    directory, file = saved(tmp_path, "llama"), tmp_path / "chats.jsonl"
    records = [{"prompt": f"{i}?", "completion": f"that {i * i}"} for i in range(12)]
    file.write_text("".join(json.dumps(one) + "\n" for one in records))
    sets = ("data.chat.template=plain",)
    words = ["--on", str(file), "--set", *sets, "--tokenizer", "bytes", "--weights", "plain"]
    table = CliRunner().invoke(main, ["formats", str(directory), *words])
    assert table.exit_code == 0, table.output
    (row,) = (one.split() for one in table.output.splitlines() if one.startswith("plain"))
    keys = data_config(keys_of((str(file),), sets, 128), "bytes")
    held = open_data(replace(keys, validation=0.5)).validation
    model, nats, size, start = outsize.load(directory), 0.0, 0, 0
    for end in map(int, held.ends):
        ids = torch.tensor(held.tokens_N[start:end].astype("int64"))
        said = torch.tensor(held.weights_N[start + 1 : end]) > 0
        logits = model(ids[None])[0, :-1].detach()
        losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        nats, start = nats + float(losses[said].sum()), end
        size += len(bytes(i for i in ids[1:][said].tolist() if i < 256))
    assert 0 < held.documents < 12
    assert float(row[4]) == pytest.approx(nats / math.log(2) / size, abs=2e-4)


def test_what_gives_no_numbers_is_not_written(tmp_path):
    model = outsize.adapt(outsize.load(saved(tmp_path, "llama")), "lora", rank=2)
    for name, one in model.named_parameters():
        if name == "blocks.0.attention.q.beside.b.weight":
            one.data[0, 0] = 1e38
        elif name == "blocks.0.attention.q.beside.a.weight":
            one.data.fill_(1e38)
    outsize.save(model, tmp_path / "adapter")
    for write in (merge, lambda path, into: export(path, "gguf", into)):
        with pytest.raises(OutsizeError, match="gives logits that are not finite; expected"):
            write(tmp_path / "adapter", tmp_path / "written")
    assert not (tmp_path / "written").exists()
