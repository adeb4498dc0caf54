"""Text to token ids and back: plain bytes, or the tokenizer.json of a Hugging Face directory.

Every document is trained on as `start, tokens..., eos`. `start` is what the tokenizer itself puts
before a text (Llama, Gemma, those that are made here), else eos, as GPT-2 was trained. A prompt
begins with what the tokenizer itself puts there and with nothing else, as everybody reads it.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outsize.errors import OutsizeError

if TYPE_CHECKING:
    import tokenizers

Ids = NDArray[np.uint32]
BYTES = "bytes"
REPLACED = "\ufffd"  # what is no character decodes to
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # of a token that is one byte


@dataclass(frozen=True)
class Placed:
    """A text's tokens: ids (tokens,) uint32, the characters [start, end) that each stands for, and
    the UTF-8 bytes (uint32)."""

    ids: Ids
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    widths: Ids


class TextStream(Protocol):
    """Decodes ids that arrive one by one; the parts joined are the text of all of them."""

    def push(self, token: int) -> str:
        """The text that has become certain; "" while a character is incomplete."""

    def finish(self) -> str:
        """The rest, incomplete characters replaced."""


class Tokenizer(Protocol):
    """What the rest of the system needs of a tokenizer. Ids are 0 .. vocab_size - 1."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def front(self) -> tuple[int, ...]:
        """What the tokenizer itself puts in front of a text: a prompt begins with it."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without start and eos."""

    def framed(self, text: str) -> list[int]:
        """The ids of a text, with what the tokenizer itself puts around texts."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; start, eos and other special tokens say nothing."""

    def written(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens written out."""

    def word(self, token: int) -> bytes:
        """What an id adds to a text that it stands in the midst of, in UTF-8: of a part of a
        character its bytes, special tokens written out."""

    def stream(self) -> TextStream: ...
    def encode_many(self, texts: Sequence[str]) -> list[Ids]:
        """`encode` of every text, (tokens,) uint32 each; many at once, off the interpreter lock."""

    def encode_placed(self, text: str) -> Placed:
        """`encode`, and where each id is in the text; bytes that no token covers (stripped by the
        tokenizer) count to the next token, else to the last."""

    @property
    def special(self) -> tuple[str, ...]:
        """The texts of special tokens."""

    def fingerprint(self) -> str:
        """A hash of all that decides the ids, so that stored ids can be told stale."""


def open_tokenizer(name: str) -> Tokenizer:
    """ "bytes", or a directory with a tokenizer.json. Raises OutsizeError."""
    return ByteTokenizer() if name == BYTES else FileTokenizer.load(name)


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse a tokenizer with ids that the model (of `vocab_size` ids) has no embedding for."""
    if tokenizer.vocab_size > vocab_size:
        raise OutsizeError(
            f"tokenizer has {tokenizer.vocab_size} ids, more than the model's vocabulary of "
            f"{vocab_size}: take the model's own tokenizer or set vocab_size to at least "
            f"{tokenizer.vocab_size}"
        )


class ByteTokenizer:
    """Ids 0 .. 255 are the bytes of UTF-8; 256 ends a document, and starts it."""

    vocab_size = 257
    eos = 256
    start = 256
    front = (256,)
    special = ()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    framed = encode

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode("utf-8", "replace")

    def written(self, ids: Sequence[int]) -> str:
        raw = (bytes((one,)) if one < 256 else b"<|end|>" for one in ids)
        return b"".join(raw).decode("utf-8", "replace")

    def word(self, token: int) -> bytes:
        return bytes((token,)) if token < 256 else b"<|end|>"

    def stream(self) -> TextStream:
        return _ByteStream()

    def encode_many(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]

    def encode_placed(self, text: str) -> Placed:
        (ids,) = self.encode_many([text])
        bytes_before = _byte_offsets(text)
        starts = np.searchsorted(bytes_before, np.arange(len(ids)), side="right") - 1
        return Placed(ids, starts, starts + 1, np.ones_like(ids))

    def fingerprint(self) -> str:
        return BYTES


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes((token,))) if token < 256 else ""

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class FileTokenizer:
    """The `tokenizers` tokenizer of a directory. Special tokens written out in a text are taken as
    such, as transformers does; none are added by `encode`."""

    def __init__(
        self, inner: tokenizers.Tokenizer, eos: int, front: tuple[int, ...], digest: str
    ) -> None:
        self._inner = inner
        self._digest = digest
        self.eos = eos
        self.front = front
        self.start = front[0] if front else eos
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @classmethod
    def load(cls, directory: str | Path) -> FileTokenizer:
        """Read DIRECTORY/tokenizer.json. Raises OutsizeError: no such file, or one that cannot be
        read, or no end-of-document token to be found beside it."""
        from tokenizers import Tokenizer as Inner

        path = Path(directory).expanduser() / "tokenizer.json"
        if not path.is_file():
            raise OutsizeError(
                f"tokenizer {directory}: no tokenizer.json there; give a directory that has one "
                f"(or a Hugging Face model directory), or {BYTES!r}"
            )
        content = path.read_bytes()
        try:
            inner = Inner.from_buffer(content)
        except Exception as error:  # the library raises bare Exception
            why = " ".join(str(error).split())[:160]
            raise OutsizeError(f"{path} is no tokenizer that can be read: {why}") from None
        inner.no_truncation()  # files often carry the model's context length as a limit
        inner.no_padding()
        eos = _find_eos(path.parent, inner)
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        return cls(inner, eos, _added_in_front(inner), digest)

    @property
    def content(self) -> str:
        """What a tokenizer.json of it says."""
        return str(self._inner.to_str())

    def encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def framed(self, text: str) -> list[int]:
        return list(self._inner.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode(list(ids), skip_special_tokens=True)

    def written(self, ids: Sequence[int]) -> str:
        return self._inner.decode(list(ids), skip_special_tokens=False)

    def word(self, token: int) -> bytes:
        before, both = self._anchor[1], self.written([*self._anchor[0], token])
        text = both.removeprefix(before) if both.startswith(before) else self.written([token])
        return text.encode() if REPLACED not in text else _bytes_of(self.text_of(token), text)

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        """A token and its text, behind which others have the spaces that are theirs."""
        ids = self.encode("a")[-1:]
        return ids, self.written(ids)

    def stream(self) -> TextStream:
        return _FileStream(self)

    def encode_many(self, texts: Sequence[str]) -> list[Ids]:
        encoded = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=np.uint32) for one in encoded]

    def encode_placed(self, text: str) -> Placed:
        encoded = self._inner.encode(text, add_special_tokens=False)
        ids = np.array(encoded.ids, dtype=np.uint32)
        starts, ends = np.array(encoded.offsets, dtype=np.int64).reshape(-1, 2).T
        if not ids.size:
            return Placed(ids, starts, ends, ids)
        # Tokens that share a character (byte-level pieces of it) have the same span: the first of
        # them gets its bytes, and the running maximum gives the others none.
        furthest = np.maximum.accumulate(ends)
        furthest[-1] = len(text)
        widths = np.diff(_byte_offsets(text)[furthest], prepend=0)
        return Placed(ids, starts, ends, widths.astype(np.uint32))

    @property
    def special(self) -> tuple[str, ...]:
        added = self._inner.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special)

    @property
    def added(self) -> dict[str, int]:
        """The ids of what was added to the vocabulary, special or not."""
        return {x.content: i for i, x in self._inner.get_added_tokens_decoder().items()}

    def text_of(self, token: int) -> str:
        """How a token is written, special ones too."""
        return str(self._inner.id_to_token(token))

    def fingerprint(self) -> str:
        return f"{self._digest}/{self.start}/{self.eos}"


