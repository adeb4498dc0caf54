"""A byte-level BPE tokenizer, trained on files by the library that reads it (Sennrich et al.,
"Neural machine translation of rare words with subword units", 2016; bytes: Radford et al., 2019).

The same files give the same tokenizer. Its directory loads here and in transformers; it has the
special tokens and the template of ChatML, so that chats can be trained on and talked in.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outsize.checkpoint.writing import remove
from outsize.data.chats import form_of, turns_of
from outsize.data.files import SourceFile, find_files
from outsize.data.records import BadRecordError, records
from outsize.data.sources import ReadLog, read_documents
from outsize.data.template import template_text
from outsize.data.tokenizer import put_in_front
from outsize.errors import OutsizeError
from outsize.texts import write_text

END = "<|endoftext|>"
SPECIAL = (END, "<|im_start|>", "<|im_end|>")
LEAST = 256 + len(SPECIAL)  # ids: the bytes and the special tokens
_MOST = 2**20
_MEASURED = 2**20  # characters of text whose tokens are counted
OWN = "bpe:"  # how a run asks for a tokenizer of its data
_READ = 2**23  # bytes of the data that such a one is trained on: a few seconds


@dataclass(frozen=True)
class Made:
    """A tokenizer that was trained. size: its ids; rate: bytes of text that a token stands for."""

    size: int
    rate: float
    log: ReadLog


def make(
    paths: tuple[str, ...], field: str, vocabulary: int, into: Path, most: int | None = None
) -> Made:
    """Train on the texts of files and write the directory `into`. most: bytes of the files that are
    read, spread evenly over them; None: all. OutsizeError for a vocabulary out of range, files
    without text, a directory that has a tokenizer already."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if not LEAST <= vocabulary <= _MOST:
        raise OutsizeError(f"vocabulary is {vocabulary}; expected {LEAST} to {_MOST}")
    if (into / "tokenizer.json").exists():
        raise OutsizeError(f"{into} has a tokenizer.json already; choose another directory")
    found = find_files(paths)
    files = found.files if most is None else _spread(found.files, most)
    log = ReadLog(ignored=found.ignored)
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=list(SPECIAL), show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    sample = _Sample()
    texts = (text for file in files for text in _texts(file, field, log))
    inner.train_from_iterator(map(sample.kept, texts), trainer)
    if not sample.texts:
        raise OutsizeError(f"data in {', '.join(paths)} has no text; {log.summary()}")
    put_in_front(inner, END)
    _write(inner.to_str(pretty=True), into)
    tokens = sum(len(inner.encode(text).ids) - 1 for text in sample.texts)
    size = sum(len(text.encode()) for text in sample.texts)
    return Made(inner.get_vocab_size(), size / tokens, log)


def of_data(said: str, paths: tuple[str, ...], field: str, cache: Path) -> Path:
    """The directory of the tokenizer that a run asks for as "bpe:IDS": trained on its data where
    the cache has none for these files. OutsizeError as of make, and for another number."""
    number = said.removeprefix(OWN)
    if not number.isdecimal():
        raise OutsizeError(f"data.tokenizer is {said!r}; expected {OWN}IDS, as {OWN}2048")
    facts = [(str(one.path), one.size, one.mtime) for one in find_files(paths).files]
    digest = hashlib.blake2b(repr((facts, field, number, _READ, END)).encode(), digest_size=12)
    place = cache / "tokenizers" / digest.hexdigest()
    if not (place / "tokenizer.json").is_file():
        part = place.with_name(f".{place.name}-{os.getpid()}")
        try:
            make(paths, field, int(number), part, _READ)
            os.rename(part, place)
        except OSError as error:
            if not (place / "tokenizer.json").is_file():  # nobody else has made it meanwhile
                raise OutsizeError(f"{place} cannot be written: {error.strerror}") from None
        finally:
            remove(part)
    return place


def _spread(files: tuple[SourceFile, ...], most: int) -> tuple[SourceFile, ...]:
    """Some of the files, as far apart as they have that many bytes."""
    return files[:: max(1, -(-sum(file.size for file in files) // most))]


class _Sample:
    """The first texts that pass."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._left = _MEASURED

    def kept(self, text: str) -> str:
        if self._left > 0:
            self.texts.append(text[: self._left])
            self._left -= len(text)
        return text


def _texts(file: SourceFile, field: str, log: ReadLog) -> Iterator[str]:
    """What a file says: its texts, or the messages of its chats."""
    if file.kind == "text":
        yield from read_documents(file, field, log)
        return
    for where, record in records(file, log.told):
        if isinstance(record, dict) and isinstance(record.get(field), str):
            yield record[field]
        elif form_of(record):
            said = (one.get("content") for one in turns_of(where, record).messages)
            yield from (text for text in said if text)
        else:
            bad = isinstance(record, BadRecordError)
            log.skip(where, str(record) if bad else _no_text(record, field))


def _no_text(record: Any, field: str) -> str:
    has = ", ".join(map(repr, record))[:120] if isinstance(record, dict) else "none"
    return (
        f"no text in the field {field!r}, and no chat (fields: {has}); --field, or data.field of a"
        " run, names the one that has the text"
    )


def _write(tokenizer: str, into: Path) -> None:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END,
        "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    try:
        into.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutsizeError(f"{into} cannot be made: {error.strerror}") from None
    write_text(json.dumps(settings, indent=2), into / "tokenizer_config.json")
    write_text(template_text("chatml"), into / "chat_template.jinja")
    write_text(tokenizer, into / "tokenizer.json")
