"""The tokenizer's files in a checkpoint, so that its directory is a whole Hugging Face model.

Bytes are written as a tokenizer too: byte-level, without a merge, ids 0 to 255 the bytes
themselves and 256 the end of a document, which stands in front of every text. Whatever reads
tokenizer.json reads bytes.
"""

from __future__ import annotations

import json
from pathlib import Path

from outsize.checkpoint.hub import copy_words
from outsize.data.tokenizer import put_in_front
from outsize.errors import OutsizeError

END = "<|end|>"


def write_tokenizer(name: str, directory: Path) -> None:
    """Write the files of the tokenizer `name` ("bytes" or a directory) into `directory`.

    OSError where the system refuses; OutsizeError for a source that cannot be read.
    """
    if name == "bytes":
        (directory / "tokenizer.json").write_text(byte_tokenizer(), encoding="utf-8")
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END,
            "eos_token": END,
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        return
    source = Path(name).expanduser()
    copy_words(source, directory)
    if not (directory / "tokenizer.json").is_file():
        raise OutsizeError(f"tokenizer {name}: its tokenizer.json has gone; bring it back")


def byte_tokenizer() -> str:
    """The tokenizer.json of bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    inner = Tokenizer(models.BPE(vocab=_alphabet(), merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    put_in_front(inner, END)
    text: str = inner.to_str()
    return text


def _alphabet() -> dict[str, int]:
    """The character that byte-level tokenizers write each byte as, with the byte for its id.

    Printable bytes of Latin-1 stand for themselves, the others follow from U+0100 (Radford et
    al., "Language models are unsupervised multitask learners", 2019).
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }
