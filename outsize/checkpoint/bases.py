"""What an adapter was trained beside: a checkpoint keeps the fingerprint of these weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from outsize.checkpoint.adapters import ADAPTER_CONFIG, described, held, model_directory
from outsize.checkpoint.hub import read_config
from outsize.checkpoint.opened import read_manifest
from outsize.checkpoint.shards import fingerprint

BASE = "base"  # of a checkpoint's facts: the fingerprint


def beside_others(found: Path, named: Sequence[tuple[str | Path, float]]) -> Iterator[str]:
    """A line for each adapter that was trained beside other weights than it has now: that of a
    model's directory, and those that are named."""
    inner = (found / ADAPTER_CONFIG).is_file()
    if inner or named:
        base = described(found)[1] if inner else found
        beside = [model_directory(path) for path, _ in named]
        yield from filter(None, (others(one, base) for one in [*[found] * inner, *beside]))
        yield from filter(None, (_decoded(one, base) for one in beside))


def _decoded(directory: Path, base: Path) -> str:
    """A line where the adapter in a directory was trained beside codes, and the weights in `base`,
    which take it up, are none; else ""."""
    config = read_config(base)
    coding = held(directory, config).coding
    if config.coding is not None or coding is None:
        return ""
    return (
        f"{directory} was trained beside {coding.format.name}, and the weights in {base} take it up"
        " as they lie; give its run itself, or what outsize merge writes, for what was trained"
    )


def others(directory: Path, base: Path) -> str:
    """A line where the adapter in a directory was trained beside other weights than those in
    `base`; "" where it was not, or does not say. Other files of the same weights are others."""
    found = read_manifest(directory)
    said = None if found is None else found.meta.get(BASE)
    if said in (None, fingerprint(base)):
        return ""
    return (
        f"{directory} was trained beside other weights than those in {base}; unless these are the"
        " same in another form, what it has learnt does not hold for them"
    )
