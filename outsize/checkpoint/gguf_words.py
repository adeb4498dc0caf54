"""The tokenizer of a GGUF file as the files of a Hugging Face directory, and the other way.

Byte-level BPE (`gpt2`) has its merges there, and the name of the way in which texts are split
before; SentencePiece's BPE (`llama`) has scores, from which its merges follow: of two tokens that
make a third one the pair is joined sooner whose third has the higher score. Written is the first
kind alone, where its way of splitting has a name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outsize.checkpoint.writing import write_json
from outsize.errors import OutsizeError

if TYPE_CHECKING:
    import tokenizers

    from outsize.checkpoint.gguf_file import GgufFile
    from outsize.models.config import DecoderConfig

KEY, TEMPLATE = "tokenizer.ggml", "tokenizer.chat_template"
ENDS = ("eos", "eot", "eom")  # what ends a text, a turn, a message: any of them an answer
PLAIN, CONTROL, DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6  # types of tokens
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# How texts are split before merges, by what llama.cpp calls it.
SPLITS = {
    "default": _GPT2, "gpt-2": _GPT2, "gpt2": _GPT2, "llama-bpe": _LLAMA3, "llama3": _LLAMA3,
    "llama-v3": _LLAMA3, "smaug-bpe": _LLAMA3, "qwen2": _QWEN2,
}  # fmt: skip
_SINGLE = {"smollm": _GPT2}  # every digit alone
_WRITTEN = {_GPT2: "gpt-2", _LLAMA3: "llama-bpe", _QWEN2: "qwen2"}


@dataclass(frozen=True)
class Words:
    """A tokenizer. content: of its tokenizer.json; start: the token that it puts before texts, None
    for none; eos: what ends one; template: of its chats."""

    content: str
    start: int | None
    eos: int
    template: str | None


def facts_of(own: Words | None, config: DecoderConfig) -> tuple[Mapping[str, tuple[str, Any]], str]:
    """What a file says of a byte-level BPE and of its chat template; of another tokenizer nothing,
    and why."""
    if own is None:
        return {}, "the tokenizer is left out: there is no tokenizer.json"
    said = json.loads(own.content)
    inner, pre = said.get("model") or {}, said.get("pre_tokenizer")
    if inner.get("type") != "BPE" or "ByteLevel" not in json.dumps(pre):
        return {}, f"the tokenizer is left out: it is no byte-level BPE but {inner.get('type')}"
    merges = [m if isinstance(m, str) else " ".join(m) for m in inner.get("merges", [])]
    split = _split_of(pre) if merges else "gpt-2"  # bytes alone are the same, however split
    if split is None:
        return {}, "the tokenizer is left out: gguf has no name here for how it splits texts"
    words = [f"[PAD{i}]" for i in range(config.vocab)]
    kinds = [UNUSED] * config.vocab
    added = said.get("added_tokens", [])
    every = [(word, number, PLAIN) for word, number in inner["vocab"].items()]
    every += [(x["content"], x["id"], CONTROL if x.get("special") else DEFINED) for x in added]
    for word, number, kind in every:
        if number < config.vocab:
            words[number], kinds[number] = word, kind
    found: dict[str, tuple[str, Any]] = {
        f"{KEY}.model": ("str", "gpt2"), f"{KEY}.pre": ("str", split),
        f"{KEY}.tokens": ("list", ("str", words)), f"{KEY}.token_type": ("list", ("i32", kinds)),
        f"{KEY}.merges": ("list", ("str", merges)),
    }  # fmt: skip
    starts = _ids(config.source.get("bos_token_id")) if own.start is None else [own.start]
    last = _ids(config.source.get("eos_token_id")) or [own.eos]
    for name, number in (*zip(("bos",), starts, strict=False), *zip(ENDS, last, strict=False)):
        found[f"{KEY}.{name}_token_id"] = ("u32", number)
    found[f"{KEY}.add_bos_token"] = ("bool", own.start is not None)
    return (found if own.template is None else {**found, TEMPLATE: ("str", own.template)}), ""


def _ids(said: object) -> list[int]:
    """The ids that a config.json says: one, several or none."""
    return [one for one in (said if isinstance(said, list) else [said]) if type(one) is int]


def _split_of(pre: Mapping[str, Any]) -> str | None:
    """What llama.cpp calls the way in which a tokenizer.json splits texts before merges, None where
    that has no name here."""
    steps = pre.get("pretokenizers", []) if pre["type"] == "Sequence" else [pre]
    *before, level = steps
    if level["type"] != "ByteLevel" or level.get("add_prefix_space", True):
        return None
    if level.get("use_regex", True):
        before = [*before, {"type": "Split", "pattern": {"Regex": _GPT2}, "behavior": "Isolated"}]
    single = before[:1] == [{"type": "Digits", "individual_digits": True}]
    splits = before[single:]
    if len(splits) != 1 or splits[0]["type"] != "Split" or splits[0].get("invert"):
        return None
    if splits[0].get("behavior") != "Isolated":
        return None
    name = _WRITTEN.get(splits[0]["pattern"].get("Regex"))
    return ("smollm" if name == "gpt-2" else None) if single else name


def write_words(file: GgufFile, directory: Path) -> str:
    """Write the files of its tokenizer; gives why there are none, if so. OutsizeError for facts
    that contradict one another."""
    kind = file.facts.get(f"{KEY}.model")
    if kind not in ("gpt2", "llama"):
        return f"its tokenizer is {kind!r}, which is not read; give --tokenizer DIR"
    split = file.facts.get(f"{KEY}.pre", "default")
    if kind == "gpt2" and split not in (*SPLITS, *_SINGLE):
        return f"its tokenizer splits texts as {split!r}, which is not known; give --tokenizer DIR"
    inner = _byte_level(file, str(split)) if kind == "gpt2" else _pieces(file)
    inner.save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", _settings(file))
    return ""


def tokens(file: GgufFile) -> list[str]:
    found: list[str] = file.fact(f"{KEY}.tokens", list, [])
    if not all(isinstance(one, str) for one in found):
        raise OutsizeError(f"{file.path}: {KEY}.tokens holds something else than texts")
    return found


def ends(file: GgufFile) -> list[int]:
    """The ids that end a text, the first one its own."""
    found = [file.facts.get(f"{KEY}.{name}_token_id") for name in ENDS]
    return list(dict.fromkeys(one for one in found if isinstance(one, int)))


def _kinds(file: GgufFile, count: int) -> list[int]:
    found: list[int] = file.fact(f"{KEY}.token_type", list, [1] * count)
    if len(found) != count:
        raise OutsizeError(f"{file.path}: {KEY}.token_type has {len(found)} of {count} tokens")
    return found


def _byte_level(file: GgufFile, split: str) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    words = tokens(file)
    kinds = _kinds(file, len(words))
    vocabulary = {word: i for i, word in enumerate(words) if kinds[i] != UNUSED}
    merges = [tuple(str(one).split(" ", 1)) for one in file.fact(f"{KEY}.merges", list, [])]
    kept = [(a, b) for a, b in (one for one in merges if len(one) == 2)]
    lost = [one for one in kept if not {*one, "".join(one)} <= vocabulary.keys()]
    if lost or len(kept) < len(merges):
        raise OutsizeError(f"{file.path}: {KEY}.merges joins tokens that are not there")
    whole = SPLITS.get(split) == _LLAMA3  # a word that is a token is one, whatever merges give
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=kept, ignore_merges=whole))
    if split == "qwen2":
        inner.normalizer = normalizers.NFC()
    single = [pre_tokenizers.Digits(individual_digits=True)] if split in _SINGLE else []
    pattern = Regex({**SPLITS, **_SINGLE}[split])
    inner.pre_tokenizer = pre_tokenizers.Sequence([
        *single, pre_tokenizers.Split(pattern, "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    inner.decoder = decoders.ByteLevel()
    return _framed(file, inner, words, kinds, False)


def _pieces(file: GgufFile) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    words = tokens(file)
    kinds, scores = _kinds(file, len(words)), file.fact(f"{KEY}.scores", list)
    if len(scores) != len(words):
        raise OutsizeError(f"{file.path}: {KEY}.scores has {len(scores)} of {len(words)} tokens")
    vocabulary = {word: i for i, word in enumerate(words)}
    unknown = file.facts.get(f"{KEY}.unknown_token_id", 0)
    model = models.BPE(
        vocab=vocabulary, merges=_merges(words, kinds, scores, vocabulary), byte_fallback=True,
        unk_token=words[unknown], fuse_unk=True,
    )  # fmt: skip
    inner = Tokenizer(model)
    leading = bool(file.facts.get(f"{KEY}.add_space_prefix", True))
    prepended = [normalizers.Prepend("▁")] if leading else []
    inner.normalizer = normalizers.Sequence([*prepended, normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        *([decoders.Strip(" ", 1, 0)] if leading else []),
    ])  # fmt: skip
    return _framed(file, inner, words, kinds, True)


def _merges(
    words: list[str], kinds: list[int], scores: list[float], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    found = list[tuple[float, int, tuple[str, str]]]()
    for number, word in enumerate(words):
        if kinds[number] in (CONTROL, UNUSED, BYTE):
            continue
        for at in range(1, len(word)):
            left, right = word[:at], word[at:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[number], number, (left, right)))
    return [pair for *_, pair in sorted(found)]


def _framed(
    file: GgufFile, inner: tokenizers.Tokenizer, words: list[str], kinds: list[int], usual: bool
) -> tokenizers.Tokenizer:
    """With its special tokens, and what it puts around texts. usual: whether that is a start."""
    from tokenizers import AddedToken, processors

    def added(kind: int) -> list[AddedToken]:
        return [
            AddedToken(word, special=kind == CONTROL, normalized=False)
            for word, own in zip(words, kinds, strict=True)
            if own == kind
        ]

    inner.add_special_tokens(added(CONTROL))
    inner.add_tokens(added(DEFINED))
    around = {
        name: words[file.facts[f"{KEY}.{name}_token_id"]]
        for name, on in (("bos", usual), ("eos", False))
        if file.facts.get(f"{KEY}.add_{name}_token", on)
        and file.facts.get(f"{KEY}.{name}_token_id", -1) in range(len(words))
    }
    if around:
        single = [around["bos"]] if "bos" in around else []
        single += ["$A", *([around["eos"]] if "eos" in around else [])]
        inner.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(one, inner.token_to_id(one)) for one in around.values()]
        )
    return inner


def _settings(file: GgufFile) -> dict[str, Any]:
    words = tokens(file)
    found: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("bos", "eos", "unk"):
        key = "unknown" if name == "unk" else name
        number = file.facts.get(f"{KEY}.{key}_token_id")
        if isinstance(number, int) and number in range(len(words)):
            found[f"{name}_token"] = words[number]
    template = file.facts.get(TEMPLATE)
    return found if not isinstance(template, str) else {**found, "chat_template": template}
