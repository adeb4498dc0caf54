"""Tokenizers: bytes, and tokenizer.json files made here and compared with transformers' reading
of the same directory."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from outsize.data import ByteTokenizer, FileTokenizer, check_vocabulary, open_tokenizer
from outsize.data.tokenizer import Tokenizer
from outsize.decode.text import begun
from outsize.errors import OutsizeError
from outsize.train.tokenizer_files import write_tokenizer

CORPUS = ["the cat sat on the mat, naïve café €5 \U0001f600", "def main():\n    return 1\n"] * 20
TEXTS = ["the mat", "naïve €\U0001f600\U0001f601 x", "  two  spaces\n", "日本語", "a", "def cat"]


def byte_level(directory: Path, settings: dict | None = None, bos: bool = False) -> Path:
    """Like GPT-2's (Llama 3's with bos)."""
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|begin|>", "<|end|>"]
    inner.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=special),
    )
    if bos:
        inner.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
        )
    inner.enable_truncation(4)  # as many files carry; must not cut documents
    inner.enable_padding(length=50, pad_id=1, pad_token="<|end|>")
    return written(inner, directory, {"eos_token": "<|end|>"} if settings is None else settings)


def metaspace(directory: Path) -> Path:
    """Like Llama 2's: spaces as a character, unknown ones as bytes."""
    letters = sorted({c for text in CORPUS for c in text if ord(c) < 128})
    names = ["<s>", "</s>", "<unk>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", *letters]
    vocab = {name: number for number, name in enumerate(dict.fromkeys(names))}
    inner = Inner(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    inner.add_special_tokens(["<s>", "</s>"])
    return written(inner, directory, {"eos_token": {"content": "</s>"}, "bos_token": "<s>"})


def written(inner: Inner, directory: Path, settings: dict) -> Path:
    directory.mkdir(exist_ok=True)
    inner.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture(params=["bytes", "byte level", "metaspace"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param == "bytes":
        return ByteTokenizer()
    make = byte_level if request.param == "byte level" else metaspace
    return FileTokenizer.load(make(tmp_path))


@pytest.mark.parametrize("text", TEXTS)
def test_words_make_the_text(tokenizer: Tokenizer, text: str) -> None:
    """Each token by itself, bytes of a character and spaces in front of words among them."""
    words = [tokenizer.word(token) for token in tokenizer.encode(text)]
    said = b"".join(words).decode()
    assert said in (text, " " + text)  # as its tokenizer reads it


def test_special_tokens_are_words(tmp_path: Path) -> None:
    assert ByteTokenizer().word(256) == b"<|end|>"
    assert FileTokenizer.load(byte_level(tmp_path)).word(1) == b"<|end|>"


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
    assert tokenizer.eos not in ids and tokenizer.eos < tokenizer.vocab_size


def test_many_texts_are_encoded_as_each(tokenizer: Tokenizer) -> None:
    assert [ids.tolist() for ids in tokenizer.encode_many(TEXTS)] == [
        tokenizer.encode(text) for text in TEXTS
    ]


@pytest.mark.parametrize("text", TEXTS)
def test_every_byte_is_counted_to_one_token(tokenizer: Tokenizer, text: str) -> None:
    placed = tokenizer.encode_placed(text)
    ids, widths = placed.ids, placed.widths
    assert ids.tolist() == tokenizer.encode(text)
    assert len(widths) == len(ids) and int(widths.sum()) == len(text.encode())


def test_widths_are_the_bytes_of_each_token(tmp_path: Path) -> None:
    inner = Inner(models.WordLevel({"a": 0, "é€": 1, "cat": 2, "E": 3}, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = FileTokenizer.load(written(inner, tmp_path, {"eos_token": "E"}))
    placed = tokenizer.encode_placed("cat é€  a\n")
    # A space that no token covers counts to the token after it, the last newline to the last.
    assert placed.ids.tolist() == [2, 1, 0] and placed.widths.tolist() == [3, 6, 4]
    assert tokenizer.encode_placed("  ").ids.size == 0


def test_a_token_that_stands_for_no_text_has_no_width(tmp_path: Path) -> None:
    class Encoding:
        ids = (5, 6, 7)
        offsets = ((0, 2), (0, 0), (2, 3))  # the middle one was put in by the tokenizer

    class Stub(FileTokenizer):
        def __init__(self) -> None:
            self._inner = self  # type: ignore[assignment]

        def encode(self, text: str, add_special_tokens: bool = True) -> Encoding:  # type: ignore
            return Encoding()

    assert Stub().encode_placed("a€b").widths.tolist() == [4, 0, 1]


@pytest.mark.parametrize("text", TEXTS)
def test_streaming_says_the_same_as_decoding_all(tokenizer: Tokenizer, text: str) -> None:
    stream = tokenizer.stream()
    parts = [stream.push(token) for token in tokenizer.encode(text)]
    assert "".join(parts) + stream.finish() == text
    assert not any("\ufffd" in part for part in parts)


def test_streaming_random_ids_loses_nothing() -> None:
    draw = random.Random(0)
    for _ in range(50):
        ids = [draw.randrange(257) for _ in range(40)]
        stream = ByteTokenizer().stream()
        said = "".join(stream.push(token) for token in ids) + stream.finish()
        assert said == ByteTokenizer().decode(ids)
        assert said == bytes(i for i in ids if i < 256).decode("utf-8", "replace")


def test_streaming_shows_a_character_when_it_is_whole() -> None:
    stream = ByteTokenizer().stream()
    assert [stream.push(byte) for byte in "a€".encode()] == ["a", "", "", "€"]
    assert stream.push(0xE2) == "" and stream.push(256) == "" and stream.finish() == "\ufffd"


def test_a_cut_character_is_replaced_at_the_end(tmp_path: Path) -> None:
    tokenizer = FileTokenizer.load(byte_level(tmp_path))
    ids = tokenizer.encode("x日")
    stream = tokenizer.stream()
    assert "".join(stream.push(token) for token in ids[:-1]) == "x"
    assert stream.finish() == "\ufffd"


def test_agrees_with_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    directory = byte_level(tmp_path, bos=True)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"), eos_token="<|end|>"
    )
    ours = FileTokenizer.load(directory)
    for text in [*TEXTS, "one<|end|>two", "long " * 50]:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == ids
        assert [ours.start, *ours.encode(text)] == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.eos == theirs.eos_token_id and ours.vocab_size == len(theirs)


def test_start_is_what_the_tokenizer_puts_in_front_else_eos(tmp_path: Path) -> None:
    plain = FileTokenizer.load(byte_level(tmp_path / "plain"))
    with_bos = FileTokenizer.load(byte_level(tmp_path / "bos", bos=True))
    assert (plain.start, plain.eos, plain.front) == (1, 1, ())
    assert (with_bos.start, with_bos.eos, with_bos.front) == (0, 1, (0,))
    write_tokenizer("bytes", tmp_path)
    assert FileTokenizer.load(tmp_path).front == ByteTokenizer.front == (256,)
    assert begun(plain, []) == [1] and begun(with_bos, []) == [0], "something is fed"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("special_tokens_map.json", {"eos_token": {"content": "<|end|>"}}),
        ("config.json", {"eos_token_id": 1}),
        ("generation_config.json", {"eos_token_id": [1, 0]}),
    ],
)
def test_eos_is_found_wherever_it_is_said(tmp_path: Path, name: str, settings: dict) -> None:
    directory = byte_level(tmp_path, settings={})
    with pytest.raises(OutsizeError, match="no end-of-document token found; set eos_token"):
        FileTokenizer.load(directory)
    (directory / name).write_text(json.dumps(settings))
    assert FileTokenizer.load(directory).eos == 1


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(OutsizeError, match=r"no tokenizer\.json there"):
        open_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(OutsizeError, match=r"tokenizer\.json is no tokenizer"):
        open_tokenizer(str(tmp_path))
    byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(OutsizeError, match=r"tokenizer_config\.json is not JSON"):
        open_tokenizer(str(tmp_path))


def test_a_tokenizer_larger_than_the_model_is_refused() -> None:
    check_vocabulary(ByteTokenizer(), 257)
    with pytest.raises(OutsizeError, match="257 ids, more than the model's vocabulary of 256"):
        check_vocabulary(ByteTokenizer(), 256)


def test_fingerprints_tell_tokenizers_apart(tmp_path: Path) -> None:
    one, two = byte_level(tmp_path / "one"), byte_level(tmp_path / "two", bos=True)
    prints = {open_tokenizer(name).fingerprint() for name in ("bytes", str(one), str(two))}
    assert len(prints) == 3
    assert open_tokenizer(str(one)).fingerprint() in prints
    (one / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|begin|>"}))
    assert open_tokenizer(str(one)).fingerprint() not in prints