class _FileStream:
    """Holds ids back while their text ends in a replacement character, which is what decoding
    gives for the beginning of a character; decodes with the ids of the part before, on which
    spaces depend."""

    def __init__(self, tokenizer: FileTokenizer) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []
        self._held: list[int] = []

    def push(self, token: int) -> str:
        self._held.append(token)
        text = self._new_text()
        if not text or text.endswith(REPLACED):
            return ""
        self._before, self._held = self._held, []
        return text

    def finish(self) -> str:
        return self._new_text() if self._held else ""

    def _new_text(self) -> str:
        shown = self._tokenizer.decode(self._before)
        return self._tokenizer.decode(self._before + self._held)[len(shown) :]


def _bytes_of(name: str, text: str) -> bytes:
    """Of a token by its name, which decodes to a text that is no character."""
    if byte := _BYTE.fullmatch(name):  # as tokenizers of sentencepiece have them
        return bytes.fromhex(byte[1])
    known = _alphabet()
    if all(one in known for one in name):  # as those of bytes have them
        return bytes(known[one] for one in name)
    return text.encode()


@cache
def _alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level tokenizers, as GPT-2 has them: bytes that
    are printed stand for themselves, the others for what is behind all bytes."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    behind = {chr(256 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in own} | behind


def _byte_offsets(text: str) -> NDArray[np.int64]:
    """(characters + 1,) the UTF-8 bytes before each character, and in all."""
    code = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    widths = 1 + (code >= 0x80).astype(np.int64) + (code >= 0x800) + (code >= 0x10000)
    return np.concatenate(([0], np.cumsum(widths)))


def _added_in_front(inner: tokenizers.Tokenizer) -> tuple[int, ...]:
    """The one special token that the tokenizer puts before a text, if it does."""
    plain = inner.encode("a", add_special_tokens=False).ids
    full = inner.encode("a", add_special_tokens=True).ids
    if len(full) > len(plain) and full[1 : 1 + len(plain)] == plain and full[:1] != plain[:1]:
        return (int(full[0]),)
    return ()


def put_in_front(inner: tokenizers.Tokenizer, word: str) -> None:
    """Have a tokenizer put a special token of its own in front of every text."""
    from tokenizers import processors

    inner.post_processor = processors.TemplateProcessing(
        single=[word, "$A"], special_tokens=[(word, inner.token_to_id(word))]
    )


def ends_in(directory: Path, vocab: int) -> frozenset[int]:
    """The ids that end a text by a model's own settings: of several, all."""
    every = (one for some in _ends(directory) for one in some)
    return frozenset(one for one in every if type(one) is int and 0 <= one < vocab)


def _ends(directory: Path) -> Iterator[list[Any]]:
    """What each of a model's own settings says of the ids that end a text."""
    for name in ("config.json", "generation_config.json"):
        value = settings_in(directory / name).get("eos_token_id")
        yield value if isinstance(value, list) else [value]


def _find_eos(directory: Path, inner: tokenizers.Tokenizer) -> int:
    """The end-of-document id: as a token in the tokenizer's own settings, else as an id in the
    model's (of several, the first)."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = settings_in(directory / name).get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and (found := inner.token_to_id(text)) is not None:
            return int(found)
    for first, *_ in filter(None, _ends(directory)):
        if isinstance(first, int) and inner.id_to_token(first) is not None:
            return first
    raise OutsizeError(
        f"tokenizer {directory}: no end-of-document token found; set eos_token in its "
        "tokenizer_config.json, or eos_token_id in config.json"
    )


def settings_in(path: Path) -> dict[str, Any]:
    """What a JSON file says, nothing where there is none. OutsizeError for one that is broken."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise OutsizeError(f"{path} is not JSON: {error}") from None
    return found if isinstance(found, dict) else {}
