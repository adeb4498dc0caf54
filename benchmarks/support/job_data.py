"""The job that all contenders get: tokens of real text, rows, and initial weights, as files.

The text is that of the Python standard library; the tokenizer is a byte-level BPE trained on it
once, with exactly the model's vocabulary, and kept with the tokens in a cache directory.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from outsize.checkpoint import hub
from outsize.data import DataConfig, TrainStream, open_data
from outsize.data.files import find_files
from outsize.data.sources import ReadLog, read_documents
from outsize.models.build import build
from outsize.models.config import DecoderConfig

EOS = "<|endoftext|>"
TEXT_BYTES = 16 * 2**20  # of text to train the tokenizer on: half of it, merges hardly change
SEED = 0


def _texts() -> Iterator[str]:
    log = ReadLog()
    for file in find_files(("stdlib",)).files:
        if log.done > TEXT_BYTES:
            return
        yield from read_documents(file, "text", log)


def tokenizer(cache: Path, vocabulary: int) -> Path:
    """The directory of a byte-level BPE of `vocabulary` ids, trained now if it is not there."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    directory = cache / f"bpe-{vocabulary}"
    if (directory / "tokenizer.json").is_file():
        return directory
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[EOS],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    inner.train_from_iterator(_texts(), trainer)
    if inner.get_vocab_size() != vocabulary:
        raise SystemExit(f"the text gives {inner.get_vocab_size()} ids, expected {vocabulary}")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        inner.save(str(Path(scratch, "tokenizer.json")))
        settings = json.dumps({"eos_token": EOS})
        Path(scratch, "tokenizer_config.json").write_text(settings, encoding="utf-8")
        os.rename(scratch, directory)
        Path(scratch).mkdir()  # for the context manager to remove
    return directory


def write_rows(
    path: Path, cache: Path, steps: int, rows: int, sequence: int, vocabulary: int
) -> None:
    """An .npy of (steps, rows, sequence) token ids: packed documents, as Outsize lays them."""
    config = DataConfig(tokenizer=str(tokenizer(cache, vocabulary)), cache=str(cache / "data"))
    stream = TrainStream(open_data(config, vocabulary).train, SEED, rows, sequence)
    ids = np.stack([stream.batch(step).ids_BS.numpy() for step in range(steps)])
    np.save(path, ids.astype(np.int32))


def write_weights(path: Path, config: DecoderConfig) -> int:
    """Initial weights as a Hugging Face directory; gives the parameters outside the embedding."""
    model = build(config, seed=SEED)
    hub.save(model, path)
    embedding = model.prologue.tokens.weight.numel()  # type: ignore[union-attr]
    return sum(p.numel() for p in model.parameters()) - embedding
