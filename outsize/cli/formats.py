"""`outsize formats`: what each format of weights costs a model, in bytes and on held-out text."""

from __future__ import annotations

from pathlib import Path

import click

from outsize.cli.command import Command


@click.command(cls=Command)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--on", "paths", multiple=True, help="Files, half of which is held out; else stdlib.")
@click.option(
    "--tokens", default=4096, show_default=True, type=click.IntRange(1), help="Of the text."
)
@click.option("--weights", "names", multiple=True, help="A format alone; repeatable.")
@click.option("--tokenizer", help="A directory with a tokenizer.json, or bytes.")
def formats(
    directory: Path,
    paths: tuple[str, ...],
    tokens: int,
    names: tuple[str, ...],
    tokenizer: str | None,
) -> None:
    """Load the model in DIRECTORY in one format of weights after another, and print the bytes of
    its parameters, the bits of one, and the bits per byte of held-out text."""
    from outsize.checkpoint.adapters import model_directory, read_config
    from outsize.memory.sizes import format_bytes
    from outsize.screen import FIGURES, console, show, table
    from outsize.serve.formats import measured, text_of

    found = model_directory(directory)
    own = str(found) if (found / "tokenizer.json").is_file() else "bytes"
    text = text_of(paths, tokenizer or own, read_config(found), tokens)
    made = table("weights", "bytes", "bits a parameter", "bits per byte", "more", right=FIGURES)
    first, left = 0.0, []
    for one in measured(found, text, names):
        if one.why:
            left.append(f"{one.name} is left out: {one.why}")
            continue
        first = first or one.text
        more = f"{one.text / first - 1:+.2%}"
        size = format_bytes(one.bytes)
        made.add_row(one.name, size, f"{one.bits:.3f}", f"{one.text:.4f}", more)
    show(console(), made)
    for why in left:
        click.echo(why)
    click.echo(f"on {text.tokens:,} held-out tokens, {int(text.bytes):,} bytes")
