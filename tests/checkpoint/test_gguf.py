"""GGUF files as they are read: written by ggml's own package, read by it and by transformers."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from click.testing import CliRunner
from gguf import GGMLQuantizationType as Types
from gguf import quants
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import outsize
from outsize.checkpoint import gguf_model, gguf_words
from outsize.checkpoint.gguf_file import open_gguf
from outsize.checkpoint.gguf_model import unpack
from outsize.cli.main import main
from outsize.data.template import template_of
from outsize.data.tokenizer import open_tokenizer
from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.families import parse
from outsize.serve.export import export

HIDDEN, INNER, HEADS, KV, LAYERS, VOCAB = 256, 512, 4, 2, 2, 40
MATRICES = {
    "attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN // 2, HIDDEN), "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}  # fmt: skip
MIXED = ["Q4_K", "Q6_K", "Q8_0", "Q5_K", "Q4_0", "F16", "BF16"]
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}  # fmt: skip


def coded(values: np.ndarray, kind: str, draw: np.random.Generator) -> np.ndarray:
    """Of a type: those that the package does not write are drawn as bytes with small scales."""
    type_ = Types[kind]
    if kind not in ("Q4_K", "Q5_K", "Q6_K"):
        return quants.quantize(values, type_)
    group, block = gguf.GGML_QUANT_SIZES[type_]
    made = draw.integers(0, 256, (values.size // group, block), dtype=np.uint8)
    for at in (1,) if kind == "Q6_K" else (1, 3):
        place = block - 2 + at if kind == "Q6_K" else at
        made[:, place] = 0x04  # float16 of about 6e-5
    return made.reshape(values.shape[0], -1)


def written(path: Path, kinds: list[str], words: list[str] = (), **facts: Any) -> Path:  # type: ignore[assignment]
    """A llama's file. kinds: of the matrices, in turn; facts: others, None: without."""
    draw = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    known = {
        "context_length": 128, "embedding_length": HIDDEN, "block_count": LAYERS,
        "feed_forward_length": INNER, "attention.head_count": HEADS,
        "attention.head_count_kv": KV,
    }  # fmt: skip
    for name, value in {**known, **facts}.items():
        if value is not None and not isinstance(value, str):
            writer.add_uint32(f"llama.{name}", value)
        elif value is not None:
            writer.add_string(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    words = list(words) or [f"w{i}" for i in range(VOCAB)]
    writer.add_token_list(words)
    writer.add_eos_token_id(2)

    def add(name: str, shape: tuple[int, ...], kind: str) -> None:
        values = draw.normal(0, 0.05, shape).astype(np.float32)
        if kind == "F32":
            writer.add_tensor(name, values + (len(shape) == 1))
        elif kind == "F16":
            writer.add_tensor(name, values.astype(np.float16))
        else:
            writer.add_tensor(name, coded(values, kind, draw), raw_dtype=Types[kind])

    add("token_embd.weight", (len(words), HIDDEN), "F16")
    add("output_norm.weight", (HIDDEN,), "F32")
    add("output.weight", (len(words), HIDDEN), kinds[-1])
    for layer in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{norm}.weight", (HIDDEN,), "F32")
        for number, (name, shape) in enumerate(MATRICES.items()):
            add(f"blk.{layer}.{name}.weight", shape, kinds[number % len(kinds)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_of_every_type_has_the_logits_of_transformers(tmp_path: Path) -> None:
    file = written(tmp_path / "m.gguf", MIXED)
    said = unpack(file, tmp_path / "m", torch.float32)
    assert said[0].endswith(f"llama, matrices of {', '.join(sorted(MIXED))} as float32")
    # transformers wants a tokenizer that it knows for a vocabulary; the weights alone are compared
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32
    )
    ids = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = outsize.load(tmp_path / "m")
        torch.testing.assert_close(theirs(ids).logits, ours(ids), rtol=1e-4, atol=1e-4)
    own = dict(ours.named_parameters())
    for tensor in gguf.GGUFReader(file).tensors:
        if tensor.name == "blk.1.attn_v.weight":
            wanted = quants.dequantize(tensor.data, tensor.tensor_type)
            assert np.array_equal(own["blocks.1.attention.v.weight"].detach().numpy(), wanted)
    assert unpack(file, tmp_path / "short")[0].endswith("as bfloat16")
    assert next(outsize.load(tmp_path / "short").parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
def test_codes_of_one_type_stay_these_codes(tmp_path: Path, kind: str) -> None:
    file = written(tmp_path / "m.gguf", [kind])
    assert unpack(file, tmp_path / "m") == [
        f"{tmp_path / 'm'}: llama, matrices of {kind} as {kind}",
        "its tokenizer is None, which is not read; give --tokenizer DIR",
    ]
    unpack(file, tmp_path / "wide", torch.float32)
    codes, wide = outsize.load(tmp_path / "m"), outsize.load(tmp_path / "wide")
    assert codes.config.coding is not None and codes.config.coding.format.name == kind.lower()
    for tensor in gguf.GGUFReader(file).tensors:
        if tensor.name == "blk.0.ffn_down.weight":
            held = dict(codes.named_parameters())["blocks.0.mlp.down.codes"]
            assert np.array_equal(held.numpy(), tensor.data)
    ids = torch.arange(11).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(codes(ids), wide(ids), rtol=1e-4, atol=1e-4)


def test_llama_3s_factors_are_known_again(tmp_path: Path) -> None:
    """Those of a file are what transformers makes of the config that they stand for."""
    config = transformers.LlamaConfig(
        head_dim=64, hidden_size=256, num_attention_heads=4,
        rope_parameters={**ROPE, "rope_theta": 1e4},
    )  # fmt: skip

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1e4 ** -(torch.arange(0, 64, 2) / 64)
    factors = gguf_model._llama3(64, 1e4, 8.0, 8192)
    torch.testing.assert_close((plain / scaled).double(), factors, rtol=1e-4, atol=0)


@pytest.mark.parametrize("trained", [8192, 256])
def test_llama_3s_way_of_stretching_turns_is_written(trained: int, tmp_path: Path) -> None:
    """As factors, since no fact says it; transformers makes the same of the config."""
    rope = {**ROPE, "original_max_position_embeddings": trained}
    facts = {
        "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 64,
        "num_key_value_heads": 1, "intermediate_size": 32, "vocab_size": 50, "eos_token_id": 0,
        "max_position_embeddings": 131072, "rope_theta": 1e4,
    }  # fmt: skip
    model = build(parse({"model_type": "llama", **facts, "rope_scaling": rope}), 0)
    outsize.save(model, tmp_path / "model")
    export(tmp_path / "model", "gguf:F32", tmp_path / "m.gguf")
    config = transformers.LlamaConfig(**facts, rope_parameters={**rope, "rope_theta": 1e4})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1e4 ** -(torch.arange(0, 64, 2) / 64)
    (found,) = (x for x in gguf.GGUFReader(tmp_path / "m.gguf").tensors if "rope" in x.name)
    assert found.name == "rope_freqs.weight" and found.tensor_type == Types.F32
    torch.testing.assert_close(torch.tensor(found.data), plain / scaled, rtol=1e-5, atol=0)
    unpack(tmp_path / "m.gguf", tmp_path / "again", torch.float32)
    ids = torch.arange(40).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(outsize.load(tmp_path / "again")(ids), model(ids))


def test_what_is_not_read_is_said(tmp_path: Path) -> None:
    for name, value, words in (
        ("expert_count", 8, "llama.expert_used_count is missing; expected int"),
        ("attention.sliding_window", 8, "llama.attention.sliding_window is not read"),
        ("embedding_length", None, "llama.embedding_length is missing; expected int"),
        ("embedding_length", "wide", "llama.embedding_length is 'wide'; expected int"),
        ("feed_forward_length", 256, "has the shape (512, 256); expected (256, 256)"),
        ("block_count", 3, "the tensor 'blk.2.attn_norm.weight' is missing"),
        ("block_count", 1, "is unexpected"),
        ("rope.scaling.type", "yarn", "llama.rope.scaling.type is 'yarn'"),
        ("rope.dimension_count", 32, "heads of 64 numbers that turn in part"),
    ):
        file = written(tmp_path / "m.gguf", ["Q8_0"], **{name: value})
        with pytest.raises(OutsizeError) as error:
            unpack(file, tmp_path / "m")
        assert words in str(error.value) and not (tmp_path / "m").exists()


def test_what_lies_is_found_out(tmp_path: Path) -> None:
    file = written(tmp_path / "m.gguf", ["Q8_0"])
    raw, changed = file.read_bytes(), tmp_path / "changed.gguf"

    def refused(data: bytes, words: str) -> None:
        changed.write_bytes(data)
        with pytest.raises(OutsizeError) as error:
            unpack(changed, tmp_path / "out")
        assert words in str(error.value) and "\n" not in str(error.value)
        assert not (tmp_path / "out").exists()

    huge, name = struct.pack("<Q", 1 << 60), b"blk.0.attn_q.weight"
    place = raw.index(name) + len(name)  # dimensions, 2 sizes, type, offset
    refused(b"GGML" + raw[4:], "is no GGUF file")
    refused(raw[:4] + struct.pack("<I", 1) + raw[8:], "GGUF version 1")
    refused(raw[:8] + huge + raw[16:], "of tensors, more than it has bytes for")
    refused(raw[:16] + huge + raw[24:], "of facts, more than it has bytes for")
    refused(raw[:24] + huge + raw[32:], "of characters, more than it has bytes for")
    refused(raw[: place + 10], "within what it says of itself")
    refused(raw[:-5000], "the file is cut, or says it wrongly")
    refused(raw[: place + 4] + huge + raw[place + 12 :], "more than the file holds")
    refused(raw[: place + 20] + struct.pack("<I", 99) + raw[place + 24 :], "is type 99")
    refused(raw[: place + 20] + struct.pack("<I", 10) + raw[place + 24 :], "is Q2_K")
    refused(raw[: place + 24] + struct.pack("<Q", 32) + raw[place + 32 :], "overlap")
    refused(raw[: place + 24] + struct.pack("<Q", 7) + raw[place + 32 :], "says it wrongly")
    seeded = random.Random(4)
    for _ in range(300):  # whatever stands in its head, one line is what comes of it
        at = seeded.randrange(4, place + 40)
        changed.write_bytes(raw[:at] + bytes([seeded.randrange(256)]) + raw[at + 1 : place + 4096])
        with pytest.raises(OutsizeError):
            gguf_model.config_of(open_gguf(changed))


TEXTS = ["def f(x): return x + 123", "It's ÄÖ-fine,\n\n  12345 and \t more", "日本語 x", "<|end|>x"]


def level(split: str) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE())
    if split == "qwen2":
        inner.normalizer = normalizers.NFC()
    pattern = tokenizers.Regex(gguf_words.SPLITS[split])
    inner.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(pattern, "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    inner.train_from_iterator(TEXTS * 3, trainer)
    return inner


def word_facts(path: Path, facts: dict[str, Any]) -> Path:
    """A file of a tokenizer alone."""
    writer = gguf.GGUFWriter(path, "llama")
    add = {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool,
           list: writer.add_array}  # fmt: skip
    for name, value in facts.items():
        add[type(value)](name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("split", ["gpt-2", "llama-bpe", "qwen2"])
def test_byte_level_tokenizers_come_back(tmp_path: Path, split: str) -> None:
    inner = level(split)
    said = json.loads(inner.to_str())["model"]
    words = [inner.id_to_token(i) for i in range(inner.get_vocab_size())]
    file = word_facts(tmp_path / "m.gguf", {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": split,
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [3 if one == "<|end|>" else 1 for one in words],
        "tokenizer.ggml.merges": [" ".join(one) for one in said["merges"]],
        "tokenizer.ggml.eos_token_id": words.index("<|end|>"),
        "tokenizer.chat_template": "{{ messages[0].content }}{{ eos_token }}",
    })  # fmt: skip
    assert gguf_words.write_words(open_gguf(file), tmp_path) == ""
    found = open_tokenizer(str(tmp_path))
    for text in TEXTS:
        ids = inner.encode(text).ids
        assert found.encode(text) == ids == found.framed(text)
        assert found.decode(ids) == text.replace("<|end|>", "")
    assert found.eos == words.index("<|end|>")
    template = template_of(str(tmp_path), found)
    assert template is not None
    assert template.render("x", [{"content": "a"}], None, False)[0] == "a<|end|>"


def exported(home: Path, inner: tokenizers.Tokenizer) -> tuple[list[str], Path]:
    """What is said of the file of a small model with a tokenizer, and the file."""
    sizes = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 16, "max_position_embeddings": 32, "eos_token_id": 0,
        "vocab_size": inner.get_vocab_size(),
    }  # fmt: skip
    outsize.save(build(parse({"model_type": "llama", **sizes}), 0), home / "model")
    inner.save(str(home / "model" / "tokenizer.json"))
    (home / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    return export(home / "model", "gguf:F32", home / "m.gguf"), home / "m.gguf"


@pytest.mark.parametrize("split", ["gpt-2", "llama-bpe", "qwen2", "smollm"])
def test_a_tokenizer_that_is_written_comes_back(tmp_path: Path, split: str) -> None:
    """By what llama.cpp calls its way of splitting, in which its "default" is yet another one."""
    inner = level("gpt-2" if split == "smollm" else split)
    if split in ("gpt-2", "smollm"):
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False)
        single = [pre_tokenizers.Digits(individual_digits=True)] if split == "smollm" else []
        inner.pre_tokenizer = pre_tokenizers.Sequence([*single, whole])
    inner.add_tokens([AddedToken("<think>", normalized=False)])
    if split == "llama-bpe":
        inner.add_special_tokens([AddedToken("<|begin|>", normalized=False)])
        begin = ("<|begin|>", inner.token_to_id("<|begin|>"))
        inner.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[begin]
        )
    said, file = exported(tmp_path, inner)
    assert len(said) == 1
    facts = gguf.GGUFReader(file).fields
    kinds = dict(zip(facts["tokenizer.ggml.tokens"].contents(),
                     facts["tokenizer.ggml.token_type"].contents(), strict=True))  # fmt: skip
    assert facts["tokenizer.ggml.pre"].contents() == split
    assert (kinds["<|end|>"], kinds["<think>"], kinds["a"]) == (3, 4, 1)
    assert facts["tokenizer.ggml.add_bos_token"].contents() == (split == "llama-bpe")
    unpack(file, tmp_path / "again")
    found = open_tokenizer(str(tmp_path / "again"))
    for text in (*TEXTS, "a<think>b 2024"):
        assert found.framed(text) == inner.encode(text).ids
        assert found.encode(text) == inner.encode(text, add_special_tokens=False).ids
    template = template_of(str(tmp_path / "again"), found)
    assert template is not None
    assert template.render("x", [{"content": "a"}], None, False)[0] == "a<|end|>"


def test_a_way_of_splitting_without_a_name_is_said(tmp_path: Path) -> None:
    inner = level("gpt-2")
    inner.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(r"\d+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])  # fmt: skip
    said, file = exported(tmp_path, inner)
    assert said[1:] == ["the tokenizer is left out: gguf has no name here for how it splits texts"]
    assert "tokenizer.ggml.model" not in gguf.GGUFReader(file).fields


def test_pieces_with_scores_come_back(tmp_path: Path) -> None:
    """SentencePiece's BPE: its merges follow from the scores of its pieces."""
    inner = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    specials = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=specials, show_progress=False)
    inner.train_from_iterator([TEXTS[0], "and more and so on, it is so"] * 4, trainer)
    learned = [inner.id_to_token(i) for i in range(3, inner.get_vocab_size())]
    words = [*specials, *(f"<0x{i:02X}>" for i in range(256)), *learned]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(learned)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(learned))]
    source = json.loads(inner.to_str())
    source["model"]["vocab"] = {word: i for i, word in enumerate(words)}
    source["added_tokens"] = []
    source["decoder"] = json.loads(decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]).__getstate__())  # fmt: skip
    wanted = tokenizers.Tokenizer.from_str(json.dumps(source))
    wanted.add_special_tokens([AddedToken(x, special=True, normalized=False) for x in specials[1:]])
    file = word_facts(tmp_path / "m.gguf", {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    })  # fmt: skip
    assert gguf_words.write_words(open_gguf(file), tmp_path) == ""
    found = open_tokenizer(str(tmp_path))
    for text in (*TEXTS[:3], "and more </s> on"):
        ids = wanted.encode(text).ids
        assert found.encode(text) == ids and found.framed(text) == [1, *ids]
        assert found.decode(ids) == wanted.decode(ids)
    assert (found.start, found.eos) == (1, 2)


