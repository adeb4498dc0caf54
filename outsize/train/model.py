"""Which model a run trains, and which tokenizer: from a preset or a Hugging Face directory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from outsize.checkpoint.bases import BASE
from outsize.data import DataConfig
from outsize.errors import OutsizeError, nearest
from outsize.models.adapter import Adapter
from outsize.models.coding import KEY, asked
from outsize.models.config import DecoderConfig
from outsize.models.patterns import Limiting
from outsize.models.presets import BYTE_VOCABULARY, SHAPES
from outsize.train.config import RunConfig
from outsize.train.resolve import DERIVED, RUN, Resolved

if TYPE_CHECKING:
    from outsize.checkpoint.opened import Checkpoint
    from outsize.data import Tokenizer

BYTES = "bytes"


@dataclass(frozen=True)
class Subject:
    """What is trained. directory: of the Hugging Face model, or of the checkpoint that all weights
    come from; None for a preset. text: how data names the tokenizer. base: the fingerprint of what
    an adapter trains beside."""

    config: DecoderConfig
    directory: Path | None
    tokenizer: Tokenizer
    text: str
    base: str | None = None


def subject(resolved: Resolved) -> tuple[Resolved, Subject]:
    """The model and tokenizer that the keys name; open keys among theirs are filled in.

    OutsizeError for neither a preset nor a directory, an unknown family, missing weights, a
    tokenizer with more ids than the model.
    """
    resolved, directory = directory_of(resolved)
    resolved = _tokenizer_of_data(resolved)
    if directory is None:
        resolved, found = _preset(resolved, resolved.config.model.name)
    else:
        resolved, found = _directory(resolved, directory)
    found = adapted(found, resolved)
    return resolved, replace(found, config=limited(found.config, resolved.config))


def directory_of(resolved: Resolved) -> tuple[Resolved, Path | None]:
    """Where the model that the keys name lies, None for a preset; and the keys, where that is the
    checkpoint of a run. OutsizeError for what is neither."""
    resolved = _of_run(resolved)
    name = resolved.config.model.name
    directory = Path(name).expanduser()
    if SHAPES.find(name) is not None:
        return resolved, None
    if directory.is_dir():
        return resolved, directory
    if directory.suffix == ".gguf" and directory.is_file():
        raise OutsizeError(
            f"model {name!r} is one file; outsize convert {name} --into DIRECTORY writes what is"
            " trained on"
        )
    raise OutsizeError(
        f"model {name!r} is neither a preset nor a directory{nearest(name, SHAPES.names())}"
    )


def _of_run(resolved: Resolved) -> Resolved:
    """The same with a run's latest checkpoint as the model, where its directory is named.

    OutsizeError for a run without one."""
    from outsize.checkpoint.store import Store

    name = resolved.config.model.name
    directory = Path(name).expanduser()
    if (directory / RUN).is_file() and not (directory / "config.json").is_file():
        latest = Store(directory).load().path
        return resolved.with_value("model.name", str(latest), f"{DERIVED}the latest of {name}")
    return resolved


def adapter_of(keys: RunConfig) -> Adapter | None:
    """The adapter that a run's techniques say, None where there is none."""
    found = {n: one for n, one in keys.techniques.items() if isinstance(one, Adapter)}
    if len(found) > 1:
        raise OutsizeError(f"{' and '.join(found)} adapt one model; expected one of them")
    return next(iter(found.values()), None)


def adapted(found: Subject, resolved: Resolved) -> Subject:
    """The same with the adapter that the run trains, if it has one. OutsizeError for a model whose
    weights are random, and for one that cannot be adapted."""
    from outsize.checkpoint.shards import fingerprint
    from outsize.models.names import adapter_layout

    keys = resolved.config
    adapter, said = adapter_of(keys), keys.technique(KEY)
    said = None if said is None else said.format
    if adapter is None:
        held = found.config.coding
        if said is not None or held is not None:
            name = said if held is None else held.format.name
            raise OutsizeError(
                f"weights of {name} are frozen, and nothing else would be trained; set"
                " an adapter (outsize keys adapt), or train the model's own weights"
            )
        return found
    if keys.model.weights != "stored":
        raise OutsizeError(
            f"an adapter trains beside weights that stay as they are, and those of"
            f" {keys.model.name!r} are random; set model to the directory of a trained one"
        )
    config = replace(asked(found.config, said), adapter=adapter)
    if config.coding is not None and config.coding.behind:
        behind = config.coding.behind
        raise OutsizeError(
            f"weights: {said!r}: a run trains by the head as it lies, by numbers as they are; leave"
            f" {behind} out, which is for what is served"
        )
    adapter_layout(config)
    directory = Path(keys.model.name).expanduser()
    return replace(found, config=config, directory=directory, base=fingerprint(directory))


def limited(config: DecoderConfig, keys: RunConfig) -> DecoderConfig:
    """The same with no other parameters trained than the run's techniques say."""
    for own in keys.techniques.values():
        if isinstance(own, Limiting):
            config = own.limited(config)
    return config


