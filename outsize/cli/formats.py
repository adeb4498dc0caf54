"""`outsize formats`: each format of a model's weights in bytes, on held-out text and in speed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outsize.cli.command import Command

if TYPE_CHECKING:
    from outsize.data import DataConfig


@click.command(cls=Command)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--on", "paths", multiple=True, help="Files, half of which is held out; else stdlib.")
@click.option(
    "--tokens", default=4096, show_default=True, type=click.IntRange(1), help="Of the text."
)
@click.option("--weights", "names", multiple=True, help="A format alone; repeatable.")
@click.option("--tokenizer", help="A directory with a tokenizer.json, or bytes.")
@click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", help="A key of data, as in runs."
)
def formats(
    directory: Path,
    paths: tuple[str, ...],
    tokens: int,
    names: tuple[str, ...],
    tokenizer: str | None,
    sets: tuple[str, ...],
) -> None:
    """Load the model in DIRECTORY in one format of weights after another, and print the bytes of
    its parameters, the bits of one, the bits per byte of held-out text (of chats, of the answers),
    and tokens a second."""
    from outsize.checkpoint.adapters import model_directory, read_config, tokenizer_directory
    from outsize.errors import OutsizeError
    from outsize.memory.sizes import format_bytes
    from outsize.screen import FIGURES, console, show, table
    from outsize.serve.formats import DEPTH, PROMPT, SEVERAL, measured, row_of, text_of

    found = model_directory(directory)
    if sets and not paths:
        raise OutsizeError("--set is of the data of --on; give --on FILE")
    config, folder = read_config(found), tokenizer_directory(found)
    named = tokenizer or (str(folder) if (folder / "tokenizer.json").is_file() else "bytes")
    text = text_of(_data(paths, sets, named, row_of(config, tokens)), config, tokens)
    speeds = ("prompt tokens/s", "tokens/s of 1", f"of {SEVERAL}")
    heads = ("weights", "bytes", "bits a parameter", "bits per byte", "more", *speeds)
    made = table(*heads, right=FIGURES)
    first, left = 0.0, []
    for one in measured(found, text, names):
        if one.why:
            left.append(f"{one.name} is left out: {one.why}")
            continue
        first = first or one.text
        more = f"{one.text / first - 1:+.2%}"
        size = format_bytes(one.bytes)
        speed = (one.speed.prompt, one.speed.one, one.speed.several)
        rates = (f"{rate:,.0f}" if rate >= 10 else f"{rate:.2f}" for rate in speed)
        made.add_row(one.name, size, f"{one.bits:.3f}", f"{one.text:.4f}", more, *rates)
    show(console(), made)
    for why in left:
        click.echo(why)
    click.echo(f"on {text.tokens:,} held-out tokens, {int(text.bytes):,} bytes")
    click.echo(
        f"tokens/s: foretold as outsize serve does, from steps timed here: a prompt of {PROMPT}"
        f" tokens, and new tokens of 1 and of {SEVERAL} requests behind {DEPTH} each"
    )


def _data(paths: tuple[str, ...], sets: tuple[str, ...], tokenizer: str, row: int) -> DataConfig:
    """Half of some files is held out; without these, a part of the standard library."""
    from outsize.cli.evaluate import keys_of
    from outsize.data import DataConfig
    from outsize.train.recipe import data_config

    if not paths:
        return DataConfig(tokenizer=tokenizer)
    return replace(data_config(keys_of(paths, sets, row), tokenizer), validation=0.5)