def test_tokenizers_that_are_not_read(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"

    def said(**facts: Any) -> str:
        named = {f"tokenizer.ggml.{name}": value for name, value in facts.items()}
        return gguf_words.write_words(open_gguf(word_facts(file, named)), tmp_path)

    assert "splits texts as 'tekken'" in said(model="gpt2", pre="tekken", tokens=["a"])
    assert "its tokenizer is 'bert'" in said(model="bert", tokens=["a"])
    with pytest.raises(OutsizeError, match="joins tokens that are not there"):
        said(model="gpt2", tokens=["a", "b"], merges=["a b"])
    with pytest.raises(OutsizeError, match="token_type has 1 of 2"):
        said(model="llama", tokens=["a", "b"], token_type=[1])
    assert not (tmp_path / "tokenizer.json").exists()


def test_commands_take_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_model, "CACHE", tmp_path / "cache")
    file = written(tmp_path / "m.gguf", ["Q8_0"], [f"w{i}" for i in range(257)])
    command = ["generate", str(file), "--prompt", "a", "--max-tokens", "3", "--tokenizer", "bytes"]
    first = CliRunner().invoke(main, command)
    assert first.exit_code == 0 and f"unpacking {file}" in first.stderr
    again = CliRunner().invoke(main, command)
    assert again.stdout == first.stdout and "unpacking" not in again.stderr
    into = tmp_path / "into"
    found = CliRunner().invoke(main, ["convert", str(file), "--into", str(into)])
    assert found.exit_code == 0 and "matrices of Q8_0 as Q8_0" in found.stdout
    for more, words in (
        (("--dtype", "int9"), "--dtype is 'int9'; expected one of float32"),
        ((), "exists already"),
    ):
        found = CliRunner().invoke(main, ["convert", str(file), "--into", str(into), *more])
        assert found.exit_code == 2 and words in found.stderr
    found = CliRunner().invoke(main, ["convert", str(into), "--into", "x", "--dtype", "float32"])
    assert found.exit_code == 2 and "--dtype is of a .gguf file alone" in found.stderr
