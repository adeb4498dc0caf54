"""`outsize convert`: a trained model wired otherwise, coded or pruned, to be trained on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from outsize.cli.command import Command


@click.command(cls=Command)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--ladder", metavar="LAYER", type=click.IntRange(0), help="A ladder from LAYER on.")
@click.option("--kraken", metavar="WAYS", type=click.IntRange(2), help="So many ways a layer.")
@click.option("--factored", metavar="RATIO", type=click.FloatRange(1),
              help="Two factors a weight, of 1/RATIO of its numbers.")  # fmt: skip
@click.option("--weights", metavar="FORMAT", help="As codes; outsize keys weights has the formats.")
@click.option("--prune", metavar="SHARE", help="Zeros: a share of each matrix (0.5), or N:M (2:4).")
@click.option("--dtype", metavar="DTYPE", help="Of a .gguf file's weights, which are then numbers:"
              " float32, bfloat16 or float16.")  # fmt: skip
@click.option(
    "--into", required=True, type=click.Path(path_type=Path), help="A new directory for the model."
)
def convert(
    directory: Path,
    ladder: int | None,
    kraken: int | None,
    factored: float | None,
    weights: str | None,
    prune: str | None,
    dtype: str | None,
    into: Path,
) -> None:
    """Write the model in DIRECTORY otherwise, or that of a .gguf file as a directory.

    With --weights its blocks' matrices are codes of few bits: INTO generates in that memory, and an
    adapter trains beside it. With --prune the smallest weights of each of these matrices are zeros,
    or all but the N largest of every M inputs. With --ladder or --kraken its branches are wired
    otherwise, so that on a tensor axis their sums run beside what is computed. A ladder's weights
    are copied as they lie; ways have norms and biases of their own. With --factored each of its
    blocks' matrices is the product of two smaller ones, of its largest singular values. Numbers of
    what was wired, factored or pruned are others, and want a little training: outsize train --set
    model.name=INTO.
    """
    from outsize.checkpoint.adapters import model_directory
    from outsize.errors import OutsizeError

    ratio = None if factored is None else {"ratio": factored}
    asked = {"ladder_from": ladder, "kraken_ways": kraken, "factored_weights": ratio}
    wired = {key: value for key, value in asked.items() if value is not None}
    if directory.suffix == ".gguf" and not wired and weights is None and prune is None:
        _unpacked(directory, dtype, into)
        return
    if dtype is not None:
        raise OutsizeError("--dtype is of a .gguf file alone; leave it out")
    if len(wired) + (weights is not None) + (prune is not None) != 1:
        raise OutsizeError(
            "convert: give one of --ladder LAYER, --kraken WAYS, --factored RATIO, --weights FORMAT"
            " and --prune SHARE"
        )
    found = model_directory(directory)
    if weights is not None:
        _coded(found, weights, into)
        return
    if prune is not None:
        _pruned(found, prune, into)
        return
    ((key, value),) = wired.items()
    _rewired(found, key, value, into)


def _rewired(found: Path, key: str, value: object, into: Path) -> None:
    """The same model wired as a key of config.json says."""
    from outsize.checkpoint import hub
    from outsize.checkpoint.hub import CONFIG, describe, load, whole_directory
    from outsize.errors import OutsizeError
    from outsize.models.families import parse
    from outsize.models.wiring import WIRES

    source = json.loads((found / CONFIG).read_text(encoding="utf-8"))
    if source.get(key) is not None:
        raise OutsizeError(f"{found}: {key} is {source[key]} already; convert a plain model")
    config = {**source, key: value}
    wanted, made = parse(config), WIRES.get(key).made  # refused before anything is written
    if made is None:
        shards = describe(found, wanted).shards
        files = sorted({header.path for header in shards.where.values()})
        whole_directory(into, partial(_write, found, files, config, None))
    else:
        write = partial(hub.write, made(load(found), wanted))
        whole_directory(into, partial(_write, found, [], config, write))
    click.echo(f"{into}: {key} is {value}; train it on: outsize train --set model.name={into}")
    if key == "factored_weights":
        beside = f"--set plan.approximate=[pela] --set pela.teacher={found}"
        click.echo(f"or first beside the full model: {beside}")


def _unpacked(file: Path, dtype: str | None, into: Path) -> None:
    from outsize.checkpoint.gguf import FLOATS
    from outsize.checkpoint.gguf_model import unpack
    from outsize.errors import OutsizeError

    known = {str(one).removeprefix("torch."): one for one in FLOATS.values()}
    if dtype is not None and dtype not in known:
        raise OutsizeError(f"--dtype is {dtype!r}; expected one of {', '.join(known)}")
    for line in unpack(file, into, None if dtype is None else known[dtype]):
        click.echo(line)


def _coded(found: Path, weights: str, into: Path) -> None:
    """The same model as codes, of which one tensor is in memory at a time."""
    from outsize.checkpoint.hub import describe, read_config, whole_directory, write_as
    from outsize.memory.sizes import format_bytes
    from outsize.models.coding import asked

    _check_plain(found)
    config = asked(read_config(found), weights, "--weights")
    size, described = list[int](), describe(found, config)

    def write(directory: Path) -> None:
        size.append(write_as(described, directory))

    whole_directory(into, partial(_write, found, [], None, write))
    click.echo(f"{into}: {weights}, {format_bytes(sum(size))}")


def _pruned(found: Path, prune: str, into: Path) -> None:
    """The same model with zeros, of which one tensor is in memory at a time."""
    from outsize.checkpoint.hub import CONFIG, describe, whole_directory
    from outsize.checkpoint.pruning import Count, parse, write
    from outsize.errors import OutsizeError

    pruning, count = parse(prune), Count()
    _check_plain(found)
    model = describe(found)
    if (coding := model.model.config.coding) is not None:
        raise OutsizeError(
            f"--prune: {found} holds {coding.format.name}; prune the model that it was made of"
        )
    config = json.loads((found / CONFIG).read_text(encoding="utf-8"))
    write_weights = partial(write, model, pruning, count)
    whole_directory(into, partial(_write, found, [], config, write_weights))
    click.echo(
        f"{into}: {count.zeros:,} of {count.weights:,} weights of the blocks' matrices are zero;"
        f" retrain it: outsize train --set model.name={into} --set adapt.masked_lora.rank=16"
    )


def _check_plain(found: Path) -> None:
    """OutsizeError for the directory of an adapter."""
    from outsize.checkpoint.adapters import ADAPTER_CONFIG
    from outsize.errors import OutsizeError

    if (found / ADAPTER_CONFIG).is_file():
        raise OutsizeError(f"{found} holds an adapter; convert the model that it is beside")


def _write(
    found: Path,
    weights: list[Path],
    config: dict[str, object] | None,
    made: Callable[[Path], None] | None,
    directory: Path,
) -> None:
    """The files of a model: its weights as they lie elsewhere, or those that `made` writes."""
    from outsize.checkpoint.hub import CONFIG, copy_words
    from outsize.checkpoint.shards import INDEX, SUMS
    from outsize.checkpoint.writing import write_json

    if made is not None:
        made(directory)
    copy_words(found, directory)
    beside = () if made is not None else (INDEX, SUMS)
    for path in (*weights, *(found / name for name in beside)):
        if path.is_file():
            shutil.copyfile(path, directory / path.name)
    if config is not None:
        write_json(directory / CONFIG, config)
