"""`outsize convert`: a trained model wired otherwise, to be trained on."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outsize.cli.command import Command

if TYPE_CHECKING:
    from outsize.models.decoder import Decoder


@click.command(cls=Command)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--ladder", metavar="LAYER", type=click.IntRange(0), help="A ladder from LAYER on.")
@click.option("--kraken", metavar="WAYS", type=click.IntRange(2), help="So many ways a layer.")
@click.option("--weights", metavar="FORMAT", help="As codes; outsize keys weights has the formats.")
@click.option(
    "--into", required=True, type=click.Path(path_type=Path), help="A new directory for the model."
)
def convert(
    directory: Path, ladder: int | None, kraken: int | None, weights: str | None, into: Path
) -> None:
    """Write the model in DIRECTORY otherwise.

    With --weights its blocks' matrices are codes of few bits: INTO generates in that memory, and an
    adapter trains beside it. With --ladder or --kraken its branches are wired otherwise, so that on
    a tensor axis their sums run beside what is computed. A ladder's weights are copied as they lie;
    ways have norms and biases of their own. The numbers are others, and want a little training:
    outsize train --set model.name=INTO.
    """
    from outsize.checkpoint.adapters import model_directory
    from outsize.checkpoint.hub import CONFIG, describe, load, whole_directory
    from outsize.errors import OutsizeError
    from outsize.models.families import parse
    from outsize.models.wiring import WIRES

    asked = {"ladder_from": ladder, "kraken_ways": kraken}
    wired = {key: value for key, value in asked.items() if value is not None}
    if len(wired) + (weights is not None) != 1:
        raise OutsizeError(
            "convert: give one of --ladder LAYER, --kraken WAYS and --weights FORMAT"
        )
    found = model_directory(directory)
    if weights is not None:
        _coded(found, weights, into)
        return
    source = json.loads((found / CONFIG).read_text(encoding="utf-8"))
    ((key, value),) = wired.items()
    if source.get(key) is not None:
        raise OutsizeError(f"{found}: {key} is {source[key]} already; convert a plain model")
    config = {**source, key: value}
    wanted, made = parse(config), WIRES.get(key).made  # refused before anything is written
    if made is None:
        shards = describe(found, wanted).shards
        files = sorted({header.path for header in shards.where.values()})
        whole_directory(into, partial(_write, found, files, config, None))
    else:
        model = made(load(found), wanted)
        whole_directory(into, partial(_write, found, [], config, model))
    click.echo(f"{into}: {key} is {value}; train it on: outsize train --set model.name={into}")


def _coded(found: Path, weights: str, into: Path) -> None:
    """The same model as codes, of which there is one tensor at a time beside the weights."""
    from outsize.checkpoint.adapters import ADAPTER_CONFIG
    from outsize.checkpoint.hub import load, read_config, whole_directory
    from outsize.errors import OutsizeError
    from outsize.memory.sizes import format_bytes
    from outsize.models.coding import asked

    if (found / ADAPTER_CONFIG).is_file():
        raise OutsizeError(f"{found} holds an adapter; convert the model that it is beside")
    config = asked(read_config(found), weights, "--weights")
    model = load(found, config=config)
    whole_directory(into, partial(_write, found, [], None, model))
    held = sum(one.nbytes for one in model.parameters())
    click.echo(f"{into}: {weights}, {format_bytes(held)}")


def _write(
    found: Path,
    weights: list[Path],
    config: dict[str, object] | None,
    model: Decoder | None,
    directory: Path,
) -> None:
    """The files of a model: its weights as they lie elsewhere, or those of `model`."""
    from outsize.checkpoint.hub import CONFIG, write
    from outsize.checkpoint.shards import INDEX, SUMS
    from outsize.checkpoint.writing import write_json
    from outsize.train.tokenizer_files import COPIED

    if model is not None:
        write(model, directory)
    beside = COPIED if model is not None else (INDEX, SUMS, *COPIED)
    for path in (*weights, *(found / name for name in beside)):
        if path.is_file():
            shutil.copyfile(path, directory / path.name)
    if config is not None:
        write_json(directory / CONFIG, config)
