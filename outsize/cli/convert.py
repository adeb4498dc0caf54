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
@click.option(
    "--into", required=True, type=click.Path(path_type=Path), help="A new directory for the model."
)
def convert(directory: Path, ladder: int | None, kraken: int | None, into: Path) -> None:
    """Write the model in DIRECTORY with its branches wired otherwise, so that on a tensor axis
    their sums run beside what is computed. A ladder's weights are copied as they lie; ways have
    norms and biases of their own. The numbers are others, and want a little training: outsize train
    --set model.name=INTO.
    """
    from outsize.checkpoint.adapters import model_directory
    from outsize.checkpoint.hub import CONFIG, describe, load, whole_directory
    from outsize.errors import OutsizeError
    from outsize.models.families import parse
    from outsize.models.wiring import WIRES

    asked = {"ladder_from": ladder, "kraken_ways": kraken}
    wired = {key: value for key, value in asked.items() if value is not None}
    if len(wired) != 1:
        raise OutsizeError("convert: give one of --ladder LAYER and --kraken WAYS")
    found = model_directory(directory)
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


def _write(
    found: Path,
    weights: list[Path],
    config: dict[str, object],
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
    write_json(directory / CONFIG, config)
