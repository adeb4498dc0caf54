"""`outsize formats`: each format of a model's weights in bytes, on held-out text and in speed."""

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
    its parameters, the bits of one, the bits per byte of held-out text, and tokens a second."""
    from outsize.checkpoint.adapters import model_directory, read_config
    from outsize.memory.sizes import format_bytes
    from outsize.screen import FIGURES, console, show, table
    from outsize.serve.formats import DEPTH, PROMPT, SEVERAL, measured, text_of

    found = model_directory(directory)
    own = str(found) if (found / "tokenizer.json").is_file() else "bytes"
    text = text_of(paths, tokenizer or own, read_config(found), tokens)
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