def config_in(directory: Path, keys: RunConfig) -> DecoderConfig:
    """The model in a directory as a run of these keys has it, which somebody has checked: with its
    adapter and what its weights are held as."""
    from outsize.checkpoint.hub import read_config

    said = keys.technique(KEY)
    config = asked(read_config(directory), None if said is None else said.format)
    return limited(replace(config, adapter=adapter_of(keys)), keys)


def _tokenizer_of_data(resolved: Resolved) -> Resolved:
    """The same with the tokenizer that is trained on the run's data, where it asks for one."""
    from outsize.data.vocabulary import OWN, of_data

    keys = resolved.config.data
    if keys.tokenizer is None or not keys.tokenizer.startswith(OWN):
        return resolved
    config = DataConfig(path=keys.path, cache=keys.cache)
    place = of_data(keys.tokenizer, config.paths(), keys.field, config.cache_directory())
    why = f"{DERIVED}{keys.tokenizer}, trained on the data"
    return resolved.with_value("data.tokenizer", str(place), why)


def _preset(resolved: Resolved, name: str) -> tuple[Resolved, Subject]:
    from outsize.data import check_vocabulary, open_tokenizer
    from outsize.models.families import parse

    if resolved.get("model.weights") == "stored":
        raise OutsizeError(
            f"model.weights is 'stored', but the preset {name!r} has none; expected 'random'"
        )
    resolved = resolved.derive("model.weights", "random", "a preset has no weights")
    resolved = resolved.derive("data.tokenizer", BYTES, "a preset has no tokenizer")
    tokenizer = open_tokenizer(resolved.get("data.tokenizer"))
    own = int(SHAPES.get(name)["vocab_size"])
    if own == BYTE_VOCABULARY and tokenizer.vocab_size > own:
        rounded = -(-tokenizer.vocab_size // 64) * 64
        resolved = resolved.derive(
            "model.vocabulary", rounded, "the tokenizer's, rounded up to 64s"
        )
    resolved = resolved.derive("model.vocabulary", own, f"the preset {name}")
    vocabulary = resolved.get("model.vocabulary")
    check_vocabulary(tokenizer, vocabulary)
    ids = {"bos_token_id": tokenizer.start, "eos_token_id": tokenizer.eos}
    return resolved, Subject(
        parse({**SHAPES.get(name), "vocab_size": vocabulary, **ids}),
        None,
        tokenizer,
        resolved.get("data.tokenizer"),
    )


def _directory(resolved: Resolved, directory: Path) -> tuple[Resolved, Subject]:
    from outsize.checkpoint.hub import read_config
    from outsize.checkpoint.shards import open_shards
    from outsize.data import check_vocabulary, open_tokenizer

    config = read_config(directory)
    if resolved.given("model.vocabulary") and resolved.get("model.vocabulary") != config.vocab:
        raise OutsizeError(
            f"model.vocabulary is {resolved.get('model.vocabulary')}, but {directory} has"
            f" {config.vocab} ids; expected it to be left out"
        )
    resolved = resolved.derive("model.vocabulary", config.vocab, "config.json")
    if (directory / "tokenizer.json").is_file():
        resolved = resolved.derive("data.tokenizer", str(directory), "the model's directory")
    resolved = resolved.derive("data.tokenizer", BYTES, "the model's directory has no tokenizer")
    tokenizer = open_tokenizer(resolved.get("data.tokenizer"))
    check_vocabulary(tokenizer, config.vocab)
    if resolved.get("model.weights") != "random":
        try:
            open_shards(directory)
        except OutsizeError as error:
            alone = (directory / "adapter_config.json").is_file()
            if alone or any(directory.glob("model*.safetensors*")):
                raise
            raise OutsizeError(
                f"{error}; set model.weights=random to begin with random ones"
            ) from None
    resolved = resolved.derive("model.weights", "stored", "the model's directory has weights")
    return resolved, Subject(config, directory, tokenizer, resolved.get("data.tokenizer"))


def subject_of(checkpoint: Checkpoint, resolved: Resolved) -> Subject:
    """What the run of a checkpoint trains: all of it lies in the checkpoint, but for weights that
    an adapter leaves as they are. OutsizeError where these are others than it was trained
    beside."""
    from outsize.checkpoint.hub import read_config
    from outsize.data import open_tokenizer

    path = checkpoint.path
    text = BYTES if resolved.get("data.tokenizer") == BYTES else str(path)
    found = Subject(read_config(path), path, open_tokenizer(text), text)
    found = adapted(found, resolved)
    found = replace(found, config=limited(found.config, resolved.config))
    if checkpoint.meta.get(BASE) not in (None, found.base):
        raise OutsizeError(
            f"{found.directory} holds other weights than those that the adapter of {path} was"
            " trained beside; bring these back, or start a new run in another directory"
        )
    return found
