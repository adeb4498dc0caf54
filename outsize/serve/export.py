"""A model as other programs read it: a Hugging Face directory, peft's adapter, a GGUF file.

What is written as a directory is read back, and its logits are compared with the model's.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from outsize.checkpoint import adapters, gguf
from outsize.checkpoint.gguf_words import Words
from outsize.checkpoint.hub import check_new, save
from outsize.checkpoint.manifest import MANIFEST_NAME
from outsize.checkpoint.writing import scratch
from outsize.data.template import stored
from outsize.data.tokenizer import FileTokenizer
from outsize.errors import OutsizeError
from outsize.models.adapter import OWN, Plainer
from outsize.models.build import attach, uncoded
from outsize.models.coding import plain
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.models.wiring import WIRES

KINDS = ("hf", "peft", "gguf")
PROBE = 16  # tokens whose logits are compared


@torch.no_grad()
def export(directory: Path, to: str, into: Path, rank: str | None = None) -> list[str]:
    """Write the model of a directory (a run's, a checkpoint's, a model's) as `to`: hf, peft, gguf
    or gguf:TYPE; gives what there is to say of it. rank: the first components of its adapter alone,
    so many, or "middle" of those that a run has drawn. OutsizeError for what cannot be."""
    kind, _, inner = to.partition(":")
    if kind not in KINDS or (inner and kind != "gguf"):
        raise OutsizeError(f"--to {to!r} is not known; expected hf, peft, or gguf:F16")
    found = adapters.model_directory(directory)
    config = adapters.read_config(found)
    if kind == "peft":
        _check_peft(found, config)
    else:
        adapters.check_mergeable(_form(config))
    if kind == "gguf":
        gguf.check(config, inner or "F16")
    if kind == "hf":
        _check_known(config, found)
    if kind != "gguf":
        check_new(into)
    elif into.exists():
        raise OutsizeError(f"{into} exists already; choose another path")
    model = adapters.load(found, config=config)
    if rank is not None:
        adapters.narrowed(model, _rank(found, rank))
    if kind == "peft":
        return _peft(_plainer(model), into)
    # What it computes: an adapter that was trained beside codes goes into what these stand for.
    model = adapters.merge(uncoded(model))
    _finite(model(probe(model)), found)
    if kind == "gguf":
        words = _words(adapters.tokenizer_directory(found))
        said = _file(model, into, inner or "F16", words, directory.name)
        return [f"{into}: {inner or 'F16'}", *said]

    save(model, into)
    return [f"{into}: {config.family}", *compared(model, into)]


@torch.no_grad()
def merge(directory: Path, into: Path, dtype: torch.dtype | None = None) -> list[str]:
    """Write the plain model that computes what one with an adapter does, or with factors in the
    place of weights; gives what there is to say of it, what rounding to `dtype` (None: the base's)
    moves among it. Codes are decoded: a change that small would be lost in them. OutsizeError for a
    model without either."""
    found = adapters.model_directory(directory)
    config = adapters.read_config(found)
    if config.adapter is None and config.weights is None:
        raise OutsizeError(
            f"{found} has no adapter, so nothing is to merge; outsize export --to hf writes it"
        )
    adapters.check_mergeable(_form(config))
    check_new(into)
    model = adapters.load(found, dtype, config=config)
    ids = probe(model)
    before = model(ids)
    _finite(before, found)
    model = adapters.merge(uncoded(model))
    moved, size = float((model(ids) - before).abs().max()), float(before.abs().max())
    save(model, into)
    rounding = f"rounding moved logits by {moved:.2g} at most, of {size:.3g}"
    what = "the adapter" if config.adapter is not None else "the product of factors"
    return [f"{into}: {what} of {found} is in the weights; {rounding}", *compared(model, into)]


def _form(config: DecoderConfig) -> Decoder:
    """A model of shapes alone."""
    with torch.device("meta"):
        return Decoder(config)


def _finite(logits: Tensor, found: Path) -> None:
    """OutsizeError for those of a model that nobody could use."""
    if not bool(logits.isfinite().all()):
        raise OutsizeError(
            f"{found} gives logits that are not finite; expected numbers: check its weights and its"
            " adapter, or use a wider dtype; nothing is written"
        )


def _check_known(config: DecoderConfig, found: Path) -> None:
    """Refuse what other programs would read and compute without a word of what they do not know."""
    factored = "" if config.weights is None else config.weights.key  # written as weights
    own = [key for key in WIRES.names() if config.source.get(key) and key != factored]
    if own:
        raise OutsizeError(
            f"--to hf: transformers knows no {own[0]} and would leave it out; outsize reads {found}"
            " as it lies"
        )


def _check_peft(found: Path, config: DecoderConfig) -> None:
    if config.adapter is None:
        raise OutsizeError(f"--to peft: {found} has no adapter; expected a run that trained one")
    kind = adapters.to_json(config, None)["peft_type"]
    if kind.startswith(OWN) and not isinstance(config.adapter, Plainer):
        whole = "expected --to hf, which merges it"
        if not adapters.mergeable(_form(config)):
            whole = "no other program reads it: give the run to outsize generate, chat or eval"
        raise OutsizeError(f"--to peft: peft has no method {kind}; {whole}")


def _rank(found: Path, rank: str) -> int:
    """What `rank` says, of the checkpoint at `found` where that has drawn some."""
    from outsize.checkpoint.opened import open_contents
    from outsize.runtime.special.elastic import MIDDLE, NOTES

    if rank.isdecimal():
        return int(rank)
    drawn = open_contents(found).meta.get(NOTES) if (found / MANIFEST_NAME).is_file() else None
    middle = drawn.get(MIDDLE) if isinstance(drawn, dict) else None
    if rank != MIDDLE or not isinstance(middle, int):
        raise OutsizeError(
            f"--rank is {rank!r}; expected a number, or {MIDDLE} of a run that drew ranks"
            " (outsize keys elastic-adapters)"
        )
    return middle


@torch.no_grad()
def _plainer(model: Decoder) -> Decoder:
    """The same object, whose adapter is the simplest one that computes what this one does."""
    if not isinstance(model.config.adapter, Plainer):
        return model
    other, values = model.config.adapter.plainer(model)
    adapters.remove(model)

    def write(name: str, out: Tensor) -> None:
        out.copy_(values[name])

    attach(model, other, lambda: write)
    return model


def _peft(model: Decoder, into: Path) -> list[str]:
    adapters.save(model, into)
    base, coding = adapters.base_of(model), model.config.coding
    said = [f"{into}: adapter beside {base}", *compared(model, into)]
    if coding is None or coding.stored:
        return said
    plainly = adapters.load(into, config=plain(adapters.read_config(into)))
    most = _apart(model, plainly)
    return [
        *said,
        f"warning: it was trained beside {coding.format.name}; beside {base} as it lies, where peft"
        f" reads it, logits are other by {most:.3g} at most; --to hf writes what was trained",
    ]


def _words(directory: Path) -> Words | None:
    """The tokenizer in a directory, if there is one."""
    if not (directory / "tokenizer.json").is_file():
        return None
    own = FileTokenizer.load(directory)
    return Words(own.content, own.front[0] if own.front else None, own.eos, stored(directory))


def _file(model: Decoder, into: Path, kind: str, words: Words | None, name: str) -> list[str]:
    """A GGUF file under its name when it is whole."""
    try:
        with scratch(into) as part:
            said = gguf.write(model, part / into.name, kind, words, name)
            os.rename(part / into.name, into)
    except OSError as error:
        raise OutsizeError(f"cannot write {into}: {error.strerror}") from error
    return said


def compared(model: Decoder, into: Path) -> list[str]:
    """A line where a directory that was written gives other logits than its model; else nothing."""
    return differing(model, adapters.load(into), into)


@torch.no_grad()
def differing(model: Decoder, other: Decoder, into: Path) -> list[str]:
    if not (most := _apart(model, other)):
        return []
    return [f"warning: {into}, read back, has other logits than the model: by {most:.3g} at most"]


def _apart(model: Decoder, other: Decoder) -> float:
    """How far the logits of two models are apart, at most."""
    ids = probe(model)
    return float((model(ids).double() - other(ids).double()).abs().max())


def probe(model: Decoder) -> torch.Tensor:
    """(1, PROBE) ids that two models are compared on."""
    vocab = model.config.vocab
    return torch.arange(PROBE).mul_(vocab // PROBE + 1).remainder_(vocab).unsqueeze(0)
