"""Streams of text: stop strings across tokens, characters across tokens, pieces that add up."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import outsize
from outsize.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from outsize.decode.generate import drawing
from outsize.decode.samplers import Sampling
from outsize.decode.text import StopStrings, stream_text
from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.decoder import Decoder
from outsize.models.families import parse
from outsize.models.seams import Past

CONFIG = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.5,
}


@pytest.fixture(scope="module")
def model() -> Decoder:
    return build(parse(CONFIG), seed=0)


class _Script:
    """A forward that says given tokens, whatever it is fed."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = iter(tokens)
        self.said = 0

    def __call__(
        self, ids_T: Tensor, positions_T: Tensor, bounds: tuple[int, ...], past: Past
    ) -> Tensor:
        logits_NV = torch.zeros(1, CONFIG["vocab_size"])  # type: ignore[call-overload]
        logits_NV[0, next(self.tokens)] = 1
        self.said += 1
        return logits_NV


def _said(
    model: Decoder,
    text: str | bytes,
    stop: tuple[str, ...] = (),
    tokenizer: Tokenizer | None = None,
) -> tuple[list[str], int]:
    """The pieces of a stream when the model says `text`, and how many tokens it was asked for."""
    tokenizer = tokenizer or ByteTokenizer()
    ids = list(text) if isinstance(text, bytes) else tokenizer.encode(text)
    script = _Script([*ids, tokenizer.eos, 0, 0])
    stream = stream_text(model, tokenizer, "a", 500, stop_strings=stop, step=drawing(script))
    return list(stream), script.said


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    """A byte-level BPE with few merges: characters beyond ASCII are several tokens."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["the stop of the story, then the end of it"] * 5, trainer)
    directory = tmp_path_factory.mktemp("tokenizer")
    inner.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return FileTokenizer.load(Path(directory))


def test_whole_characters_only(model: Decoder) -> None:
    pieces, _ = _said(model, "aé€😀b")
    assert pieces == ["a", "é", "€", "😀", "b"]


def test_characters_cut_off_or_broken_are_replaced(model: Decoder) -> None:
    assert "".join(_said(model, b"a\xe2\x82")[0]) == "a\ufffd"
    assert "".join(_said(model, b"a\xffb\xe2\x82c")[0]) == "a\ufffdb\ufffdc"


def test_eos_ends_and_is_not_shown(model: Decoder, words: FileTokenizer) -> None:
    for tokenizer in (ByteTokenizer(), words):
        pieces, said = _said(model, "the end é", tokenizer=tokenizer)
        assert "".join(pieces) == "the end é"
        assert said == len(tokenizer.encode("the end é")) + 1


def test_a_stop_string_across_tokens_is_never_shown(model: Decoder, words: FileTokenizer) -> None:
    text = "then the sto and the stop of it"
    for tokenizer in (ByteTokenizer(), words):
        pieces, said = _said(model, text, ("the stop",), tokenizer)
        assert "".join(pieces) == "then the sto and "
        assert all(pieces)
        if isinstance(tokenizer, ByteTokenizer):
            assert said == text.index("the stop") + len("the stop")  # nothing more was asked for


def test_what_only_began_like_a_stop_string_is_shown(model: Decoder) -> None:
    assert "".join(_said(model, "abab", ("ababc",))[0]) == "abab"
    assert "".join(_said(model, "a\n\nUse", ("\n\nUser",))[0]) == "a\n\nUse"
    assert "".join(_said(model, "aab", ("ab",))[0]) == "a"
    assert "".join(_said(model, "é€", ("€",))[0]) == "é"


def test_pieces_do_not_depend_on_how_the_text_is_cut() -> None:
    """All cuts of random texts over two letters give what a plain search gives."""
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(draw.choice("ab") for _ in range(9))
        stops = ["".join(draw.choice("ab") for _ in range(draw.randint(1, 4))) for _ in range(2)]
        ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
        expected = text[: min(ends)[1]] if ends else text
        for cuts in itertools.combinations(range(1, 9), draw.randint(0, 8)):
            filtered = StopStrings(stops)
            pieces = [text[a:b] for a, b in itertools.pairwise((0, *cuts, 9))]
            shown = "".join(map(filtered.push, pieces)) + filtered.finish()
            assert shown == expected, (text, stops, cuts)
            assert filtered.stopped == bool(ends)


@pytest.mark.parametrize("stops", [("",), ("a", ""), "abc", ("a", 5), None])
def test_stop_strings_are_checked(model: Decoder, stops: Any) -> None:
    with pytest.raises(OutsizeError, match=r"stop strings are .*; expected a list of strings"):
        stream_text(model, ByteTokenizer(), "a", 1, stop_strings=stops)
    with pytest.raises(OutsizeError, match="a prompt of token ids is answered by token ids"):
        outsize.generate(model, [1], 1, stop=["a"])


def test_a_stream_adds_up_to_the_text_of_its_tokens(model: Decoder) -> None:
    """A real model's tokens, random bytes most of them: streamed as decoded at once."""
    from outsize.decode.generate import generate

    tokenizer, sampling = ByteTokenizer(), Sampling(1.5, seed=4)
    ids = [tokenizer.start, *tokenizer.encode("word")]
    tokens = generate(model, ids, 60, sampling, stop=[tokenizer.eos])
    stream: Iterator[str] = stream_text(model, tokenizer, "word", 60, sampling)
    text = tokenizer.decode(tokens)
    assert "".join(stream) == text
    assert len(set(text)) > 10
    stop = text[20:23]
    cut = "".join(stream_text(model, tokenizer, "word", 60, sampling, [stop]))
    assert cut == text[: text.index(stop)]
